"""What the runs of a sweep have come to so far, from their metrics.jsonl. Torch-free."""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megaspec.log.follow import LineFollower, count_of

# Steps of one run that are kept: two thousand times those of a usual sweep.
MOST_STEPS = 1_000_000


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


class Follower(LineFollower):
    """What the run of a metrics.jsonl that grows has come to."""

    def forget(self) -> None:
        """Nothing is known of the run."""
        self.result = RunResult()

    def read(self) -> RunResult:
        """What the run has come to."""
        self.follow()
        self.result.passed_over = self.passed_over
        self.result.first_passed_over = self.first_passed_over
        self.result.trouble = self.trouble
        return self.result

    def take(self, event: dict[str, Any]) -> None:
        """Takes an event in. ValueError, KeyError, TypeError, OverflowError: it is none."""
        kind = event.get("event")
        if kind == "end":
            self.result.is_done = event["how"] == "done"
        elif kind == "start":
            self._start(count_of(event, "step"), count_of(event, "steps"))
        elif kind == "step":
            # all of the event is read before any of it is kept: one that is broken leaves nothing behind
            step = count_of(event, "step")
            loss = float(event["loss"])
            # tokens per second
            speed = float(event["sequence_tokens"]) / max(float(event["seconds"]), 1e-9)
            self.result.steps = count_of(event, "steps")
            _put(self.result.loss, step, loss)
            _put(self.result.speed, step, speed)
        elif kind == "eval":
            _put(self.result.valid_loss, count_of(event, "step"), float(event["loss"]))

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


def is_better(one: float, other: float, direction: str) -> bool:
    """Whether a metric beats another; one that is not finite beats none."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.isfinite(one)
    if direction == "minimize":
        return one < other
    return one > other
