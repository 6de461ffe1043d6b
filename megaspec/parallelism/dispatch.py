"""Tokens to the ranks that hold their experts, and back."""

# G ranks of the group ep · etp, ep outside, M tokens of a rank, N tokens of the whole group, k choices of a token,
# R rows (a token and one expert that takes it), E experts of a rank, D model
#
# With etp > 1 the etp ranks that lie side by side in the group hold parts of the same E experts.

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.nn.moe.module import Experts, SharedExperts, loads_in_turn
from megaspec.nn.moe.router import Routing
from megaspec.nn.moe.rows import Rows, reorder, sorted_rows
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
        ctx.journey = journey
        ready = journey.ready
        if ready is None:
            return journey.transfer.start(x)
        # On the side stream, from the moment on at which x was there: beside what the main stream has been given since.
        with torch.cuda.stream(ready.side):
            ready.side.wait_event(ready.event)
            x.record_stream(ready.side)
            out = journey.transfer.start(x)
        out.record_stream(torch.cuda.current_stream(x.device))
        return out

    @staticmethod
    def backward(ctx, nothing):
        grad = ctx.journey.returning
        ctx.journey.returning = None
        if not ctx.journey.held:
            grad = wait(grad)
        return grad, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, journey):
        ctx.journey = journey
        ctx.shape = y.shape
        return wait(y).view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.journey.returning = ctx.journey.transfer.start_back(grad)
        # autograd wants a gradient of y's shape; nobody reads it, so that one element stands for all
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
        self._host = x
        self._copied: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            # pinned, or the copy would wait
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
        beside = nullcontext() if side is None else torch.cuda.stream(side)
        with beside:
            self._received_GE = wait(all_to_all(counts_GE, each, each, group))
            # [2, G]: both sums in one copy
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

    hands_tokens = False

    def __init__(
        self, group: dist.ProcessGroup, *, ep: int, etp: int, overlap: bool, side: torch.cuda.Stream | None = None
    ):
        self.group = group
        self.ep = ep
        self.etp = etp
        self.overlap = overlap
        self.balanced = False
        self._side = side

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """See megaspec.nn.moe.Dispatch."""
        keep = None if self.balanced else routing.keep
        rows = sorted_rows(routing.experts, keep, self.ep * experts.count, unpermute=experts.unpermute)
        if capacity is not None:
            rows = rows.padded(capacity)
        known_loads = self._known(rows, capacity)
        counted_loads = self._counted(rows) if known_loads is None else None

        x_RD = rows.permute(x_MD)
        weights_R = rows.pick(routing.weights)
        # The _Holds come before the shared experts: the backward pass runs them behind those, so that the gradients of
        # the rows travel back while the shared experts' are computed.
        x_RD = _Hold.apply(x_RD)
        weights_R = _Hold.apply(weights_R)
        ready = Ready.now(self._side)
        shared_BTD = shared_experts() if self.overlap else None
        loads = known_loads if counted_loads is None else counted_loads.read()

        n_sent = sum(loads.send) // self.etp  # rows that have an expert, each counted once
        x_RD, weights_R = self._received(x_RD, weights_R, loads, n_sent=n_sent, ready=ready)
        # received rows lie rank by rank; experts take theirs side by side
        order, inverse, ends_E = _by_expert(loads)
        y_RD = experts(reorder(x_RD, order, inverse), reorder(weights_R, order, inverse), ends_E)
        way_back = Exchange(self.group, loads.receive, loads.send)
        y_RD = self._summed(moved(reorder(y_RD, inverse, order), way_back), loads)
        y_MD = rows.first(n_sent).unpermute(y_RD)
        if not self.overlap:
            shared_BTD = shared_experts()
        return y_MD, shared_BTD

    def _received(
        self, x_RD: Tensor, weights_R: Tensor, loads: Loads, *, n_sent: int, ready: Ready | None
    ) -> tuple[Tensor, Tensor]:
        """What other ranks send for the experts here: [R here, D] and [R here]. Both are started before either is
        waited for."""
        exchange = Exchange(self.group, loads.send, loads.receive)
        # Nothing lies between a _Hold and its start: its backward pass would read what is not there yet.
        is_direct = self.etp == 1 and n_sent == x_RD.shape[0]
        if not is_direct:
            x_RD = self._copied(x_RD[:n_sent], loads)
            weights_R = self._copied(weights_R[:n_sent], loads)
        if self.etp > 1:
            ready = None  # the copies of the rows are made later than that
        x_journey = Journey(exchange, ready, held=is_direct)
        weights_journey = Journey(exchange, ready, held=is_direct)
        x_coming = x_journey.started(x_RD)
        weights_coming = weights_journey.started(weights_R)
        return x_journey.finished(x_coming), weights_journey.finished(weights_coming)

    def _known(self, rows: Rows, capacity: int | None) -> Loads | None:
        """The loads, where nobody has to be asked."""
        E = rows.ends.shape[0] // self.ep
        M, k = rows.place.shape
        G = self.group.size()
        n_experts = self.ep * E
        first = self.group.rank() // self.etp * E  # number of the first expert here
        # loads: rows that every rank has for each of all experts, the same on all ranks
        if capacity is not None:
            loads = [capacity] * n_experts
            received_GE = torch.full((G, E), capacity, device=rows.ends.device)
        elif self.balanced:
            loads = loads_in_turn(M, k=k, n_experts=n_experts)
            # in turn: the first M · k mod n_experts of them have one more
            here_E = torch.arange(first, first + E, device=rows.ends.device)
            received_GE = (loads[-1] + (here_E < M * k % n_experts)).expand(G, E)
        else:
            return None
        loads_of_ranks = []
        for rank in range(G):
            first_there = rank // self.etp * E
            loads_of_ranks.append(sum(loads[first_there : first_there + E]))
        return Loads(loads_of_ranks, [loads_of_ranks[self.group.rank()]] * G, received_GE)

    def _counted(self, rows: Rows) -> CountedLoads:
        ends = rows.ends.to(torch.int64)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))  # [all experts]
        # every rank that holds a part of an expert gets its rows
        counts_GE = counts.view(self.ep, -1).repeat_interleave(self.etp, dim=0)
        return CountedLoads(counts_GE, self.group, self._side)

    def _copied(self, x: Tensor, loads: Loads) -> Tensor:
        """The rows of each expert-parallel rank, once for each rank that holds parts of its experts."""
        if self.etp == 1:
            return x
        copies = []
        for block in x.split(loads.send[:: self.etp]):
            copies += [block] * self.etp
        return torch.cat(copies)

    def _summed(self, y: Tensor, loads: Loads) -> Tensor:
        """The way back of `_copied`: what the parts of an expert made is added up."""
        if self.etp == 1:
            return y
        blocks = y.split(loads.send)
        return torch.cat([torch.stack(blocks[i : i + self.etp]).sum(0) for i in range(0, len(blocks), self.etp)])


def _by_expert(loads: Loads) -> tuple[Tensor, Tensor, Tensor]:
    """How received rows, which lie rank by rank, are sorted by expert. -> order and its inverse, int64 [R], ends, int32
    [E]"""
    G, E = loads.received_GE.shape
    device = loads.received_GE.device
    n_received = sum(loads.receive)
    expert = torch.arange(E, device=device, dtype=torch.int16).repeat(G)
    # output_size, so that the host need not ask the device for it
    expert_R = expert.repeat_interleave(loads.received_GE.flatten(), output_size=n_received)
    order = expert_R.argsort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(n_received, device=device))
    return order, inverse, loads.received_GE.sum(0).cumsum(0).to(torch.int32)


class AllGather:
    """Every rank gets all tokens of the group, computes what its experts or their parts add, and ranks add that up.

    Sends less than AllToAll where tokens take more experts than there are ranks. `overlap`: as there.
    """

    hands_tokens = True

    def __init__(self, group: dist.ProcessGroup, *, ep: int, etp: int, overlap: bool):
        self.group = group
        self.ep = ep
        self.etp = etp
        self.overlap = overlap
        self.balanced = False

    def __call__(
        self, x_MD: Tensor, routing: Routing, experts: Experts, *, shared_experts: SharedExperts, capacity: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """See megaspec.nn.moe.Dispatch."""
        rows = self._rows(routing, experts)
        n_rows = self._known(routing, experts.count)
        if capacity is not None:
            rows = rows.padded(self.group.size() * capacity)
            n_rows = rows.choice.shape[0]
        # asked for before the transfer and read behind it, so that the host does not wait for nothing
        count = HostCopy(rows.ends[-1:]) if n_rows is None else None
        journey = Journey(Gather(self.group))
        x_coming = journey.started(x_MD)
        shared_BTD = shared_experts() if self.overlap else None
        x_ND = journey.finished(x_coming)
        weights_Nk = moved(routing.weights, Gather(self.group))
        if count is not None:
            (n_rows,) = count.read()
        rows = rows.first(n_rows)
        # [N, D], what the experts here add to every token; the sum over ranks is scattered to [M, D]
        y_ND = experts.of_tokens(x_ND, weights_Nk, rows)
        y_MD = moved(y_ND, Scatter(self.group))
        if not self.overlap:
            shared_BTD = shared_experts()
        return y_MD, shared_BTD

    def _rows(self, routing: Routing, experts: Experts) -> Rows:
        """Of all ranks' choices, those of the experts here."""
        count = experts.count
        first = self.group.rank() // self.etp * count  # number of the first expert here
        expert_Nk = wait(all_gather(routing.experts, self.group)) - first
        here_Nk = (expert_Nk >= 0) & (expert_Nk < count)
        if routing.keep is not None and not self.balanced:
            here_Nk = here_Nk & wait(all_gather(routing.keep, self.group))
        return sorted_rows(expert_Nk, here_Nk, count, unpermute=experts.unpermute)

    def _known(self, routing: Routing, count: int) -> int | None:
        """The number of rows, where nobody has to look."""
        if not self.balanced:
            return None
        M, k = routing.experts.shape
        first = self.group.rank() // self.etp * count
        loads = loads_in_turn(M, k=k, n_experts=self.ep * count)
        return self.group.size() * sum(loads[first : first + count])
