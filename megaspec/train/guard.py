"""What a run does about NaN, infinities and spikes: a pure function of the numbers that its steps logged. Torch-free.

Note "Replayable". All ranks judge the same numbers and come to the same verdict without a word to each other. What a
step is held to is known two steps before it (`limits`), so that a GPU never waits for the host: it decides by itself
whether it applies the update, and the host reads one step later why. What is kept here lies in checkpoints; a run that
goes on from one comes to the same verdicts.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, Literal

from megaspec.train.spec import NumbersSpec, SkippedSteps, SpikesSpec

# A median absolute deviation of a normal distribution is this part of its standard deviation.
_MAD_TO_SIGMA = 1.4826
# Values that are nearly equal have no deviation to be measured by: it is taken to be at least this part of the median.
_LEAST_SIGMA = 0.01
# A step is held to values up to the last but one before it: those of the last may still be on their way from the GPU.
_LAG = 2

Kind = Literal["nonfinite", "spike"]
Action = Literal["skip", "roll_back", "stop"]


@dataclass(frozen=True)
class Limits:
    """What a step's numbers must not exceed."""

    loss: float = inf
    grad_norm: float = inf


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Window:
    """Steps whose data is left out, the last one included."""

    first: int
    last: int

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


@dataclass(frozen=True)
class Verdict:
    """What is done about a step whose update was not applied."""

    step: int
    kind: Kind
    action: Action
    limits: Limits
    """That it was held to."""
    recent: tuple[int, ...]
    """Steps whose update was skipped within the last `within`, this one included."""
    window: Window
    """To be left out where the run goes back."""


@dataclass
class Guard:
    """Judges step after step. `told`: what the recipe leaves out from the start."""

    spec: NumbersSpec
    told: Sequence[SkippedSteps] = ()
    rollbacks: int = 0
    """How often the run went back so far."""
    skipped: int = 0
    """Updates that were not applied so far, for whatever reason; steps that were left out among them."""
    windows: list[Window] = field(default_factory=list)
    """That were left out since the run went back before them."""
    _recent: list[int] = field(default_factory=list)
    _values: deque[tuple[int, float, float]] = field(default_factory=deque)
    """Step, loss and gradient norm of steps whose update was applied."""

    def leaves_out(self, step: int) -> bool:
        """Whether the data of a step is not trained on."""
        if any(one.first <= step <= one.last for one in self.told):
            return True
        return any(step in window for window in self.windows)

    def limits(self, step: int) -> Limits:
        """What a step is held to, from the values of steps up to the last but one before it."""
        spikes = self.spec.spikes
        if spikes is None or step <= spikes.warmup_steps:
            return NO_LIMITS
        known = [one for one in self._values if one[0] <= step - _LAG][-spikes.window :]
        if len(known) < spikes.window:
            return NO_LIMITS
        losses = [loss for _, loss, _ in known]
        norms = [norm for _, _, norm in known]
        return Limits(
            loss=inf if spikes.watch == "grad_norm" else _limit(losses, spikes),
            grad_norm=inf if spikes.watch == "loss" else _limit(norms, spikes),
        )

    def note_applied(self, step: int, *, loss: float, grad_norm: float) -> None:
        """A step that updated the weights. Steps come in order."""
        spikes = self.spec.spikes
        if spikes is None:
            return
        self._values.append((step, loss, grad_norm))
        # one more than a window: the newest value is not looked at yet
        while len(self._values) > spikes.window + _LAG - 1:
            self._values.popleft()

    def note_left_out(self, step: int) -> None:
        """A step whose data was left out."""
        self.skipped += 1

    def note_overflow(self, step: int) -> None:
        """A step whose update was not applied since the loss scale was too high."""
        self.skipped += 1

    def judge(self, step: int, *, is_finite: bool) -> Verdict:
        """What to do about a step whose update was not applied. Pure: call `note_skipped` where it stays so.

        `is_finite`: its loss and its gradient norm are, on all ranks.
        """
        recent = [one for one in self._recent if one > step - self.spec.within]
        recent.append(step)
        action: Action = "stop"
        if len(recent) <= self.spec.skips:
            action = "skip"
        elif self.rollbacks < self.spec.rollbacks:
            action = "roll_back"
        return Verdict(
            step=step,
            kind="spike" if is_finite else "nonfinite",
            action=action,
            limits=self.limits(step),
            recent=tuple(recent),
            window=Window(max(1, recent[0] - self.spec.before), step),
        )

    def note_skipped(self, verdict: Verdict) -> None:
        """The run goes on without the update."""
        self.skipped += 1
        self._recent = list(verdict.recent)

    def last_skips(self, last: int) -> list[int]:
        """The `skips` last steps up to step `last`, two at least, whose data was not left out, where each of them was
        skipped for its numbers; else none. In order."""
        found: list[int] = []
        step = last
        # one alone says nothing
        wanted = max(2, self.spec.skips)
        while step > 0 and len(found) < wanted:
            if not self.leaves_out(step):
                if step not in self._recent:
                    return []
                found.insert(0, step)
            step -= 1
        return found

    def roll_back(self, window: Window, *, to: Mapping[str, Any]) -> None:
        """The run went back to the state `to`, before the window, which is left out from now on."""
        rollbacks = self.rollbacks + 1
        windows = [*self.windows, window]
        self.load_state(to)
        self.rollbacks = rollbacks
        self.windows = windows

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rollbacks": self.rollbacks,
            "skipped": self.skipped,
            "windows": [[one.first, one.last] for one in self.windows],
            "recent": list(self._recent),
            "values": [list(one) for one in self._values],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; an empty one is that of a run that begins."""
        self.rollbacks = state.get("rollbacks", 0)
        self.skipped = state.get("skipped", 0)
        self.windows = [Window(first, last) for first, last in state.get("windows", ())]
        self._recent = list(state.get("recent", ()))
        self._values = deque((step, loss, norm) for step, loss, norm in state.get("values", ()))
        spikes = self.spec.spikes
        if spikes is None:
            self._values.clear()
        else:
            # a run may go on with a shorter window
            while len(self._values) > spikes.window + _LAG - 1:
                self._values.popleft()


def _limit(values: Sequence[float], spikes: SpikesSpec) -> float:
    """Robust against the spikes themselves: median and median absolute deviation (Hampel 1974)."""
    middle = median(values)
    deviation = median([abs(value - middle) for value in values])
    sigma = max(_MAD_TO_SIGMA * deviation, _LEAST_SIGMA * abs(middle))
    return middle + spikes.threshold * sigma


def sampled(step: int, share: float) -> bool:
    """Whether a step is one of a share of all steps: a pure function, the same on all ranks, spread evenly."""
    # the golden ratio's multiples leave no gaps: of n steps in a row n · share are taken, give or take one or two
    return (step * 0x9E3779B97F4A7C15 % 2**64) / 2.0**64 < share
