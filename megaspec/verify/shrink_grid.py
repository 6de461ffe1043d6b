"""Fewer ranks on every axis: grids that keep each axis of both grids above 1."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2, prod

from megaspec.parallelism.spec import ParallelismSpec


@dataclass(frozen=True)
class Grid:
    """Degrees of the axes of both grids."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int
    factors: tuple[int, int] | None = None
    """Of `cp`, with the hierarchical kind."""

    @property
    def world(self) -> int:
        return self.pp * self.inner

    @property
    def inner(self) -> int:
        """Ranks of a pipeline stage, which experts lie over."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def edp(self) -> int:
        return self.inner // (self.ep * self.etp)

    @property
    def degrees(self) -> dict[str, int]:
        """By axis, edp included."""
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "edp")
        return {name: getattr(self, name) for name in names}


def grid_of(parallelism: ParallelismSpec) -> Grid:
    """The grid of a filled recipe."""
    factors = None
    if parallelism.context.kind == "hierarchical":
        factors = parallelism.context.factors
    return Grid(
        pp=parallelism.pp,
        dp_replicate=parallelism.dp_replicate,
        dp_shard=parallelism.dp_shard,
        cp=parallelism.cp,
        tp=parallelism.tp,
        ep=parallelism.ep,
        etp=parallelism.etp,
        factors=factors,
    )


def smaller_grids(whole: Grid, *, least: int = 1, most: int) -> list[Grid]:
    """The grids of `least` to `most` ranks in which every axis that is above 1 stays so, and none grows; best first.

    Best are degrees that divide those of the whole, then many ranks, then axes that shrink alike.
    """
    found = [grid for grid in _grids(whole, most) if grid.world >= least]
    return sorted(found, key=lambda grid: _badness(whole, grid))


def _badness(whole: Grid, grid: Grid) -> tuple[float, ...]:
    """The lower, the better: axes that don't divide the whole's, few ranks, axes that shrink differently."""
    axes_that_do_not_divide = 0
    uneven = 0.0
    for axis, degree in whole.degrees.items():
        smaller = grid.degrees[axis]
        if degree % smaller:
            axes_that_do_not_divide += 1
        uneven += log2(degree / smaller) ** 2
    return axes_that_do_not_divide, -grid.world, uneven


def _grids(whole: Grid, most: int) -> Iterator[Grid]:
    # context parallelism of one kind has one factor
    cp_factors = whole.factors or (whole.cp, 1)
    dense = (whole.pp, whole.dp_replicate, whole.dp_shard, *cp_factors, whole.tp)
    for pp, replicas, shards, first, second, tp in _products(dense, most):
        inner = replicas * shards * first * second * tp
        for ep, etp in _products((whole.ep, whole.etp), inner):
            factors = (first, second) if whole.factors else None
            grid = Grid(pp, replicas, shards, first * second, tp, ep, etp, factors)
            if inner % (ep * etp):
                continue
            keeps_edp = grid.edp > 1 or whole.edp == 1
            if keeps_edp and grid.edp <= max(1, whole.edp):
                yield grid


def _products(degrees: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Every choice of degrees, none above its own and above 1 where that is, whose product is at most `most`."""
    if not degrees:
        yield ()
        return
    first, *rest = degrees
    least = prod(2 for n in rest if n > 1)
    for n in range(min(2, first), min(first, most // least) + 1):
        for others in _products(rest, most // n):
            yield (n, *others)
