"""Whole matrices out of the shares that ranks hold: each is put together on one rank, changed there, taken apart.

Note on the exchange. Who holds what is told by every rank's layouts, once; from them every rank computes the same plan,
so that each all-to-all knows its sizes without a word. A matrix's owner takes what it lacks from the nearest rank that
holds it, and sends every rank the part that it holds: with replicated weights only results travel. Matrices are done in
rounds that bound the memory; the parts of the next round travel while a round's matrices are changed.
"""

# R ranks of the group

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.layout import Layout, Piece, layouts_as_json, layouts_of_json
from megaspec.nn.matrices import Matrix

Slices = tuple[slice, ...]
# What ranks send takes as long as this many operations an element: 4 bytes there and back at about 100 GB/s, beside
# matrix products at about 400 TFLOP/s. It only decides who owns what.
_OPERATIONS_PER_ELEMENT = 16_000
# Elements of matrices that one rank has in hand at a time, if no single one is larger.
_ROUND_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Part:
    """What a rank's share of a parameter and one of its matrices have in common."""

    name: str
    local: Slices
    """In the share."""
    inside: Slices
    """In the matrix."""
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass
class _Whole:
    """A matrix of the group."""

    shape: tuple[int, int]
    held: dict[int, list[Part]]
    """By rank, those that hold anything of it."""
    owner: int = 0

    @property
    def operations(self) -> float:
        """Of a Newton-Schulz iteration, times 5."""
        small, large = sorted(self.shape)
        return 5.0 * (4 * small * small * large + 2 * small**3)

    def sources(self) -> Iterator[tuple[int, Part]]:
        """One rank for each part of the matrix: the owner, or the nearest to it."""
        found: dict[tuple[int, int], tuple[int, Part]] = {}
        for rank in sorted(self.held, key=lambda r: (abs(r - self.owner), r)):
            for part in self.held[rank]:
                found.setdefault((part.inside[0].start, part.inside[1].start), (rank, part))
        yield from found.values()


@dataclass
class _Messages:
    """The parts that one rank sends each rank, and gets from each, in the order in which they lie in the buffers."""

    sent: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))
    """Rank -> (number of the matrix, where the part lies here)."""
    received: dict[int, list[tuple[int, Part]]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Round:
    """Matrices that are in hand at once."""

    owned: list[int]
    """Numbers of the matrices that this rank changes."""
    gather: _Messages
    scatter: _Messages


class WholeMatrices:
    """The hidden matrices of a model whose parameters ranks hold in shares.

    `shards`: this rank's shares by parameter, as the optimizer sees them. `matrices`: the hidden matrices of each
    parameter. `group`: all ranks that hold the same layers, None for one rank; all of them must make this together.
    """

    def __init__(
        self,
        shards: Mapping[str, Layout],
        matrices: Mapping[str, Sequence[Matrix]],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        round_elements: int = _ROUND_ELEMENTS,
    ):
        mine = {name: shards[name] for name in sorted(matrices) if name in shards}
        self._group = group
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        everyone = [mine] if group is None else _exchanged(mine, group, device)
        self._names = frozenset(name for held in everyone for name in held)
        self._wholes = [
            whole
            for name in sorted(self._names)
            for whole in _wholes(name, matrices[name], [h.get(name) for h in everyone])
        ]
        share_out(self._wholes, ranks=self._ranks)
        self._rounds = [self._round(numbers) for numbers in _rounds(self._wholes, round_elements)]

    @property
    def names(self) -> frozenset[str]:
        """The parameters that are hidden matrices."""
        return self._names

    @property
    def owned(self) -> list[tuple[int, int]]:
        """Shapes of the matrices that this rank changes."""
        return [whole.shape for whole in self._wholes if whole.owner == self._rank]

    def transform(
        self,
        take: Callable[[str, Slices], Tensor],
        change: Callable[[list[Tensor]], list[Tensor]],
        put: Callable[[str, Slices, Tensor], None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """See Matrices in optim/muon.py. All ranks of the group must call it; the host reads nothing."""

        def start(one: _Round) -> "_Exchange":
            return self._start(one.gather, lambda _, part: take(part.name, part.local), dtype=dtype, device=device)

        coming = start(self._rounds[0]) if self._rounds else None
        for i, one in enumerate(self._rounds):
            wholes = {n: torch.empty(self._wholes[n].shape, dtype=dtype, device=device) for n in one.owned}
            for n, part, values in coming.finish():
                wholes[n][part.inside].copy_(values)
            if i + 1 < len(self._rounds):
                coming = start(self._rounds[i + 1])
            changed = dict(zip(one.owned, change(list(wholes.values())), strict=True))
            back = self._start(one.scatter, lambda n, part, c=changed: c[n][part.inside], dtype=dtype, device=device)
            for _, part, values in back.finish():
                put(part.name, part.local, values)

    def _round(self, numbers: Sequence[int]) -> _Round:
        """This rank's messages for some of the matrices."""
        one = _Round([n for n in numbers if self._wholes[n].owner == self._rank], _Messages(), _Messages())
        for n in numbers:
            whole = self._wholes[n]
            for source, part in whole.sources():
                if source == self._rank:
                    one.gather.sent[whole.owner].append((n, part))
                if whole.owner == self._rank:
                    one.gather.received[source].append((n, part))
            for rank, parts in whole.held.items():
                if whole.owner == self._rank:
                    one.scatter.sent[rank] += [(n, part) for part in parts]
                if rank == self._rank:
                    one.scatter.received[whole.owner] += [(n, part) for part in parts]
        return one

    def _start(
        self,
        messages: _Messages,
        take: Callable[[int, Part], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "_Exchange":
        """Sends what this rank has for others; what it has for itself goes past the network."""
        kept = [take(n, part).to(dtype) for n, part in messages.sent[self._rank]]
        if self._group is None:
            return _Exchange(messages, self._rank, kept, [], None, None)
        sizes_in, sizes_out = (
            [0 if r == self._rank else sum(p.numel for _, p in parts[r]) for r in range(self._ranks)]
            for parts in (messages.sent, messages.received)
        )
        parts = [
            take(n, part).to(dtype).reshape(-1)
            for r in range(self._ranks)
            if r != self._rank
            for n, part in messages.sent[r]
        ]
        outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        incoming = torch.empty(sum(sizes_out), dtype=dtype, device=device)
        work = dist.all_to_all_single(incoming, outgoing, sizes_out, sizes_in, group=self._group, async_op=True)
        # the buffer that is sent must live until it was
        return _Exchange(messages, self._rank, kept, list(incoming.split(sizes_out)), outgoing, work)


@dataclass
class _Exchange:
    """Messages on their way."""

    messages: _Messages
    rank: int
    kept: list[Tensor]
    buffers: list[Tensor]
    outgoing: Tensor | None
    work: dist.Work | None

    def finish(self) -> Iterator[tuple[int, Part, Tensor]]:
        """(Number of the matrix, where the part lies here, its values) of everything that has come."""
        for (n, part), values in zip(self.messages.received[self.rank], self.kept, strict=True):
            yield n, part, values
        if self.work is not None:
            self.work.wait()
        for rank, buffer in enumerate(self.buffers):
            if rank != self.rank:
                parts = self.messages.received[rank]
                for (n, part), values in zip(parts, buffer.split([p.numel for _, p in parts]), strict=True):
                    yield n, part, values.view(part.shape)


def _wholes(name: str, matrices: Sequence[Matrix], layouts: Sequence[Layout | None]) -> Iterator[_Whole]:
    """The matrices of one parameter with what each rank holds of them."""
    for matrix in matrices:
        held: dict[int, list[Part]] = {}
        areas: dict[tuple[int, int], tuple[int, int]] = {}
        columns = 0
        for rank, layout in enumerate(layouts):
            if layout is None:
                continue
            columns = layout.shape[1]
            parts = [part for piece in layout.pieces if (part := _part(name, piece, matrix)) is not None]
            if parts:
                held[rank] = parts
            for part in parts:
                corner = (part.inside[0].start, part.inside[1].start)
                assert areas.setdefault(corner, part.shape) == part.shape, f"{name}: {matrix} is cut in two ways"
        shape = (matrix.last - matrix.first, columns)
        covered = sum(rows * width for rows, width in areas.values())
        assert covered == shape[0] * shape[1], f"{name}: ranks hold {covered} elements of {matrix}, {shape}"
        yield _Whole(shape, held)


def _part(name: str, piece: Piece, matrix: Matrix) -> Part | None:
    """The rows of a piece that belong to a matrix."""
    first, last = max(piece.global_start[0], matrix.first), min(piece.global_slices[0].stop, matrix.last)
    if first >= last or not piece.shape[1]:
        return None
    begin = piece.local_start[0] + first - piece.global_start[0]
    return Part(
        name,
        (slice(begin, begin + last - first), piece.local_slices[1]),
        (slice(first - matrix.first, last - matrix.first), piece.global_slices[1]),
        (last - first, piece.shape[1]),
    )


def share_out(wholes: Sequence[_Whole], *, ranks: int) -> None:
    """Gives every matrix an owner: the largest first, each to the rank that is done with it soonest.

    Longest processing time first (Graham 1969), counting the arithmetic and what has to travel to the owner and back.
    """
    load = [0.0] * ranks
    for whole in sorted(wholes, key=lambda one: -one.operations):
        elements = whole.shape[0] * whole.shape[1]
        cost = [whole.operations + _OPERATIONS_PER_ELEMENT * elements] * ranks
        for rank, parts in whole.held.items():
            cost[rank] -= _OPERATIONS_PER_ELEMENT * sum(part.numel for part in parts)
        whole.owner = min(range(ranks), key=lambda rank: (load[rank] + cost[rank], rank))
        load[whole.owner] += cost[whole.owner]


def _rounds(wholes: Sequence[_Whole], elements: int) -> list[list[int]]:
    """Numbers of the matrices of each round, so that no owner has more than `elements` in hand or one matrix."""
    owned: dict[int, list[int]] = defaultdict(list)
    for n, whole in enumerate(wholes):
        owned[whole.owner].append(n)
    rounds: dict[int, list[int]] = defaultdict(list)
    for numbers in owned.values():
        number, size = 0, 0
        for n in numbers:
            here = wholes[n].shape[0] * wholes[n].shape[1]
            if size and size + here > elements:
                number, size = number + 1, 0
            rounds[number].append(n)
            size += here
    return [sorted(rounds[i]) for i in range(len(rounds))]


def _exchanged(mine: Mapping[str, Layout], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Layout]]:
    """Every rank's layouts."""
    text = layouts_as_json(mine.values())
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    counts = [int(n.item()) for n in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    texts = [bytes(one[:count].cpu().numpy()) for one, count in zip(received, counts, strict=True)]
    return [{layout.name: layout for layout in layouts_of_json(text)} for text in texts]
