"""Tokens to the ranks that hold their experts, and back."""

# G ranks of the group ep · etp, ep outside, M tokens of a rank, k choices of a token, R rows, E experts of a rank,
# D model

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.nn.moe import Experts, SharedExperts, loads_in_turn
from megaspec.nn.router import Routing
from megaspec.nn.rows import Rows, reorder, sorted_rows
from megaspec.parallelism.collectives import all_gather, all_to_all, reduce_scatter, wait


class Transfer(Protocol):
    """Rows that ranks send each other. `start` leaves a result that must be waited for."""

    def start(self, x: Tensor) -> Tensor: ...

    def start_back(self, grad: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Exchange:
    """All-to-all: the first `send[0]` rows go to the first rank and so on; received rows lie in the order of ranks."""

    group: dist.ProcessGroup
    send: Sequence[int]
    receive: Sequence[int]

    def start(self, x: Tensor) -> Tensor:
        return all_to_all(x, self.receive, self.send, self.group)

    def start_back(self, grad: Tensor) -> Tensor:
        return all_to_all(grad, self.send, self.receive, self.group)


@dataclass(frozen=True)
class Gather:
    """Every rank's rows, in the order of ranks. Back: the sum over ranks of each rank's rows."""

    group: dist.ProcessGroup

    def start(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group)

    def start_back(self, grad: Tensor) -> Tensor:
        return reduce_scatter(grad, self.group)


@dataclass(frozen=True)
class Scatter:
    """The sum over ranks of this rank's rows. Back: every rank's rows."""

    group: dist.ProcessGroup

    def start(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, self.group)

    def start_back(self, grad: Tensor) -> Tensor:
        return all_gather(grad, self.group)


@dataclass
class Journey:
    """A transfer of one tensor, there and, in the backward pass, back.

    `ready`: when what is sent is there; None: now. `held`: a _Hold in front of the start waits for the way back.
    """

    transfer: Transfer
    ready: "Ready | None" = None
    held: bool = False
    returning: Tensor | None = None
    """The gradient on its way back, for which autograd has no place: it has the shape of what was sent, not of what
    came."""

    def started(self, x: Tensor) -> Tensor:
        """What comes of x, to be finished before use."""
        return _Start.apply(x, self)

    def finished(self, y: Tensor) -> Tensor:
        """y, once it is there."""
        return _Finish.apply(y, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, journey):
        ctx.journey, ready = journey, journey.ready
        if ready is None:
            return journey.transfer.start(x)
        # beside what the main stream has been given since
        with torch.cuda.stream(ready.side):
            ready.side.wait_event(ready.event)
            x.record_stream(ready.side)
            out = journey.transfer.start(x)
        out.record_stream(torch.cuda.current_stream(x.device))
        return out

    @staticmethod
    def backward(ctx, nothing):
        grad, ctx.journey.returning = ctx.journey.returning, None
        return grad if ctx.journey.held else wait(grad), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, journey):
        ctx.journey, ctx.shape = journey, y.shape
        return wait(y).view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.journey.returning = ctx.journey.transfer.start_back(grad)
        return grad.new_empty(()).expand(ctx.shape), None


class _Hold(torch.autograd.Function):
    """Backward: waits for a transfer that a Journey behind it left under way.

    The backward pass takes what was made last first. What is made between this and the start so runs while the transfer
    is on its way back.
    """

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return wait(grad)


@dataclass(frozen=True)
class Ready:
    """The moment on the main stream at which what is to be sent is there."""

    event: torch.cuda.Event
    side: torch.cuda.Stream

    @classmethod
    def now(cls, side: torch.cuda.Stream | None) -> "Ready | None":
        if side is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(side.device))
        return cls(event, side)


def moved(x: Tensor, transfer: Transfer) -> Tensor:
    """The result of a transfer, with nothing beside it."""
    journey = Journey(transfer)
    return journey.finished(journey.started(x))


class HostCopy:
    """Numbers on their way to the host, which may do something else meanwhile. Of a step's numbers, the loads of
    experts are the only ones that the host reads: it has to say how many rows a rank sends."""

    def __init__(self, x: Tensor):
        self._host, self._copied = x, None
        if x.device.type == "cuda":
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class Loads:
    """How many rows go where."""

    send: list[int]
    """Rows for each of the G ranks."""
    receive: list[int]
    """Rows from each of the G ranks."""
    received_GE: Tensor
    """int64 on the device: rows from each rank for each expert here."""


class CountedLoads:
    """Loads that ranks tell each other; on CUDA on the way beside the main stream."""

    def __init__(self, counts_GE: Tensor, group: dist.ProcessGroup, side: torch.cuda.Stream | None):
        each = [1] * group.size()
        self._side = side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
            counts_GE.record_stream(side)
        with nullcontext() if side is None else torch.cuda.stream(side):
            self._received_GE = wait(all_to_all(counts_GE, each, each, group))
            self._copy = HostCopy(torch.stack((counts_GE.sum(1), self._received_GE.sum(1))))

    def read(self) -> Loads:
        send, receive = self._copy.read()
        if self._side is not None:
            main = torch.cuda.current_stream(self._side.device)
            main.wait_stream(self._side)
            self._received_GE.record_stream(main)
        return Loads(send, receive, self._received_GE)


class AllToAll:
    """Each row goes to the ranks that hold its expert: one, or with etp all that hold a part of it.

    `overlap`: what is beside the experts is computed while the rows are on their way. `side`: a stream of the device.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, ep: int, etp: int, overlap: bool, side: torch.cuda.Stream | None = None
    ):
        self.group, self.ep, self.etp, self.overlap, self._side, self.balanced = group, ep, etp, overlap, side, False

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """See megaspec.nn.moe.Dispatch."""
        keep = None if self.balanced else routing.keep
        rows = sorted_rows(routing.experts, keep, self.ep * experts.count, unpermute=experts.unpermute)
        if capacity is not None:
            rows = rows.padded(capacity)
        counted = self._known(rows, capacity) or self._counted(rows)
        # before what lies beside, so that the way back ends behind it, too
        x_RD, weights_R = (_Hold.apply(part) for part in (rows.permute(x_MD), rows.pick(routing.weights)))
        ready = Ready.now(self._side)
        shared_BTD = shared_experts() if self.overlap else None
        loads = counted if isinstance(counted, Loads) else counted.read()
        sent = sum(loads.send) // self.etp
        exchange, direct = Exchange(self.group, loads.send, loads.receive), self.etp == 1 and sent == x_RD.shape[0]
        journeys = [Journey(exchange, ready if self.etp == 1 else None, held=direct) for _ in range(2)]
        # nothing lies between a _Hold and its start: the backward pass of a slice would read what is not there yet
        parts = [part if direct else self._copied(part[:sent], loads) for part in (x_RD, weights_R)]
        parts = [journey.started(part) for journey, part in zip(journeys, parts, strict=True)]
        x_RD, weights_R = (journey.finished(part) for journey, part in zip(journeys, parts, strict=True))
        order, inverse, ends_E = _by_expert(loads)
        y_RD = experts(reorder(x_RD, order, inverse), reorder(weights_R, order, inverse), ends_E)
        back = Exchange(self.group, loads.receive, loads.send)
        y_RD = self._summed(moved(reorder(y_RD, inverse, order), back), loads)
        y_MD = rows.first(sent).unpermute(y_RD)
        return y_MD, shared_BTD if self.overlap else shared_experts()

    def _known(self, rows: Rows, capacity: int | None) -> Loads | None:
        """The loads, where nobody has to be asked."""
        E, (M, k), G = rows.ends.shape[0] // self.ep, rows.place.shape, self.group.size()
        first = self.group.rank() // self.etp * E
        if capacity is not None:
            loads = [capacity] * (self.ep * E)
            received = torch.full((G, E), capacity, device=rows.ends.device)
        elif self.balanced:
            loads = loads_in_turn(M, k=k, n_experts=self.ep * E)
            here = torch.arange(first, first + E, device=rows.ends.device)
            received = (loads[-1] + (here < M * k % (self.ep * E))).expand(G, E)
        else:
            return None
        of_ranks = [sum(loads[g // self.etp * E : (g // self.etp + 1) * E]) for g in range(G)]
        return Loads(of_ranks, [of_ranks[self.group.rank()]] * G, received)

    def _counted(self, rows: Rows) -> CountedLoads:
        ends = rows.ends.to(torch.int64)
        counts_GE = torch.diff(ends, prepend=ends.new_zeros(1)).view(self.ep, -1).repeat_interleave(self.etp, dim=0)
        return CountedLoads(counts_GE, self.group, self._side)

    def _copied(self, x: Tensor, loads: Loads) -> Tensor:
        """The rows of each expert-parallel rank, once for each rank that holds parts of its experts."""
        if self.etp == 1:
            return x
        blocks = x.split(loads.send[:: self.etp])
        return torch.cat([block for block in blocks for _ in range(self.etp)])

    def _summed(self, y: Tensor, loads: Loads) -> Tensor:
        """The way back of `_copied`: what the parts of an expert made is added up."""
        if self.etp == 1:
            return y
        blocks = y.split(loads.send)
        return torch.cat([torch.stack(blocks[i : i + self.etp]).sum(0) for i in range(0, len(blocks), self.etp)])


def _by_expert(loads: Loads) -> tuple[Tensor, Tensor, Tensor]:
    """How received rows, which lie rank by rank, are sorted by expert. -> order and its inverse, int64 [R], ends, int32
    [E]"""
    (G, E), received, device = loads.received_GE.shape, sum(loads.receive), loads.received_GE.device
    expert = torch.arange(E, device=device, dtype=torch.int16).repeat(G)
    expert_R = expert.repeat_interleave(loads.received_GE.flatten(), output_size=received)
    order = expert_R.argsort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(received, device=device))
    return order, inverse, loads.received_GE.sum(0).cumsum(0).to(torch.int32)


class AllGather:
    """Every rank gets all tokens of the group, computes what its experts or their parts add, and ranks add that up.

    Sends less than AllToAll where tokens take more experts than there are ranks. `overlap`: as there.
    """

    def __init__(self, group: dist.ProcessGroup, *, ep: int, etp: int, overlap: bool):
        self.group, self.ep, self.etp, self.overlap, self.balanced = group, ep, etp, overlap, False

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """See megaspec.nn.moe.Dispatch."""
        rows = self._rows(routing, experts)
        known = self._known(routing, experts.count)
        if capacity is not None:
            rows = rows.padded(self.group.size() * capacity)
            known = rows.choice.shape[0]
        count = HostCopy(rows.ends[-1:]) if known is None else None
        journey = Journey(Gather(self.group))
        coming = journey.started(x_MD)
        shared_BTD = shared_experts() if self.overlap else None
        x_ND = journey.finished(coming)
        weights_Nk = moved(routing.weights, Gather(self.group))
        rows = rows.first(count.read()[0] if known is None else known)
        y_RD = experts(rows.permute(x_ND), rows.pick(weights_Nk), rows.ends)
        y_MD = moved(rows.unpermute(y_RD), Scatter(self.group))
        return y_MD, shared_BTD if self.overlap else shared_experts()

    def _rows(self, routing: Routing, experts: Experts) -> Rows:
        """Of all ranks' choices, those of the experts here."""
        count = experts.count
        first = self.group.rank() // self.etp * count
        expert_Nk = wait(all_gather(routing.experts, self.group)) - first
        here_Nk = (expert_Nk >= 0) & (expert_Nk < count)
        if routing.keep is not None and not self.balanced:
            here_Nk = here_Nk & wait(all_gather(routing.keep, self.group))
        return sorted_rows(expert_Nk, here_Nk, count, unpermute=experts.unpermute)

    def _known(self, routing: Routing, count: int) -> int | None:
        """The number of rows, where nobody has to look."""
        if not self.balanced:
            return None
        (M, k), first = routing.experts.shape, self.group.rank() // self.etp * count
        return self.group.size() * sum(loads_in_turn(M, k=k, n_experts=self.ep * count)[first : first + count])
