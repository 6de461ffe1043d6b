"""Two lives and a fork of a run, as services have kept them offline. Each needs the package of its extra."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.log.events import EvalDone
from megaspec.log.remote import hand_down
from megaspec.log.spec import WandbSpec
from tests.faults.runs import make_run, recipe
from tests.log import services_reading
from tests.log.events_for_tests import step_done

ROOT = Path(__file__).parents[2]

LIVES = """
import sys
from pathlib import Path
from megaspec.log.events import EvalDone, RunEnded, Sampled
from megaspec.log.sinks import open_sinks
from megaspec.log.spec import LogSpec
from tests.log.events_for_tests import step_done

kind, run, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
entry = {"kind": kind}
if kind == "wandb":
    entry["mode"] = "offline"
log = LogSpec.model_validate({"console": "quiet", "tensorboard": False, "sinks": (entry,)})


def live(steps, how, resumed=0):
    with open_sinks(log, run, step=resumed) as emit:
        for step in steps:
            emit(step_done(step, loss=10.0 + step + resumed / 100))
        emit(EvalDone(step=steps[-1], loss=2.5, sets={"valid": 2.5}, tokens={"valid": 9}, seconds=1.0))
        if how == "done":
            emit(Sampled(step=steps[-1], prompt="a <b> ", text="c"))
        emit(RunEnded(step=steps[-1], how=how))


if what == "fork":
    live(range(1, 3), "failed")
elif what == "behind":
    live(range(1, 7), "failed")
    live(range(3, 5), "Preempted", resumed=2)
else:
    live(range(1, 5), "Preempted")
    live(range(3, 7), "done", resumed=2)
"""


def needs(package):
    installed = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not installed, reason=f"{package} is not installed: pip install 'megaspec[{package}]'")


def live(kind, run, what="run"):
    """In a process of its own: a package that is loaded stays, with what it was set to."""
    # no home: no key, and no settings of whoever runs this
    environment = os.environ | {"HOME": str(run.parent), "WANDB_API_KEY": "", "HF_TOKEN": ""}
    command = [sys.executable, "-c", LIVES, kind, str(run), what]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "log.sinks.0" not in done.stderr


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", recipe())


@pytest.fixture
def fork(run, tmp_path):
    """A folder that is made a fork of `run` when it is called."""

    def make():
        folder = make_run(tmp_path / "fork", recipe(seed=2))
        hand_down(run, folder)
        return folder

    return make


def only_id(run):
    ((_, found),) = json.loads((run / "remote_runs.json").read_text())["runs"].items()
    return found


@needs("wandb")
def test_wandb(run, fork):
    live("wandb", run)
    first, second = services_reading.wandb_runs(run)
    run_id = only_id(run)
    assert first["id"] == second["id"] == run_id
    assert first["name"] == "broken"
    assert first["config"]["model"]["d_model"] == 16
    assert [line["loss"] for line in first["history"] if "loss" in line] == [11.0, 12.0, 13.0, 14.0]
    assert [line["_step"] for line in second["history"] if "loss" in line] == [3, 4, 5, 6]
    last = second["history"][-1]
    assert last["eval/loss"] == 2.5
    assert last["sample/_type"] == "html-file", last
    assert first["summary"]["status"] == "preempted"
    assert (first["code"], first["is_preempting"]) == (75, True)
    assert second["summary"]["status"] == "finished"
    assert second["code"] == 0
    # a link to the newest, as wandb makes, would be followed by who copies the folder
    assert not (run / "wandb" / "latest-run").exists()

    child = fork()
    live("wandb", child, "fork")
    (kept,) = services_reading.wandb_runs(child)
    assert kept["id"] != run_id
    assert kept["group"] == first["group"] == run_id
    assert kept["config"]["parent_run"] == run_id
    assert kept["code"] == 1


class OnlineRun:
    """What wandb.init gives of a run that the service knows up to a step: it drops rows of that step and earlier."""

    def __init__(self, last_step):
        self.step = last_step + 1
        self.config = {}
        self.rows = []

    def log(self, numbers, *, step):
        if step >= self.step:
            self.step = step
            self.rows.append((step, numbers))


@needs("wandb")
def test_wandb_gets_an_evaluation_that_is_made_up_for(run, monkeypatch):
    import wandb

    from megaspec.log.wandb import WandbSink

    online = OnlineRun(last_step=4)
    monkeypatch.setattr(wandb, "init", lambda **_: online)
    sink = WandbSink(WandbSpec(kind="wandb"), run, 4)
    # stopped in the evaluation of step 4
    sink(EvalDone(step=4, loss=2.0, sets={"valid": 2.0}, tokens={"valid": 9}, seconds=1.0))
    sink(step_done(5))
    assert [step for step, _ in online.rows] == [5, 5]
    assert online.rows[0][1]["eval/loss"] == 2.0


@needs("mlflow")
@pytest.mark.slow
def test_mlflow(run, fork):
    live("mlflow", run)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow/mlflow.db")
    found = client.get_run(only_id(run))
    assert found.info.run_name == "broken"
    assert found.info.status == "FINISHED"
    assert found.data.tags["megaspec.status"] == "finished"
    assert found.data.params["model.d_model"] == "16"
    # each step once, the first time that it was taken
    history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "loss")}
    assert len(client.get_metric_history(found.info.run_id, "loss")) == 6
    assert history == {1: 11.0, 2: 12.0, 3: 13.0, 4: 14.0, 5: 15.02, 6: 16.02}
    assert found.data.metrics["eval/loss"] == 2.5
    (sample,) = run.glob("mlflow/**/samples/step-6.txt")
    assert sample.read_text() == "a <b> c"
    assert list(run.glob("mlflow/**/spec.json"))

    child = fork()
    live("mlflow", child, "fork")
    client = MlflowClient(tracking_uri=f"sqlite:///{child}/mlflow/mlflow.db")
    kept = client.get_run(only_id(child))
    assert kept.data.tags["mlflow.parentRunId"] == found.info.run_id
    assert kept.info.status == "FAILED"


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_is_told_how_a_start_ended_that_did_not_get_as_far_as_the_one_before(run):
    live("mlflow", run, "behind")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow/mlflow.db")
    found = client.get_run(only_id(run))
    assert found.data.tags["megaspec.status"] == "preempted"
    assert found.info.status == "KILLED"
    assert [m.step for m in client.get_metric_history(found.info.run_id, "loss")] == [1, 2, 3, 4, 5, 6]


@needs("trackio")
def test_trackio(run, fork):
    live("trackio", run)
    rows = services_reading.trackio_rows(run / "trackio" / "megaspec.db")
    assert {name for name, _, _ in rows} == {only_id(run)}
    assert only_id(run).startswith("broken-")
    losses = [(step, numbers["loss"]) for _, step, numbers in rows if "loss" in numbers]
    assert losses == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 14.0), (3, 13.02), (4, 14.02), (5, 15.02), (6, 16.02)]
    assert [numbers["status"] for _, _, numbers in rows if "status" in numbers] == ["preempted", "finished"]
    assert any("sample" in numbers for _, _, numbers in rows)

    child = fork()
    live("trackio", child, "fork")
    kept = services_reading.trackio_rows(child / "trackio" / "megaspec.db")
    assert {name for name, _, _ in kept} == {only_id(child)}
    assert only_id(child) != only_id(run)
