"""The GPU-count formula with a run's numbers, in both readings."""

from collections.abc import Mapping

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, expert_degrees, world_size
from megaspec.parallelism.spec import ParallelismSpec


def sharing_ranks(parallelism: ParallelismSpec) -> tuple[int, int]:
    """Ranks among which a strategy shares out a dense weight, and a weight of experts. Both lie inside one replica: the
    dp_replicate replicas hold all experts each, so that ep · etp divides dp_shard · cp · tp."""
    dense = parallelism.dp_shard * parallelism.cp
    return dense, max(1, dense * parallelism.tp // (parallelism.ep * parallelism.etp))


def dense_equation(sizes: Mapping[str, int]) -> str:
    """`world 8 = pp 1 · dp_replicate 4 · dp_shard 1 · cp 1 · tp 2`"""
    return f"world {world_size(sizes)} = {' · '.join(f'{axis} {sizes.get(axis, 1)}' for axis in DENSE_AXES)}"


def expert_equation(sizes: Mapping[str, int], *, ep: int = 1, etp: int = 1) -> str:
    """The same ranks as experts see them: `world 8 = pp 1 · edp 8 · ep 1 · etp 1`."""
    experts = expert_degrees(sizes, ep=ep, etp=etp)
    return f"world {world_size(experts, EXPERT_AXES)} = {' · '.join(f'{axis} {experts[axis]}' for axis in EXPERT_AXES)}"
