"""Whole matrices out of the shares that ranks hold: each is put together on one rank, changed there, taken apart.

Note on the exchange. Who holds what is told by every rank's layouts, once; from them every rank computes the same plan,
so that each all-to-all knows its sizes without a word. A matrix's owner takes what it lacks from the nearest rank that
holds it, and sends every rank the part that it holds: with replicated weights only results travel. Matrices are done in
rounds that bound the memory; the parts of the next round travel while a round's matrices are changed.
"""

# R ranks of the group. A share is what a rank holds of a parameter; a part is the rectangle that a share and a matrix
# have in common. Matrices of the group are numbered from 0, by n; every rank numbers them alike.

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core import counted
from megaspec.core.layout import Layout, Piece, layouts_as_json, layouts_of_json
from megaspec.nn.model_facts import Matrix
from megaspec.parallelism.mesh import Mesh

Slices = tuple[slice, ...]
Corner = tuple[int, int]
"""Where a part begins in its matrix: row and column. Parts with one corner are copies of each other."""
# What ranks send takes as long as this many operations an element: 4 bytes there and back at about 100 GB/s, beside
# matrix products at about 400 TFLOP/s. It only decides who owns what.
_OPERATIONS_PER_ELEMENT = 16_000
# Elements of matrices that one rank has in hand at a time, if no single one is larger.
_ROUND_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class MatrixPart:
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

    @property
    def corner(self) -> Corner:
        return self.inside[0].start, self.inside[1].start


@dataclass
class _WholeMatrix:
    """A matrix of the group."""

    shape: tuple[int, int]
    held: dict[int, list[MatrixPart]]
    """By rank, those that hold anything of it."""
    owner: int = 0

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def operations(self) -> float:
        """Of 5 Newton-Schulz iterations on [small, large].

        In each, x xᵀ and the last product take 2 · small² · large, (x xᵀ)² takes 2 · small³.
        """
        small, large = sorted(self.shape)
        return 5.0 * (4 * small * small * large + 2 * small**3)

    def sources(self) -> Iterator[tuple[int, MatrixPart]]:
        """One rank for each part of the matrix: the owner, or the nearest to it."""
        found: dict[Corner, tuple[int, MatrixPart]] = {}
        for rank in sorted(self.held, key=self._distance):
            for part in self.held[rank]:
                found.setdefault(part.corner, (rank, part))
        yield from found.values()

    def _distance(self, rank: int) -> tuple[int, int]:
        """Between a rank and the owner; of two that are equally far the lower rank comes first."""
        return abs(rank - self.owner), rank


@dataclass
class _Messages:
    """The parts that one rank sends each rank, and gets from each, in the order in which they lie in the buffers."""

    sent: dict[int, list[tuple[int, MatrixPart]]] = field(default_factory=lambda: defaultdict(list))
    """Rank -> (number of the matrix, where the part lies here)."""
    received: dict[int, list[tuple[int, MatrixPart]]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class _Round:
    """Matrices that are in hand at once."""

    owned: list[int]
    """Numbers of the matrices that this rank changes."""
    gather: _Messages
    scatter: _Messages


class MatrixUpdates:
    """The strategy for an optimizer that changes matrices as wholes (Muon), where ranks hold shares of them."""

    def __init__(self, mesh: Mesh, matrices: Mapping[str, Sequence[Matrix]] | None):
        """`matrices`: the hidden matrices of each parameter; None: the optimizer changes each element alone."""
        self._mesh = mesh
        self._matrices = matrices

    def wrap_optimizer(self, make: Callable[..., Any], *, shards: Mapping[str, Layout]) -> Callable[..., Any]:
        """The maker of an optimizer, which is given the way to whole matrices, too. `shards`: what this rank's
        optimizer updates. All ranks must call it together."""
        if self._matrices is None:
            return make
        group = self._mesh.group("tp-dp-cp")
        matrices = WholeMatrices(shards, self._matrices, group=group, device=self._mesh.device)
        return partial(make, matrices=matrices)


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
        layouts = {name: shards[name] for name in sorted(matrices) if name in shards}
        self._group = group
        self._ranks = 1
        self._rank = 0
        layouts_of_ranks = [layouts]
        if group is not None:
            self._ranks = dist.get_world_size(group)
            self._rank = dist.get_rank(group)
            layouts_of_ranks = _exchanged(layouts, group, device)
        # every rank numbers the matrices alike: parameters by name, their matrices in order
        self._names = frozenset().union(*layouts_of_ranks)
        self._wholes: list[_WholeMatrix] = []
        for name in sorted(self._names):
            layout_of_ranks = [layouts.get(name) for layouts in layouts_of_ranks]
            self._wholes += _whole_matrices(name, matrices[name], layout_of_ranks)
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

        def start_gather(matrices: _Round) -> "_Exchange":
            def values_of(_: int, part: MatrixPart) -> Tensor:
                return take(part.name, part.local)

            return self._start(matrices.gather, values_of, dtype=dtype, device=device)

        if not self._rounds:
            return
        coming = start_gather(self._rounds[0])
        for i, round_ in enumerate(self._rounds):
            wholes = {n: torch.empty(self._wholes[n].shape, dtype=dtype, device=device) for n in round_.owned}
            for n, part, values in coming.finish():
                wholes[n][part.inside].copy_(values)
            # the parts of the next round travel while the matrices of this one are changed
            if i + 1 < len(self._rounds):
                coming = start_gather(self._rounds[i + 1])
            changed = dict(zip(round_.owned, change(list(wholes.values())), strict=True))

            def changed_part(n: int, part: MatrixPart, changed: dict[int, Tensor] = changed) -> Tensor:
                return changed[n][part.inside]

            going_back = self._start(round_.scatter, changed_part, dtype=dtype, device=device)
            for _, part, values in going_back.finish():
                put(part.name, part.local, values)

    def _round(self, numbers: Sequence[int]) -> _Round:
        """This rank's messages for some of the matrices."""
        owned = [n for n in numbers if self._wholes[n].owner == self._rank]
        gather = _Messages()
        scatter = _Messages()
        for n in numbers:
            whole = self._wholes[n]
            is_owner = whole.owner == self._rank
            for source, part in whole.sources():
                if source == self._rank:
                    gather.sent[whole.owner].append((n, part))
                if is_owner:
                    gather.received[source].append((n, part))
            for rank, parts in whole.held.items():
                for part in parts:
                    if is_owner:
                        scatter.sent[rank].append((n, part))
                    if rank == self._rank:
                        scatter.received[whole.owner].append((n, part))
        return _Round(owned, gather, scatter)

    def _start(
        self,
        messages: _Messages,
        take: Callable[[int, MatrixPart], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "_Exchange":
        """Sends what this rank has for others; what it has for itself goes past the network."""
        kept = [take(n, part).to(dtype) for n, part in messages.sent[self._rank]]
        if self._group is None:
            return _Exchange(messages, self._rank, kept, [], None, None)
        # parts lie in the buffers in the order of ranks, one behind the other
        flat_parts = [torch.empty(0, dtype=dtype, device=device)]
        for rank in range(self._ranks):
            if rank != self._rank:
                flat_parts += [take(n, part).to(dtype).reshape(-1) for n, part in messages.sent[rank]]
        outgoing = torch.cat(flat_parts)
        sizes_sent = self._elements_by_rank(messages.sent)
        sizes_received = self._elements_by_rank(messages.received)
        incoming = torch.empty(sum(sizes_received), dtype=dtype, device=device)
        work = counted.all_to_all_single(
            incoming, outgoing, sizes_received, sizes_sent, group=self._group, async_op=True
        )
        # the buffer that is sent must live until it was
        return _Exchange(messages, self._rank, kept, list(incoming.split(sizes_received)), outgoing, work)

    def _elements_by_rank(self, parts: Mapping[int, Sequence[tuple[int, MatrixPart]]]) -> list[int]:
        """What goes over the network to or from each rank: nothing for this one."""
        sizes = [0] * self._ranks
        for rank, numbered in parts.items():
            if rank != self._rank:
                sizes[rank] = sum(part.numel for _, part in numbered)
        return sizes


@dataclass
class _Exchange:
    """Messages on their way."""

    messages: _Messages
    rank: int
    kept: list[Tensor]
    buffers: list[Tensor]
    outgoing: Tensor | None
    work: dist.Work | None

    def finish(self) -> Iterator[tuple[int, MatrixPart, Tensor]]:
        """(Number of the matrix, where the part lies here, its values) of everything that has come."""
        for (n, part), values in zip(self.messages.received[self.rank], self.kept, strict=True):
            yield n, part, values
        if self.work is not None:
            counted.wait(self.work)
        for rank, buffer in enumerate(self.buffers):
            if rank == self.rank:
                continue
            parts = self.messages.received[rank]
            all_values = buffer.split([part.numel for _, part in parts])
            for (n, part), values in zip(parts, all_values, strict=True):
                yield n, part, values.view(part.shape)


def _whole_matrices(name: str, matrices: Sequence[Matrix], layouts: Sequence[Layout | None]) -> Iterator[_WholeMatrix]:
    """The matrices of one parameter with what each rank holds of them. `layouts`: by rank."""
    for matrix in matrices:
        held: dict[int, list[MatrixPart]] = {}
        shapes: dict[Corner, tuple[int, int]] = {}
        columns = 0
        for rank, layout in enumerate(layouts):
            if layout is None:
                continue
            columns = layout.shape[1]
            for piece in layout.pieces:
                part = _part(name, piece, matrix)
                if part is None:
                    continue
                held.setdefault(rank, []).append(part)
                shape = shapes.setdefault(part.corner, part.shape)
                assert shape == part.shape, f"{name}: {matrix} is cut in two ways"
        shape = (matrix.last - matrix.first, columns)
        covered = sum(rows * width for rows, width in shapes.values())
        assert covered == shape[0] * shape[1], f"{name}: ranks hold {covered} elements of {matrix}, {shape}"
        yield _WholeMatrix(shape, held)


def _part(name: str, piece: Piece, matrix: Matrix) -> MatrixPart | None:
    """The rows of a piece that belong to a matrix."""
    first = max(piece.global_start[0], matrix.first)
    last = min(piece.global_slices[0].stop, matrix.last)
    if first >= last or not piece.shape[1]:
        return None
    begin = piece.local_start[0] + first - piece.global_start[0]
    return MatrixPart(
        name,
        local=(slice(begin, begin + last - first), piece.local_slices[1]),
        inside=(slice(first - matrix.first, last - matrix.first), piece.global_slices[1]),
        shape=(last - first, piece.shape[1]),
    )


def share_out(wholes: Sequence[_WholeMatrix], *, ranks: int) -> None:
    """Gives every matrix an owner: the largest first, each to the rank that is done with it soonest.

    Longest processing time first (Graham 1969), counting the arithmetic and what has to travel to the owner and back.
    """
    load = [0.0] * ranks  # operations that each rank has been given
    for whole in sorted(wholes, key=lambda matrix: -matrix.operations):
        # in operations, by owner; what the owner holds itself does not travel
        cost = [whole.operations + _OPERATIONS_PER_ELEMENT * whole.elements] * ranks
        for rank, parts in whole.held.items():
            elements_held = sum(part.numel for part in parts)
            cost[rank] -= _OPERATIONS_PER_ELEMENT * elements_held
        done = [load[rank] + cost[rank] for rank in range(ranks)]
        whole.owner = done.index(min(done))
        load[whole.owner] = done[whole.owner]


def _rounds(wholes: Sequence[_WholeMatrix], elements: int) -> list[list[int]]:
    """Numbers of the matrices of each round, so that no owner has more than `elements` in hand or one matrix."""
    owned: dict[int, list[int]] = defaultdict(list)
    for n, whole in enumerate(wholes):
        owned[whole.owner].append(n)
    rounds: dict[int, list[int]] = defaultdict(list)
    for numbers in owned.values():
        round_number = 0
        elements_in_hand = 0
        for n in numbers:
            if elements_in_hand and elements_in_hand + wholes[n].elements > elements:
                round_number += 1
                elements_in_hand = 0
            rounds[round_number].append(n)
            elements_in_hand += wholes[n].elements
    return [sorted(rounds[i]) for i in range(len(rounds))]


def _exchanged(mine: Mapping[str, Layout], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Layout]]:
    """Every rank's layouts, by parameter. Their texts differ in length: the lengths go first, then padded texts."""
    text = layouts_as_json(mine.values())
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    counted.all_gather(lengths, length, group=group)
    counts = torch.cat(lengths).tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    received = [torch.empty_like(padded) for _ in counts]
    counted.all_gather(received, padded, group=group)
    found: list[dict[str, Layout]] = []
    for padded_text, count in zip(received, counts, strict=True):
        layouts = layouts_of_json(bytes(padded_text[:count].cpu().numpy()))
        found.append({layout.name: layout for layout in layouts})
    return found
