"""The GPU-count formula with a run's numbers, in both readings (core/axes.py)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, expert_degrees, world_size
from megaspec.parallelism.spec import ParallelismSpec


class SharingRanks(NamedTuple):
    """Ranks among which a strategy shares out a weight."""

    dense: int
    expert: int
    """A weight of experts."""


def sharing_ranks(parallelism: ParallelismSpec) -> SharingRanks:
    """dp_shard · cp of a dense weight, dp_shard · cp · tp / (ep · etp) of experts. Both lie inside one replica: the
    dp_replicate replicas hold all experts each, so that ep · etp divides dp_shard · cp · tp."""
    dense = parallelism.dp_shard * parallelism.cp
    expert = dense * parallelism.tp // (parallelism.ep * parallelism.etp)
    return SharingRanks(dense, max(1, expert))


def dense_equation(sizes: Mapping[str, int]) -> str:
    """`world 8 = pp 1 · dp_replicate 4 · dp_shard 1 · cp 1 · tp 2`"""
    return _equation(sizes, DENSE_AXES)


def expert_equation(sizes: Mapping[str, int], *, ep: int = 1, etp: int = 1) -> str:
    """The same ranks as experts see them: `world 8 = pp 1 · edp 8 · ep 1 · etp 1`."""
    return _equation(expert_degrees(sizes, ep=ep, etp=etp), EXPERT_AXES)


def _equation(sizes: Mapping[str, int], axes: Sequence[str]) -> str:
    factors = " · ".join(f"{axis} {sizes.get(axis, 1)}" for axis in axes)
    return f"world {world_size(sizes, axes)} = {factors}"
