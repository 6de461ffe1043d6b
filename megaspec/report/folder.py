"""All that a run's folder tells, for a page. Torch-free.

spec.json is read as plain data: a page needs no plug-in of the run, and shows runs of other versions. What is missing
or damaged beside it is told on the page.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspec.checkpoint.fallback import fallback_dir_in, file_elsewhere, saved_anywhere
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import CheckpointError, DataError
from megaspec.core.frozen import MOST
from megaspec.core.regular_files import read_inside
from megaspec.core.units import counted
from megaspec.launcher.attempts import ATTEMPTS, Attempt, read_attempts
from megaspec.launcher.exit_file import Exit, read_exit
from megaspec.log.environment import FILE_NAME as ENVIRONMENT
from megaspec.log.prediction import FILE_NAME as PREDICTION
from megaspec.log.prediction import Prediction
from megaspec.log.remote import flat
from megaspec.log.sinks import METRICS
from megaspec.report.history import History, known_number

SPEC = "spec.json"
REPORT = "report.html"


@dataclass
class RunFolder:
    """A run as its folder tells; `read` again brings it up to date."""

    path: Path
    spec: dict[str, Any] = field(default_factory=dict)
    history: History = field(init=False)
    prediction: Prediction | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    """Those that a supervisor made."""
    exit: Exit | None = None
    kept_steps: frozenset[int] = frozenset()
    """Steps of the checkpoints that are there."""
    troubles: list[str] = field(default_factory=list)
    """What could not be read."""

    def __post_init__(self) -> None:
        self.history = History(self.path)

    def read(self) -> None:
        """Reads what there is now. DataError: spec.json can't be read."""
        self.troubles = []
        try:
            self.spec = self._object(SPEC)
        except FileNotFoundError:
            raise DataError(f"{self.path / SPEC} is gone: the folder holds no run any more") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / SPEC} can't be read: {_why(error)}") from None
        self.history.elsewhere = file_elsewhere(fallback_dir_in(self.spec), self.path, METRICS)
        self.history.follow()
        self.prediction = self._prediction()
        self.environment = self._environment()
        self.attempts = self._attempts()
        self.exit = read_exit(self.path)
        self.kept_steps = self._kept_steps()
        self.troubles += self._troubles_of_metrics()

    @property
    def name(self) -> str:
        """The run's name, or else its folder's."""
        name = self.spec.get("name")
        return name if isinstance(name, str) and name else self.path.name

    def setting(self, path: str) -> Any:
        """The value at a dotted path of the Spec; None where there is none."""
        value: Any = self.spec
        for part in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(part)
        return value

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted path; without what was decided and why."""
        return flat({name: value for name, value in self.spec.items() if name != "decisions"})

    def decisions(self) -> list[dict[str, Any]]:
        """What was decided for the user: key, value, reason."""
        found = self.spec.get("decisions")
        if not isinstance(found, list):
            return []
        return [one for one in found if isinstance(one, dict)]

    @property
    def n_restarts(self) -> int:
        """How often ranks were started again: a start that a later one went back behind stands in attempts alone."""
        return max(0, self.history.count["start"] - 1, len(self.attempts) - 1)

    @property
    def planned_seconds(self) -> float | None:
        """Of a step at the full batch; None where the machine's speeds are not known."""
        if self.prediction is None or self.prediction.step_seconds is None:
            return None
        return known_number(sum(self.prediction.step_seconds.values())) or None

    @property
    def planned_tokens_per_second(self) -> float | None:
        """Of all ranks together, masked tokens counted."""
        batch = known_number(self.setting("train.global_batch"))
        length = known_number(self.setting("data.seq_len"))
        if self.planned_seconds is None or batch is None or length is None:
            return None
        return known_number(batch * length / self.planned_seconds)

    @property
    def planned_mfu(self) -> float | None:
        """With half of the attention scores counted, as `mfu_causal`."""
        speed = self.planned_tokens_per_second
        ranks = known_number(self.setting("world_size"))
        if self.prediction is None or self.prediction.peak_flops is None or speed is None or not ranks:
            return None
        return known_number(speed * self.prediction.flops_per_token_causal / ranks / self.prediction.peak_flops)

    def _object(self, name: str) -> dict[str, Any]:
        """OSError, ValueError: there is no such object."""
        content = parse_json(read_inside(self.path, name, limit=MAX_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content

    def _prediction(self) -> Prediction | None:
        try:
            prediction = Prediction.model_validate_json(read_inside(self.path, PREDICTION, limit=MAX_BYTES))
            _check_sizes(prediction)
            return prediction
        except FileNotFoundError:
            self.troubles.append(f"{PREDICTION} is not there: nothing is known of the plan")
        except (OSError, ValueError, ValidationError) as error:
            self.troubles.append(f"{PREDICTION} can't be read, so nothing is known of the plan: {_why(error)}")
        return None

    def _environment(self) -> dict[str, Any]:
        try:
            return self._object(ENVIRONMENT)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self.troubles.append(f"{ENVIRONMENT} can't be read: {_why(error)}")
            return {}

    def _attempts(self) -> tuple[Attempt, ...]:
        try:
            found = read_attempts(self.path)
        except OSError as error:
            self.troubles.append(f"{ATTEMPTS} can't be read: {_why(error)}")
            return ()
        if found.damaged:
            count = "1 line tells"
            if len(found.damaged) > 1:
                count = f"{len(found.damaged):,} lines tell"
            self.troubles.append(f"{count} of no attempt and can't be shown; the first: {found.damaged[0]}")
        return found.attempts

    def _kept_steps(self) -> frozenset[int]:
        try:
            return frozenset(saved_anywhere(self.path, fallback_dir_in(self.spec)).steps)
        except CheckpointError as error:
            self.troubles.append(str(error))
            return frozenset()

    def _troubles_of_metrics(self) -> Iterator[str]:
        history = self.history
        if not history.is_there and not history.trouble:
            yield f"{history.path.name} is not there yet: no rank has begun"
        if history.trouble:
            yield history.trouble
        if history.is_elsewhere:
            yield f"the newest lines are read from {history.elsewhere}: the run folder has no room for them"
        if history.is_cut:
            yield f"{history.path.name} ends inside of a line, which is not shown: it is just being written, or was cut"
        if history.n_cut:
            yield f"{counted(history.n_cut, 'event')} of {history.path.name} hold more than is shown of them"
        if history.passed_over:
            count = "1 line is"
            if history.passed_over > 1:
                count = f"{history.passed_over:,} lines are"
            yield f"{count} no event of a run and not shown; the first: {history.first_passed_over}"


def _check_sizes(prediction: Prediction) -> None:
    """ValueError: a part of the memory is larger than any machine's, so that sums of it are no numbers."""
    for stage in prediction.memory:
        for kind, size in stage.items():
            if size > MOST:
                raise ValueError(f"memory.{kind} is more than {MOST:,} bytes")


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    return str(error).splitlines()[0]
