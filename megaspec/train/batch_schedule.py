"""Global batch at each step: a pure function of the train spec."""

from functools import lru_cache
from typing import NamedTuple

from megaspec.train.spec import TrainSpec

LONGEST_RAMP = 10_000
"""Increments of a ramp at most: each is a stage of its own, and a recipe may say any numbers."""


def ramp_is_too_long(train: TrainSpec) -> bool:
    """Whether a ramp has more increments than a schedule is made of; a rule tells it."""
    ramp = train.batch_ramp
    return ramp is not None and (train.global_batch - ramp.start) // ramp.increment > LONGEST_RAMP


class _Stage(NamedTuple):
    """Steps that take the same batch."""

    first_step: int
    first_sample: int
    batch: int


class BatchSchedule:
    """How many sequences each optimizer step takes.

    With a ramp, the batch at a step is start + k · increment, k = number of whole `samples / increments` parts that
    lie between the ramp's first step and it, until it is global_batch; before the first step it is `start`. `moved`
    sequences are added to what any step has consumed: see Spec.samples_moved.
    """

    def __init__(self, train: TrainSpec, *, moved: int = 0):
        self._moved = moved
        ramp = train.batch_ramp
        if ramp is None:
            self._stages = (_Stage(0, 0, train.global_batch),)
            return
        assert ramp.first_step != "auto", "train.batch_ramp.first_step was left open by the resolver"
        self._stages = _stages(ramp.start, ramp.increment, ramp.samples, ramp.first_step, train.global_batch)

    def batch(self, step: int) -> int:
        """Sequences of the step that follows `step` completed ones."""
        return self._stage(step).batch

    def consumed(self, step: int) -> int:
        """Sequences that the first `step` steps take."""
        stage = self._stage(step)
        return self._moved + stage.first_sample + (step - stage.first_step) * stage.batch

    @property
    def batches(self) -> tuple[int, ...]:
        """Every batch size that occurs, in order."""
        return tuple(stage.batch for stage in self._stages)

    def _stage(self, step: int) -> _Stage:
        """The one that a step lies in."""
        for stage in reversed(self._stages):
            if stage.first_step <= step:
                return stage
        assert step >= 0, f"step={step} must not be negative"
        # a ramp that begins later
        return self._stages[0]


# a search asks for those of one ramp with every layout
@lru_cache(maxsize=64)
def _stages(start: int, increment: int, samples: int, first_step: int, global_batch: int) -> tuple[_Stage, ...]:
    """Of a ramp, and the last one, which takes the whole batch."""
    found = []
    step = first_step
    first_sample = first_step * start
    sample = first_sample
    n_increments = (global_batch - start) // increment
    assert n_increments <= LONGEST_RAMP, f"{n_increments} increments: ramp_is_too_long was not asked"
    for k in range(n_increments):
        batch = start + k * increment
        # the batch grows at the first step that begins at or behind this sample
        until = first_sample - (-(k + 1) * samples // n_increments)
        n_steps = max(0, -(-(until - sample) // batch))
        # a short part may lie wholly within the last step of the one before it
        if n_steps:
            found.append(_Stage(step, sample, batch))
        step += n_steps
        sample += n_steps * batch
    found.append(_Stage(step, sample, global_batch))
    return tuple(found)
