"""The two grids over the ranks, where node borders lie in them, and a message between ranks of one of their groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, expert_degrees, world_size
from megaspec.estimate.hardware import Hardware
from megaspec.recipe import Recipe

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Collective:
    """One kind of message, `times` of it in a step."""

    what: str
    kind: CollectiveKind
    group: str
    """The axes that it spans."""
    ranks: int
    bytes: int
    """Of the whole tensor: what an all-reduce sums, what a gather puts together and a reduce-scatter takes apart, what
    a rank gives away in an all-to-all or sends."""
    times: int
    within_node: bool
    per_node: int
    """Its ranks in one node."""
    overlapped: bool
    """It can run beside arithmetic."""
    phase: Phase
    """What it runs in or beside; step: after the last micro batch."""
    last: bool = False
    """Of a layer, which keeps nothing of what comes after it: where plain operations run again, they end before it."""

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step. In a ring of n ranks each passes on n - 1 of the tensor's n parts, in an
        all-reduce twice: for the sums, then for the results."""
        if self.kind == "p2p":
            share = 1.0
        elif self.kind == "all_reduce":
            share = 2 * (self.ranks - 1) / self.ranks
        else:
            share = (self.ranks - 1) / self.ranks
        return share * self.bytes * self.times


class Grid(NamedTuple):
    """Axes over the ranks, outermost (largest rank stride) first."""

    axes: tuple[str, ...]
    sizes: dict[str, int]

    def ranks(self, spanned: tuple[str, ...]) -> int:
        """Of a group along these axes."""
        return prod(self.sizes[axis] for axis in spanned)

    def split_axes(self, spanned: tuple[str, ...]) -> list[str]:
        """Those of `spanned` that hold more than one rank."""
        return [axis for axis in spanned if self.sizes[axis] > 1]


@dataclass(frozen=True)
class Topology:
    """Both grids over the ranks, and where node borders lie."""

    dense: dict[str, int]
    expert: dict[str, int]
    node: int
    """Ranks of one node."""

    @property
    def world(self) -> int:
        return world_size(self.dense)

    def grid_of(self, spanned: tuple[str, ...]) -> Grid:
        """The grid that these axes are of."""
        if set(spanned) <= set(DENSE_AXES):
            return Grid(DENSE_AXES, self.dense)
        return Grid(EXPERT_AXES, self.expert)

    def within_node(self, spanned: tuple[str, ...]) -> bool:
        """Every group along these axes (of one grid) lies in one node."""
        grid = self.grid_of(spanned)
        split_axes = grid.split_axes(spanned)
        if not split_axes or self.world <= self.node:
            return True
        # A group lies in a block of consecutive ranks: all axes from its outermost one inwards. Blocks don't cross a
        # node's border where their size divides the node's.
        outermost = min(grid.axes.index(axis) for axis in split_axes)
        block = grid.ranks(grid.axes[outermost:])
        return self.node % block == 0

    def per_node(self, spanned: tuple[str, ...]) -> int:
        """Ranks of one group along these axes that share a node."""
        grid = self.grid_of(spanned)
        found = 1
        # ranks between two neighbours on the axis
        stride = 1
        for axis in reversed(grid.axes):
            if axis in spanned:
                found *= min(grid.sizes[axis], max(1, self.node // stride))
            stride *= grid.sizes[axis]
        return found

    def make(
        self,
        what: str,
        kind: CollectiveKind,
        spanned: tuple[str, ...],
        size: float,
        times: int,
        *,
        phase: Phase,
        overlapped: bool = False,
        last: bool = False,
    ) -> Iterator[Collective]:
        """The collective of `size` bytes; none where the axes hold one rank or nothing is sent."""
        grid = self.grid_of(spanned)
        ranks = grid.ranks(spanned)
        if ranks > 1 and size > 0 and times > 0:
            yield Collective(
                what=what,
                kind=kind,
                group="·".join(grid.split_axes(spanned)),
                ranks=ranks,
                bytes=round(size),
                times=times,
                within_node=self.within_node(spanned),
                per_node=self.per_node(spanned),
                overlapped=overlapped,
                phase=phase,
                last=last,
            )


def topology_of(recipe: Recipe, hardware: Hardware | None) -> Topology:
    """The grids of a filled recipe. Without hardware all ranks lie in one node."""
    parallelism = recipe.parallelism
    dense = parallelism.degrees
    node = world_size(dense) if hardware is None else hardware.node_size
    return Topology(dense, expert_degrees(dense, ep=parallelism.ep, etp=parallelism.etp), node)
