"""The axis table: the GPU-count formula, the rank order and both grids, in one place.

world = pp · dp_replicate · dp_shard · cp · tp                     (dense grid)
world = pp · edp · ep · etp                                        (expert grid, over the same ranks, shares only pp)
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import lcm, prod

# Outermost (largest rank stride) first.
DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")

# Groups that are named by their use: the axes that they span.
DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp_replicate", "dp_shard"),
    "pp": ("pp",),
    "dp-cp": ("dp_replicate", "dp_shard", "cp"),
    "shard": ("dp_shard", "cp"),
    "replicas": ("dp_replicate",),
    "pp-dp-cp": ("pp", "dp_replicate", "dp_shard", "cp"),
    "tp-pp": ("pp", "tp"),
    "tp-dp": ("dp_replicate", "dp_shard", "tp"),
    "tp-cp": ("cp", "tp"),
    "tp-dp-cp": ("dp_replicate", "dp_shard", "cp", "tp"),
}
# The expert grid with edp in two, since experts are sharded inside a replica as everything else is; and its groups.
EXPERT_SHARD_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "edp": ("edp_replicate", "edp_shard"),
    "expert-replicas": ("edp_replicate",),
    "expert-shard": ("edp_shard",),
    "ep": ("ep",),
    "etp": ("etp",),
    "ep-etp": ("ep", "etp"),
}


def world_size(degrees: Mapping[str, int], axes: Sequence[str] = DENSE_AXES) -> int:
    """Product of the degrees; an axis that is not mentioned counts 1."""
    return prod(degrees.get(a, 1) for a in axes)


def fewest_gpus(*, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """The smallest world that holds both grids: pp · lcm(tp·cp, etp·ep)."""
    return pp * lcm(tp * cp, etp * ep)


def coordinates(rank: int, degrees: Mapping[str, int], axes: Sequence[str] = DENSE_AXES) -> dict[str, int]:
    """The position of a rank on each axis of a grid."""
    where = {}
    for axis in reversed(axes):
        rank, where[axis] = divmod(rank, degrees.get(axis, 1))
    assert rank == 0, f"rank lies outside the grid {dict(degrees)}"
    return where


def rank_of(where: Mapping[str, int], degrees: Mapping[str, int], axes: Sequence[str] = DENSE_AXES) -> int:
    """The rank at a position; an axis that is not mentioned counts 0."""
    rank = 0
    for axis in axes:
        rank = rank * degrees.get(axis, 1) + where.get(axis, 0)
    return rank


def rank_groups(
    spanned: Sequence[str], degrees: Mapping[str, int], axes: Sequence[str] = DENSE_AXES
) -> list[list[int]]:
    """Every group of ranks that differ only along the `spanned` axes, in rank order, groups by their first rank."""
    fixed = [axis for axis in axes if axis not in spanned]
    inner = [axis for axis in axes if axis in spanned]
    groups = []
    for fixed_position in _positions(fixed, degrees):
        group = [rank_of(fixed_position | position, degrees, axes) for position in _positions(inner, degrees)]
        groups.append(sorted(group))
    return sorted(groups)


def _positions(axes: Sequence[str], degrees: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every position on these axes alone: axis -> coordinate."""
    for coordinates_here in product(*[range(degrees.get(axis, 1)) for axis in axes]):
        yield dict(zip(axes, coordinates_here, strict=True))


def expert_degrees(degrees: Mapping[str, int], *, ep: int = 1, etp: int = 1) -> dict[str, int]:
    """The expert grid over the same ranks as a dense grid. `etp·ep` must divide tp·cp·dp."""
    pp = degrees.get("pp", 1)
    inner = world_size(degrees) // pp
    assert inner % (etp * ep) == 0, f"etp·ep={etp * ep} does not divide tp·cp·dp={inner}"
    return {"pp": pp, "edp": inner // (etp * ep), "ep": ep, "etp": etp}


def expert_shard_degrees(degrees: Mapping[str, int], *, ep: int = 1, etp: int = 1) -> dict[str, int]:
    """Those of EXPERT_SHARD_AXES: as many replicas as the dense grid has, or, where edp can't be divided so, edp."""
    experts = expert_degrees(degrees, ep=ep, etp=etp)
    edp = experts.pop("edp")
    replicas = degrees.get("dp_replicate", 1)
    if edp % replicas:
        replicas = edp
    return experts | {"edp_replicate": replicas, "edp_shard": edp // replicas}
