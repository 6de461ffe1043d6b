"""MLflow. Imported only where a recipe asks for it: mlflow is an optional package.

User and password or token of a server are the package's own affair: MLFLOW_TRACKING_USERNAME,
MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN.
"""

import json
import time
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from megaspec.core.regular_files import make_folder_inside
from megaspec.log.events import Event, RoutersDone, RunEnded, Sampled, StepDone
from megaspec.log.remote import flat, logged_run, note_remote_run, remote_run, status_of
from megaspec.log.scalars import scalars
from megaspec.log.spec import MlflowSpec

FOLDER = "mlflow"
DATABASE = "mlflow.db"
STATUSES = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
# What a server takes: characters of a parameter's value, and numbers and parameters of one request.
MOST_CHARACTERS = 6000
MOST_METRICS = 1000
MOST_PARAMS = 100
MILLISECONDS_PER_SECOND = 1000


class MlflowSink:
    """A run of an experiment. Steps that it has already are passed over when they are taken again after a kill."""

    def __init__(self, spec: MlflowSpec, run_dir: Path, step: int):
        run = logged_run(run_dir)
        uri = spec.tracking_uri
        artifacts = None
        if uri is None:
            make_folder_inside(run_dir, FOLDER)
            folder = (run_dir / FOLDER).resolve()
            uri = f"sqlite:///{folder / DATABASE}"
            artifacts = folder.as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        place = f"mlflow:{spec.tracking_uri or 'run folder'}:{spec.experiment}"
        known = remote_run(run_dir, place)
        self._status = "failed"
        self._last_step = 0
        if known.id is None:
            tags = {"megaspec.run_dir": str(run_dir)}
            if known.parent is not None:
                tags["mlflow.parentRunId"] = known.parent
            experiment = self._experiment_id(spec.experiment, artifacts)
            made = self._client.create_run(experiment, run_name=run.name, tags=tags)
            self._id = made.info.run_id
            note_remote_run(run_dir, place, self._id)
            self._write_params(flat(run.spec), known={})
        else:
            self._id = known.id
            data = self._client.get_run(self._id).data
            self._last_step = int(data.metrics.get("step", 0))
            self._client.update_run(self._id, status="RUNNING")
            self._write_params(flat(run.spec), known=data.params)
        self._client.log_dict(self._id, run.spec, "spec.json")

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            # also of a start that did not get as far as the one before it
            self._status = status_of(event)
            return
        # an evaluation of the last step may not have come there
        is_step = isinstance(event, StepDone | RoutersDone)
        if event.step < self._last_step or (is_step and event.step == self._last_step):
            return
        numbers = scalars(event)
        if isinstance(event, StepDone):
            numbers["step"] = event.step
        self._write_metrics(numbers, event.step)
        if isinstance(event, Sampled):
            self._client.log_text(self._id, event.prompt + event.text, f"samples/step-{event.step}.txt")

    def close(self) -> None:
        """Says how the run ended."""
        self._client.set_tag(self._id, "megaspec.status", self._status)
        self._client.set_terminated(self._id, status=STATUSES[self._status])

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        return self._client.create_experiment(name, artifact_location=artifacts)

    def _write_metrics(self, numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * MILLISECONDS_PER_SECOND)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST_METRICS])

    def _write_params(self, values: dict[str, Any], *, known: dict[str, str]) -> None:
        """A parameter can't be written twice: one that a resume has changed becomes a tag beside it."""
        params = []
        tags = []
        for name, value in values.items():
            text = _text(value)[:MOST_CHARACTERS]
            if name not in known:
                params.append(Param(name, text))
            elif known[name] != text:
                tags.append(RunTag(f"resumed.{name}", text))
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])
        for start in range(0, len(tags), MOST_PARAMS):
            self._client.log_batch(self._id, tags=tags[start : start + MOST_PARAMS])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)
