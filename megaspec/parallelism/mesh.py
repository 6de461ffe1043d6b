"""The process groups of a run: an argument, never a global."""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megaspec.core.axes import DENSE_AXES, DENSE_GROUPS, coordinates, rank_groups, world_size


class Mesh:
    """Groups over the dense grid of core/axes.py, made on first use, by all ranks in the same order.

    A mesh of one rank needs no process group at all. `timeout` bounds each collective of the groups; None: what torch
    takes for the backend, whatever the world's own bound is.
    """

    def __init__(
        self, degrees: Mapping[str, int], *, rank: int, device: torch.device, timeout: timedelta | None = None
    ):
        self.degrees, self.rank, self.device, self._timeout = dict(degrees), rank, device, timeout
        self.world_size = world_size(degrees)
        self._where = coordinates(rank, degrees)
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
        if self.world_size > 1:
            assert dist.get_world_size() == self.world_size, f"{dist.get_world_size()} ranks, mesh {self.degrees}"

    def size(self, name: str) -> int:
        """Ranks in this rank's group `name`: an axis, or a name of core.axes.DENSE_GROUPS."""
        return world_size(self.degrees, self._axes(name))

    def index(self, name: str) -> int:
        """This rank's place in its group."""
        return self.ranks(name).index(self.rank)

    def ranks(self, name: str) -> list[int]:
        """The global ranks of this rank's group."""
        return next(g for g in rank_groups(self._axes(name), self.degrees) if self.rank in g)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """This rank's process group; None when it holds one rank."""
        return self._make(rank_groups(self._axes(name), self.degrees))

    def neighbours(self, name: str, count: int) -> dist.ProcessGroup | None:
        """The group of `count` consecutive ranks of group `name` that this rank is in."""
        parts = []
        for group in rank_groups(self._axes(name), self.degrees):
            parts += [group[i : i + count] for i in range(0, len(group), count)]
        return self._make(parts)

    def _axes(self, name: str) -> tuple[str, ...]:
        return (name,) if name in DENSE_AXES else DENSE_GROUPS[name]

    def _make(self, groups: list[list[int]]) -> dist.ProcessGroup | None:
        key = tuple(map(tuple, groups))
        if key not in self._groups:
            self._groups[key] = None
            if len(groups[0]) > 1:
                for ranks in groups:
                    is_world = len(ranks) == self.world_size
                    group = dist.group.WORLD if is_world else dist.new_group(ranks, timeout=self._timeout)
                    if self.rank in ranks:
                        self._groups[key] = group
        return self._groups[key]
