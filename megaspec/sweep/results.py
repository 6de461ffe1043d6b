"""What the runs of a sweep have come to so far, from their metrics.jsonl. Torch-free."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.frozen import MOST
from megaspec.core.regular_files import open_inside
from megaspec.log.jsonl import MAX_LINE
from megaspec.log.sinks import METRICS

# What is read of one file, and steps of it that are kept: two thousand times those of a usual sweep.
MOST_BYTES, MOST_STEPS = 1 << 30, 1_000_000


@dataclass
class RunResult:
    """Numbers of one run, by step."""

    steps: int = 0
    """Of the whole run; 0 until it has started."""
    loss: dict[int, float] = field(default_factory=dict)
    valid_loss: dict[int, float] = field(default_factory=dict)
    speed: dict[int, float] = field(default_factory=dict)
    """Tokens per second of a step."""
    is_done: bool = False
    """The run has said that all steps are done."""
    passed_over: int = 0
    """Lines that are no event of a run."""
    first_passed_over: str = ""
    """Which was the first of them, and why."""
    trouble: str = ""
    """Why the file can't be read, or not to its end; begins with its path."""

    @property
    def step(self) -> int:
        """The last step that is done."""
        return max(self.loss, default=0)

    def metric(self, name: str) -> float | None:
        """`loss`, `valid_loss`: of the last step that has one; `tokens_per_second`: the median. None: nothing yet."""
        values = self.curve(name)
        if not values:
            return None
        if name == "tokens_per_second":
            return median(values.values())
        return values[max(values)]

    def curve(self, name: str) -> dict[int, float]:
        """A number by step."""
        return {"loss": self.loss, "valid_loss": self.valid_loss, "tokens_per_second": self.speed}[name]


class Follower:
    """Reads a metrics.jsonl that grows, each line once, and from its beginning again when it was cut.

    The file may be anybody's: what is no event of a run is passed over and told, and no file makes `read` raise, or
    take more than so much memory and time.
    """

    def __init__(self, folder: Path, name: str | Path = METRICS):
        """`folder / name`; below `folder` no link is followed."""
        self._folder = folder
        self._name = Path(name)
        self.path = folder / name
        self.restart()

    def restart(self) -> None:
        """Forget what was read: the run goes on from an earlier step."""
        self.result = RunResult()
        self._offset = 0
        self._line = 0
        self._is_inside = False
        """The last block ended inside of a line that is too long."""

    def read(self) -> RunResult:
        """What the run has come to."""
        self.result.trouble = ""
        try:
            with open(open_inside(self._folder, self._name), "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self.restart()
                file.seek(self._offset)
                self._take_lines(file)
        except FileNotFoundError:
            return self.result
        except OSError as error:
            self.result.trouble = f"{self.path} {error.strerror}"
        return self.result

    def _take_lines(self, file: BinaryIO) -> None:
        while line := file.readline(MAX_LINE):
            is_end = line.endswith(b"\n")
            if not is_end and len(line) < MAX_LINE:
                return  # it is just being written
            if self._offset >= MOST_BYTES:
                self.result.trouble = f"{self.path} has more than {MOST_BYTES:,} bytes; the rest is not read"
                return
            self._offset += len(line)
            if not self._is_inside:
                self._line += 1
                self._take_or_tell(line if is_end else None)
            self._is_inside = not is_end

    def _take_or_tell(self, line: bytes | None) -> None:
        """Takes a line in. `None`: one of more than MAX_LINE bytes."""
        try:
            if line is None:
                raise ValueError(f"longer than {MAX_LINE:,} bytes")
            self._take(parse_json(line))
        except KeyError as error:
            self._pass_over(f"it lacks {error}")
        except (ValueError, TypeError, OverflowError) as error:
            # also where the file was cut and has grown past the place that was read to
            self._pass_over(str(error))

    def _pass_over(self, why: str) -> None:
        """Counts a line that is no event of a run, and keeps why the first of them is none."""
        self.result.passed_over += 1
        if self.result.passed_over == 1:
            self.result.first_passed_over = f"{self.path}:{self._line}: {why}"

    def _take(self, event: dict[str, Any]) -> None:
        """Takes an event in. ValueError, KeyError, TypeError, OverflowError: it is none."""
        if not isinstance(event, dict):
            raise TypeError("no object")
        kind = event.get("event")
        if kind == "end":
            self.result.is_done = event["how"] == "done"
        elif kind == "start":
            self._start(_count(event, "step"), _count(event, "steps"))
        elif kind == "step":
            # all of the event is read before any of it is kept: one that is broken leaves nothing behind
            step = _count(event, "step")
            loss = float(event["loss"])
            # tokens per second
            speed = float(event["sequence_tokens"]) / max(float(event["seconds"]), 1e-9)
            self.result.steps = _count(event, "steps")
            _put(self.result.loss, step, loss)
            _put(self.result.speed, step, speed)
        elif kind == "eval":
            _put(self.result.valid_loss, _count(event, "step"), float(event["loss"]))

    def _start(self, step: int, steps: int) -> None:
        """The run has begun, or goes on after `step`: what came later comes again."""
        self.result.steps = steps
        self.result.is_done = False
        for curve in (self.result.loss, self.result.valid_loss, self.result.speed):
            # from the end on: looking at every step at every start would take quadratic time
            while curve and next(reversed(curve)) > step:
                curve.popitem()


def _put(curve: dict[int, float], step: int, value: float) -> None:
    """Adds a step to a curve, whose steps rise. ValueError: it belongs further back, or there are too many."""
    last = next(reversed(curve), -1)
    if step < last and step not in curve:
        raise ValueError(f"step {step} comes after step {last}")
    if step > last and len(curve) >= MOST_STEPS:
        raise ValueError(f"more than {MOST_STEPS:,} steps")
    curve[step] = value


def _count(event: dict[str, Any], name: str) -> int:
    """A whole number of an event that counts something. KeyError, ValueError."""
    value = event[name]
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{name} is no count")
    return value


def is_better(one: float, other: float, direction: str) -> bool:
    """Whether a metric beats another; one that is not finite beats none."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.isfinite(one)
    if direction == "minimize":
        return one < other
    return one > other
