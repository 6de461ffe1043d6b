"""Batch arithmetic: global batch = micro batch · accumulation · data-parallel ranks."""

from dataclasses import dataclass

from megaspec.core.axes import world_size
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.train.batch_schedule import BatchSchedule
from megaspec.train.spec import TrainSpec


@dataclass(frozen=True)
class BatchPlan:
    """What a run takes, counted."""

    dp: int
    """Data-parallel ranks."""
    micro_batch: int
    """Sequences of one rank at a time."""
    global_batch: int
    """Sequences of a step, after the ramp if there is one."""
    accumulation: int
    """Micro batches that a rank adds up in a step."""
    stages: tuple[int, ...]
    """Every global batch that occurs, in order."""
    tokens_per_step: int
    sequences: int
    """Of the whole run."""
    tokens: int
    """Of the whole run."""


def data_parallel(parallelism: ParallelismSpec) -> int:
    """Ranks that see different sequences."""
    return world_size(parallelism.degrees, ("dp_replicate", "dp_shard"))


def batch_plan(train: TrainSpec, parallelism: ParallelismSpec, *, seq_len: int) -> BatchPlan:
    """The arithmetic of a recipe without open fields."""
    schedule = BatchSchedule(train)
    dp = data_parallel(parallelism)
    sequences = schedule.consumed(train.steps)
    return BatchPlan(
        dp=dp,
        micro_batch=train.micro_batch,
        global_batch=train.global_batch,
        accumulation=train.global_batch // (train.micro_batch * dp),
        stages=schedule.batches,
        tokens_per_step=train.global_batch * seq_len,
        sequences=sequences,
        tokens=sequences * seq_len,
    )
