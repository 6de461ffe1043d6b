"""Which parameters of a rank lie in a buffer together: see data_parallel.py for what is done with them. Torch-free: the
plan finds the same buffers from a model's facts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megaspec.parallelism.places import Places, places_of, together
from megaspec.parallelism.spec import DpStrategy


@dataclass(frozen=True)
class Member:
    """A parameter as it lies on a rank."""

    shape: tuple[int, ...]
    is_trained: bool = True
    is_expert: bool = False
    """It lies on the expert grid of core/axes.py."""
    is_linear: bool = False
    """It is trained, and the gradient is made inside of a linear layer's product."""
    in_fp8: bool = False
    """It is gathered in fp8."""


@dataclass(frozen=True)
class ChunkMembers:
    """The parameters of a chunk of the model, in its order, and of its units those that each uses, in theirs."""

    members: Mapping[str, Member]
    units: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Bucketing:
    """What buffers are made by."""

    strategy: DpStrategy
    bucket_bytes: float
    """Gradients of a bucket, with replicate and zero1; the other strategies have one for each unit."""
    wide: int
    """Bytes of a gradient."""
    dense_shards: int = 1
    """Ranks among which a parameter is shared out."""
    expert_shards: int = 1

    @property
    def shards_weights(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    @property
    def keeps_sums(self) -> bool:
        """Whole sums of gradients stay over the step."""
        return self.strategy in ("replicate", "zero1")

    def shards_of(self, one: Member) -> int:
        """Ranks that each hold a shard of a parameter's buffer. A frozen one is whole where only updates are shared
        out."""
        if self.strategy == "replicate" or (not one.is_trained and not self.shards_weights):
            return 1
        return self.expert_shards if one.is_expert else self.dense_shards


@dataclass(frozen=True, eq=False)
class PlannedBucket:
    """A buffer of parameters that are alike but for their shapes."""

    places: Places
    chunk: int | None
    """The only one that uses them; None where other chunks or ranks do, too."""
    kind: Member
    """One of them."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.places.shapes)


def buckets_of(chunks: Sequence[ChunkMembers], shared: frozenset[str], by: Bucketing) -> Iterator[PlannedBucket]:
    """In the order of the backward pass. `shared`: parameters that another pipeline rank holds as well, to be divided
    alike there."""
    members: dict[str, Member] = {}
    for chunk in chunks:
        members |= chunk.members
    for number, names in _groups(chunks, shared, by):
        first = members[names[0]]
        shards = by.shards_of(first)
        shapes = {name: members[name].shape for name in names}
        for run in together(shapes, shards=shards):
            places = places_of({name: shapes[name] for name in run}, shards=shards)
            yield PlannedBucket(places, number, first)


def _groups(
    chunks: Sequence[ChunkMembers], shared: frozenset[str], by: Bucketing
) -> Iterator[tuple[int | None, list[str]]]:
    """The chunk and the names of what may lie together. No chunk: other chunks or ranks use the parameter, too."""
    chunks_of = Counter(name for chunk in chunks for name in chunk.members)
    alone = shared | {name for name, count in chunks_of.items() if count > 1}
    for number in reversed(range(len(chunks))):
        chunk = chunks[number]
        names = _in_backward_order(chunk, [name for name in chunk.members if name not in alone])
        if by.keeps_sums:
            for cut in _cut_by_grid(names, chunk.members, by.bucket_bytes, by.wide):
                yield number, cut
        else:
            for of_unit in _by_unit(chunk, names):
                for cut in _cut_by_grid(of_unit, chunk.members, float("inf"), by.wide):
                    yield number, cut
    for name in sorted(alone & chunks_of.keys()):
        yield None, [name]


def _in_backward_order(chunk: ChunkMembers, names: Sequence[str]) -> list[str]:
    """The names of a chunk as the backward pass makes their gradients: from the last unit to the first; in each, linear
    layers' before those that come through hooks."""
    first_unit: dict[str, int] = {}
    for index, unit in enumerate(chunk.units):
        for name in unit:
            # a parameter of several units has its gradient when the first of them is through
            first_unit.setdefault(name, index)
    order = list(reversed(names))
    # stable: what stands side by side stays in the order of the backward pass
    order.sort(key=lambda name: (-first_unit[name], not chunk.members[name].is_linear))
    return order


def _by_unit(chunk: ChunkMembers, names: Sequence[str]) -> Iterator[list[str]]:
    """Those that several units use, each alone; then those of each unit, from the last one to the first."""
    users = Counter(name for unit in chunk.units for name in unit)
    for name in names:
        if users[name] > 1:
            yield [name]
    for unit in reversed(chunk.units):
        mine = set(unit)
        yield [name for name in names if name in mine and users[name] == 1]


def _cut_by_grid(names: Sequence[str], members: Mapping[str, Member], most: float, wide: int) -> list[list[str]]:
    """Consecutive names of the dense grid, and of the expert grid, frozen ones and those that are gathered in fp8
    apart; in the order in which they are full."""
    cuts: list[list[str]] = []
    for kind in product((False, True), (True, False), (False, True)):
        alike = []
        for name in names:
            one = members[name]
            if (one.is_expert, one.is_trained, one.in_fp8) == kind:
                alike.append(name)
        cuts += _cut(alike, members, most, wide)
    # by the parameter that fills the bucket
    number = {name: place for place, name in enumerate(names)}
    return sorted(cuts, key=lambda cut: number[cut[-1]])


def _cut(names: Sequence[str], members: Mapping[str, Member], most: float, wide: int) -> Iterator[list[str]]:
    """Consecutive names of at least `most` bytes of gradients together, and the rest."""
    pending: list[str] = []
    size = 0
    for name in names:
        pending.append(name)
        size += prod(members[name].shape) * wide
        if size >= most:
            yield pending
            pending = []
            size = 0
    if pending:
        yield pending
