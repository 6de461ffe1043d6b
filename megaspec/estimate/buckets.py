"""The flat buffers that a rank's parameters lie in, from a model's facts: the functions that divide them are those that
do so when a rank is built (parallelism/bucketing.py), so that padding is counted as it is.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from megaspec.core.part_facts import Degrees, Table
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.layer_run import degrees_of, layer_run
from megaspec.estimate.trained import facts_of, gathers_fp8
from megaspec.nn.layer.facts import LayerFacts, WeightCount
from megaspec.nn.model_facts import ModelFacts
from megaspec.parallelism.bucketing import Bucketing, ChunkMembers, Member, PlannedBucket, buckets_of
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.parallelism.stages import Chunk
from megaspec.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Buckets:
    """Buffers, by how many there are of each. Sizes are numbers of elements, padding included."""

    counts: Mapping[PlannedBucket, int]

    @cached_property
    def trained(self) -> "Buckets":
        return Buckets({bucket: times for bucket, times in self.counts.items() if bucket.kind.is_trained})

    @cached_property
    def in_fp8(self) -> "Buckets":
        """Those that are gathered in fp8."""
        return Buckets({bucket: times for bucket, times in self.counts.items() if bucket.kind.in_fp8})

    def within(self, some: Set[PlannedBucket]) -> "Buckets":
        """Those that are among some."""
        return Buckets({bucket: times for bucket, times in self.counts.items() if bucket in some})

    def without(self, others: "Buckets") -> "Buckets":
        """Those that are none of others."""
        return Buckets({bucket: times for bucket, times in self.counts.items() if bucket not in others.counts})

    @cached_property
    def whole(self) -> WeightCount:
        """Of whole buffers."""
        return self._sum(lambda bucket: bucket.places.numel)

    @cached_property
    def elements(self) -> WeightCount:
        """Of whole buffers, padding left out."""
        return self._sum(lambda bucket: bucket.places.elements)

    @cached_property
    def shards(self) -> WeightCount:
        """Of a rank's shards of them."""
        return self._sum(lambda bucket: bucket.places.shard)

    @cached_property
    def largest(self) -> int:
        """Of the largest buffer."""
        return max((bucket.places.numel for bucket in self.counts), default=0)

    @cached_property
    def most_held(self) -> WeightCount:
        """Weights without padding in the shards of the rank that has most."""
        return WeightCount(self._most_held(is_expert=False), self._most_held(is_expert=True))

    def _most_held(self, *, is_expert: bool) -> int:
        # what is not shared out, every rank has
        by_all = 0
        by_rank: list[int] = []
        for bucket, times in self.counts.items():
            if bucket.kind.is_expert is not is_expert:
                continue
            held = bucket.places.held
            if len(held) == 1:
                by_all += times * held[0]
            elif not by_rank:
                by_rank = [times * one for one in held]
            else:
                by_rank = [sum_ + times * one for sum_, one in zip(by_rank, held, strict=True)]
        return by_all + max(by_rank, default=0)

    def _sum(self, size: Callable[[PlannedBucket], int]) -> WeightCount:
        dense = 0
        expert = 0
        for bucket, times in self.counts.items():
            if bucket.kind.is_expert:
                expert += times * size(bucket)
            else:
                dense += times * size(bucket)
        return WeightCount(dense, expert)


_NONE = Buckets({})


@dataclass(frozen=True, eq=False)
class StageBuckets:
    """The buffers of a rank of a pipeline stage. The parts of it are of strategies that have buffers for each unit;
    others' go across units, and all that is known is `all`."""

    all: Buckets
    units: Mapping[tuple[LayerFacts, ...], Buckets] = field(default_factory=dict)
    """Of layers that are gathered and reduced together: one, or those that are computed again together."""
    chunks: tuple[Buckets, ...] = ()
    """Of the layers of each chunk."""
    embedding: Buckets = _NONE
    """That the first unit of the model takes."""
    head: Buckets = _NONE
    """That the last one takes; a tied table is the embedding's."""

    @property
    def of_both_ends(self) -> Buckets:
        """That the embedding and the head take: a tied table's."""
        both = self.embedding.counts.keys() & self.head.counts.keys()
        return Buckets(dict.fromkeys(both, 1))

    @property
    def of_one_end(self) -> Buckets:
        """That the embedding or the head takes, and not both."""
        ends = Buckets({**self.embedding.counts, **self.head.counts})
        return ends.without(self.of_both_ends)


def stage_buckets(recipe: Recipe, chunks: Sequence[Chunk]) -> StageBuckets:
    """Of a filled recipe, of a rank that has these chunks."""
    facts = facts_of(recipe)
    parallelism = recipe.parallelism
    ranks = sharing_ranks(parallelism)
    is_shared_out = parallelism.dp_strategy != "replicate"
    by = Bucketing(
        strategy=parallelism.dp_strategy,
        bucket_bytes=parallelism.bucket_mb * 1e6,
        wide=layer_run(recipe).wide,
        dense_shards=ranks.dense if is_shared_out else 1,
        expert_shards=ranks.expert if is_shared_out else 1,
    )
    contents = []
    for chunk in chunks:
        layers = tuple(facts.layers[number] for number in chunk.layers)
        contents.append(_ChunkContents(layers, chunk.embedding, chunk.head))
    return _stage_buckets(
        facts,
        tuple(contents),
        degrees_of(recipe),
        by,
        together=layers_together(parallelism.recompute),
        gathers_fp8=gathers_fp8(recipe) and by.shards_weights,
        is_split=parallelism.pp > 1,
    )


def layers_together(recompute: RecomputeSpec) -> int:
    """Layers that are computed again from the input of the first, and are one unit."""
    if recompute.kind != "full" or recompute.method == "block":
        return 1
    return recompute.layers or 1


class _ChunkContents(NamedTuple):
    layers: tuple[LayerFacts, ...]
    has_embedding: bool
    has_head: bool


@lru_cache(maxsize=4096)
def _stage_buckets(
    facts: ModelFacts,
    chunks: tuple[_ChunkContents, ...],
    degrees: Degrees,
    by: Bucketing,
    *,
    together: int,
    gathers_fp8: bool,
    is_split: bool,
) -> StageBuckets:
    """`together`: layers of a unit. `is_split`: the model's ends lie on several ranks, or in several chunks of one."""
    shared: frozenset[str] = frozenset()
    if facts.is_tied and is_split:
        shared = frozenset({_weight_of(facts.embedding_table)})
    if by.keeps_sums:
        whole = [_members_of_chunk(facts, chunk, degrees, number, together) for number, chunk in enumerate(chunks)]
        return StageBuckets(Buckets(Counter(buckets_of(whole, shared, by))))
    ends = []
    for number, chunk in enumerate(chunks):
        ends.append(_members_of_chunk(facts, chunk._replace(layers=()), degrees, number, together))
    of_ends = list(buckets_of(ends, shared, by))
    found = Counter(of_ends)
    units: dict[tuple[LayerFacts, ...], Buckets] = {}
    of_chunks = []
    for chunk in chunks:
        of_chunk: Counter[PlannedBucket] = Counter()
        for unit, times in Counter(_units(chunk.layers, together)).items():
            units[unit] = _unit_buckets(unit, degrees, by, gathers_fp8=gathers_fp8)
            for bucket, count in units[unit].counts.items():
                of_chunk[bucket] += times * count
        of_chunks.append(Buckets(of_chunk))
        found += of_chunk
    return StageBuckets(
        all=Buckets(found),
        units=units,
        chunks=tuple(of_chunks),
        embedding=_holding(of_ends, _names_in_embedding(facts) if any(one.has_embedding for one in chunks) else ()),
        head=_holding(of_ends, _names_in_head(facts) if any(one.has_head for one in chunks) else ()),
    )


def _holding(buckets: Sequence[PlannedBucket], names: Sequence[str]) -> Buckets:
    """Those that hold one of the names."""
    return Buckets({bucket: 1 for bucket in buckets if not bucket.places.shapes.keys().isdisjoint(names)})


def _units(layers: tuple[LayerFacts, ...], together: int) -> list[tuple[LayerFacts, ...]]:
    """A chunk's layers by units."""
    return [layers[first : first + together] for first in range(0, len(layers), together)]


@lru_cache(maxsize=8192)
def _unit_buckets(layers: tuple[LayerFacts, ...], degrees: Degrees, by: Bucketing, *, gathers_fp8: bool) -> Buckets:
    """Of one unit, by strategies that have buffers for each."""
    members: dict[str, Member] = {}
    for number, layer in enumerate(layers):
        for name, one in _members_of_layer(layer, degrees, gathers_fp8=gathers_fp8).items():
            members[f"{number}.{name}"] = one
    return Buckets(Counter(buckets_of([ChunkMembers(members, [list(members)])], frozenset(), by)))


@lru_cache(maxsize=8192)
def _members_of_layer(layer: LayerFacts, degrees: Degrees, *, gathers_fp8: bool = False) -> Mapping[str, Member]:
    """Names are from the layer on."""
    found = {}
    for weight in layer.weights:
        takes_fp8 = layer.in_fp8 and weight.is_matrix and weight.of.takes_fp8
        found[weight.name] = Member(
            weight.shape_on(degrees),
            is_trained=not weight.is_frozen,
            is_expert=weight.is_expert,
            is_linear=weight.is_matrix and not weight.is_frozen,
            in_fp8=gathers_fp8 and takes_fp8,
        )
    return found


def _members_of_chunk(
    facts: ModelFacts, chunk: _ChunkContents, degrees: Degrees, chunk_number: int, together: int
) -> ChunkMembers:
    """In the order of the model: embedding, layers, head."""
    members: dict[str, Member] = {}
    units: list[list[str]] = []
    if chunk.has_embedding:
        for table in facts.embedding.tables:
            members |= _members_of_table(facts, table, degrees)
        units.append(_names_in_embedding(facts))
    for number, layer in enumerate(chunk.layers):
        if number % together == 0:
            units.append([])
        # any name that no other layer of the rank has
        of_layer = {f"{chunk_number}.{number}.{name}": one for name, one in _members_of_layer(layer, degrees).items()}
        members |= of_layer
        units[-1] += of_layer
    if chunk.has_head:
        for vector in facts.norm.vectors:
            members[vector.name] = Member((vector.size,), is_trained=not vector.is_frozen)
        of_head = _members_of_table(facts, facts.head_table, degrees)
        if facts.is_tied:
            del of_head[_weight_of(facts.head_table)]
            if not chunk.has_embedding:
                of_head |= _members_of_table(facts, facts.embedding_table, degrees)
        members |= of_head
        units.append(_names_in_head(facts))
    return ChunkMembers(members, units)


def _members_of_table(facts: ModelFacts, table: Table, degrees: Degrees) -> dict[str, Member]:
    rows = table.rows
    if table.split == "vocab":
        rows = facts.padded_vocab(tp=degrees.tp) // degrees.tp
    found = {_weight_of(table): Member((rows, table.width), is_trained=not table.is_frozen)}
    if table.bias:
        found[_bias_of(table)] = Member((rows,), is_trained=not table.is_bias_frozen)
    return found


def _weight_of(table: Table) -> str:
    return f"{table.name}.weight"


def _bias_of(table: Table) -> str:
    return f"{table.name}.bias"


def _names_in_embedding(facts: ModelFacts) -> list[str]:
    """Of the parameters that the first unit takes."""
    return [_weight_of(table) for table in facts.embedding.tables]


def _names_in_head(facts: ModelFacts) -> list[str]:
    """Of those that the last one takes."""
    table = facts.embedding_table if facts.is_tied else facts.head_table
    names = [*(vector.name for vector in facts.norm.vectors), _weight_of(table)]
    if facts.head_table.bias:
        names.append(_bias_of(facts.head_table))
    return names
