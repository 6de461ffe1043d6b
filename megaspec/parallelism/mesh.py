"""The process groups of a run: an argument, never a global."""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megaspec.core import counted
from megaspec.core.axes import (
    DENSE_AXES,
    DENSE_GROUPS,
    EXPERT_GROUPS,
    EXPERT_SHARD_AXES,
    expert_shard_degrees,
    rank_groups,
    world_size,
)
from megaspec.parallelism.passes import PAIR_CTAS


class Mesh:
    """Groups over both grids of core/axes.py, made on first use, by all ranks in the same order.

    A mesh of one rank needs no process group at all. `timeout` bounds each collective of the groups; None: what torch
    takes for the backend, whatever the world's own bound is. Groups are named by an axis or as DENSE_GROUPS and
    EXPERT_GROUPS name them.
    """

    def __init__(
        self,
        degrees: Mapping[str, int],
        *,
        rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        ep: int = 1,
        etp: int = 1,
    ):
        self.degrees, self.rank, self.device, self._timeout = dict(degrees), rank, device, timeout
        self.world_size = world_size(degrees)
        self._expert_degrees = expert_shard_degrees(degrees, ep=ep, etp=etp)
        self._groups: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
        self._ranks: dict[str, list[list[int]]] = {}
        self._pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        if self.world_size > 1:
            assert dist.get_world_size() == self.world_size, f"{dist.get_world_size()} ranks, mesh {self.degrees}"

    def size(self, name: str) -> int:
        """Ranks in this rank's group `name`."""
        return len(self._all(name)[0])

    def index(self, name: str) -> int:
        """This rank's place in its group."""
        return self.ranks(name).index(self.rank)

    def ranks(self, name: str) -> list[int]:
        """The global ranks of this rank's group."""
        return next(g for g in self._all(name) if self.rank in g)

    def group(self, name: str, *, line: str = "") -> dist.ProcessGroup | None:
        """This rank's process group; None when it holds one rank.

        Collectives of one group run one after the other; what is to run beside others has a `line` of its own.
        """
        return self._make(self._all(name), name, line)

    def neighbours(self, name: str, count: int) -> dist.ProcessGroup | None:
        """The group of `count` consecutive ranks of group `name` that this rank is in."""
        return self._make([g[i : i + count] for g in self._all(name) for i in range(0, len(g), count)], name)

    def strided(self, name: str, stride: int) -> dist.ProcessGroup | None:
        """The group of every `stride`-th rank of group `name` that this rank is in."""
        return self._make([g[i::stride] for g in self._all(name) for i in range(stride)], name)

    def make_pairs(self) -> None:
        """Makes the groups that `pair` finds: each pipeline rank and the next, the last and the first, both ways."""
        for stages in self._all("pp"):
            for here, there in zip(stages, stages[1:] + stages[:1], strict=True):
                for pair in ((here, there), (there, here)):
                    if here != there and pair not in self._pairs:
                        self._pairs[pair] = self._new(sorted(pair), f"pp from rank {pair[0]} to {pair[1]}", PAIR_CTAS)
        if self.device.type == "cuda":
            for pair in self._pairs:
                self._greet(*pair)

    def pair(self, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one global rank to another; call `make_pairs` on all ranks first."""
        return self._pairs[source, target]

    def _greet(self, source: int, target: int) -> None:
        """The first message of a pair, which makes its communicator: the host waits there until both ranks have come,
        so all ranks do it in one order, and not in the order of their passes."""
        if self.rank in (source, target):
            op, peer = (dist.isend, target) if self.rank == source else (dist.irecv, source)
            word = torch.zeros(1, device=self.device)
            for work in counted.batch_isend_irecv([dist.P2POp(op, word, peer, self._pairs[source, target])]):
                counted.wait(work)

    def _all(self, name: str) -> list[list[int]]:
        if name not in self._ranks:
            if name in EXPERT_GROUPS:
                self._ranks[name] = rank_groups(EXPERT_GROUPS[name], self._expert_degrees, EXPERT_SHARD_AXES)
            else:
                self._ranks[name] = rank_groups(
                    (name,) if name in DENSE_AXES else DENSE_GROUPS[name], self.degrees, DENSE_AXES
                )
        return self._ranks[name]

    def _make(self, groups: list[list[int]], name: str, line: str = "") -> dist.ProcessGroup | None:
        """`name` is what a report of a hang calls it."""
        key = (line, tuple(map(tuple, groups)))
        if key not in self._groups:
            self._groups[key] = None
            if len(groups[0]) > 1:
                for ranks in groups:
                    is_world = len(ranks) == self.world_size and not line
                    group = dist.group.WORLD if is_world else self._new(ranks, f"{name} {line}".strip())
                    if self.rank in ranks:
                        self._groups[key] = group
        return self._groups[key]

    def _new(self, ranks: list[int], name: str, max_ctas: int | None = None) -> dist.ProcessGroup:
        options = None
        if max_ctas and self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = max_ctas
            if self._timeout:
                options._timeout = self._timeout
        return dist.new_group(ranks, timeout=self._timeout, pg_options=options, group_desc=name)
