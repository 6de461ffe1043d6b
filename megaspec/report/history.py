"""What metrics.jsonl tells of a run, kept small: numbers of steps as arrays, all else as lists of bounded length.

Torch-free.
"""

import math
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megaspec.log.follow import LineFollower, count_of

MOST_STEPS = 2_000_000
"""Steps that are kept: some 200 MB. Later ones are passed over, and that is told."""
MOST_EVENTS = 20_000
"""Of each kind of event but steps; of more the newest are kept."""
MOST_SETS = 64
"""Evaluation sets, and phases, of one event that are kept."""
MOST_TEXT = 4_000
"""Characters of a text that is kept."""
STEP_NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu_causal",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "forward_backward_seconds",
    "reduce_gradients_seconds",
    "optimizer_seconds",
)
"""Keys of a step that are kept; nan stands for one that is not known, too."""
EVENTS = (
    "start",
    "skip",
    "rollback",
    "left_out",
    "hardware",
    "slow",
    "pace",
    "memory",
    "profile",
    "alert",
    "eval",
    "checkpoint",
    "sample",
    "end",
)
"""Events that are kept as they are."""


@dataclass
class Steps:
    """Numbers of steps, in the order of steps."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    numbers: "dict[str, array[float]]" = field(default_factory=lambda: {name: array("d") for name in STEP_NUMBERS})

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Step and number of each step of which the number is there."""
        found = []
        for step, value in zip(self.steps, self.numbers[name], strict=True):
            # of a loss and a gradient norm nan is a finding, of all else it is not known
            if not math.isnan(value) or name in ("loss", "grad_norm"):
                found.append((step, value))
        return found

    def last(self, name: str) -> float | None:
        """Of the last step; None where there is none, or it is not known."""
        if not self.steps or math.isnan(self.numbers[name][-1]):
            return None
        return self.numbers[name][-1]

    def usual(self, name: str) -> float | None:
        """The median over all steps of which it is known."""
        known = [value for value in self.numbers[name] if math.isfinite(value)]
        return median(known) if known else None

    def most(self, name: str) -> float | None:
        """The largest that is known."""
        return max((value for value in self.numbers[name] if math.isfinite(value)), default=None)


class History(LineFollower):
    """A metrics.jsonl, followed."""

    def forget(self) -> None:
        """Nothing is known of the run."""
        self.steps = Steps()
        self.n_steps = 0
        """Of the whole run; 0 until it has started."""
        self.last_time: float | None = None
        """When the last line was written, in seconds since 1970."""
        self.events: dict[str, deque[dict[str, Any]]] = {name: deque(maxlen=MOST_EVENTS) for name in EVENTS}
        self.count = dict.fromkeys(EVENTS, 0)
        """How many of each kind there were, those that are not kept too."""
        self.n_cut = 0
        """Events of which something is not kept: lists and texts that are too long."""

    def take(self, event: dict[str, Any]) -> None:
        """Takes an event in. ValueError, KeyError, TypeError, OverflowError: it is none."""
        kind = event.get("event")
        step = count_of(event, "step")
        time = number_of(event.get("time"))
        if kind == "step":
            n_steps = count_of(event, "steps")
            numbers = [number_of(event.get(name)) for name in STEP_NUMBERS]
            self._put(step, numbers)
            self.n_steps = n_steps
        elif kind == "start":
            self.n_steps = count_of(event, "steps")
            self._go_back(step)
            self._keep("start", event)
        elif isinstance(kind, str) and kind in EVENTS:
            self._keep(kind, event)
        if math.isfinite(time):
            self.last_time = time

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind that are kept, the oldest first."""
        return list(self.events[kind])

    @property
    def ended(self) -> str | None:
        """How the last start ended; None while it goes on, or where it was killed."""
        starts = self.events["start"]
        ends = self.events["end"]
        if not ends or (starts and starts[-1]["order"] > ends[-1]["order"]):
            return None
        return str(ends[-1].get("how"))

    def _put(self, step: int, numbers: list[float]) -> None:
        """Adds a step. ValueError: it does not come behind the last one, or there are too many."""
        steps = self.steps.steps
        if steps and step <= steps[-1]:
            raise ValueError(f"step {step} comes after step {steps[-1]}")
        if len(steps) >= MOST_STEPS:
            raise ValueError(f"more than {MOST_STEPS:,} steps")
        steps.append(step)
        for name, value in zip(STEP_NUMBERS, numbers, strict=True):
            self.steps.numbers[name].append(value)

    def _go_back(self, step: int) -> None:
        """The run goes on after `step`: what came later comes again."""
        kept = bisect_right(self.steps.steps, step)
        del self.steps.steps[kept:]
        for values in self.steps.numbers.values():
            del values[kept:]
        for kind in ("eval", "checkpoint"):
            while self.events[kind] and self.events[kind][-1]["step"] > step:
                self.events[kind].pop()
                self.count[kind] -= 1

    def _keep(self, kind: str, event: dict[str, Any]) -> None:
        """Keeps an event, with its place among all, without what would be endless in it."""
        kept = {name: _bounded(value) for name, value in list(event.items())[:MOST_SETS]}
        self.n_cut += kept != event
        kept["order"] = self.line
        self.events[kind].append(kept)
        self.count[kind] += 1


def number_of(value: Any) -> float:
    """A number of an event, which may be the text nan, inf or -inf; nan for null and for what is not there.

    TypeError, OverflowError: it is none.
    """
    if value is None:
        return math.nan
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number is none")
    return float(value)


def known_number(value: Any) -> float | None:
    """The same, and None for what is no number, or not finite."""
    try:
        number = number_of(value)
    except (TypeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _bounded(value: Any, depth: int = 3) -> Any:
    """A value without its end where that is far away."""
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, dict):
        if depth == 0:
            return {}
        return {name[:MOST_TEXT]: _bounded(one, depth - 1) for name, one in list(value.items())[:MOST_SETS]}
    if isinstance(value, list):
        if depth == 0:
            return []
        return [_bounded(one, depth - 1) for one in value[:MOST_SETS]]
    return value
