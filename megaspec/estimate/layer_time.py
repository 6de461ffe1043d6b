"""How long one micro batch takes through a layer, the embedding and the head, on one rank."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from megaspec.estimate.ceilings import Ceilings, ProductKind
from megaspec.estimate.communication import Collective, Topology, end_collectives, layer_collectives, topology_of
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.parameters import RankParameters, rank_parameters
from megaspec.estimate.share import share_of
from megaspec.estimate.work import (
    AttentionWork,
    Part,
    Product,
    embedding_part,
    fp8_bytes,
    head_part,
    layer_parts,
    recomputed_layers,
    weights_bytes,
)
from megaspec.model.kinds import has_experts
from megaspec.parallelism.stages import Chunk
from megaspec.recipe import Recipe

# What a collective that runs beside arithmetic costs all the same, of its own time: it takes SMs and
# memory bandwidth away. Measured on 2 and 4 H200: a hidden all-reduce of gradients adds about half of its time.
HIDDEN_COST = 0.5
# Matrix products in a step reach this much of what they reach alone, one kind after the other: the tensor cores' power
# is limited, and their factors are no longer in the cache. Measured on an H200, 1B and 8B layers alike.
SUSTAINED = 0.95
# Seconds of an fp8 product against one whose scales are of whole tensors, the way that ceilings are measured. Blocks of
# 1x128 and 128x128: 1297 of 1508 TFLOP/s on an H200 (8192 on each side, forward). Blackwell scales mxfp8 in its tensor
# cores. Both formats, e4m3 and e5m2, run at one rate.
FP8_COST = {"tensorwise": 1.0, "blockwise": 1508 / 1297, "mxfp8": 1.0}
# Between the some 50 kernels of a layer's forward and backward pass, about 1 microsecond each.
GAPS_SECONDS = 0.05e-3
KINDS = (
    "matrix products",
    "attention",
    "element-wise",
    "recompute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
)
_PRODUCTS, _ATTENTION, _BYTES, _AGAIN = range(4)
_KIND_OF = {"context": KINDS.index("context parallel"), "experts' tokens": KINDS.index("expert parallel")}
_TENSOR = KINDS.index("tensor parallel")
_MOST_KEPT = 20_000

Times = tuple[float, ...]
_NOTHING = (0.0,) * len(KINDS)


class Cost(NamedTuple):
    """Seconds by KINDS of one micro batch."""

    forward: Times = _NOTHING
    backward: Times = _NOTHING
    """The input gradient's pass, with what it computes again."""
    weight: Times = _NOTHING
    """The weight gradient's."""

    @property
    def total(self) -> float:
        return sum(map(sum, self))


def added(costs: Iterable[tuple[Cost, int]]) -> Cost:
    """The sum of costs, each so many times."""
    sums = [[0.0] * len(KINDS) for _ in range(3)]
    for cost, times in costs:
        for total, one in zip(sums, cost, strict=True):
            for kind, seconds in enumerate(one):
                total[kind] += times * seconds
    return Cost(*map(tuple, sums))


def collective_seconds(one: Collective, ceilings: Ceilings, *, messages: int = 1) -> float:
    """One of its times, cut into so many messages."""
    each = ceilings.collective_seconds(
        one.kind, one.bytes / messages, one.ranks, within_node=one.within_node, ranks_per_node=one.per_node
    )
    return messages * each


def kind_of(one: Collective) -> int:
    """The place in KINDS where a layer's collective counts."""
    return _KIND_OF.get(one.what, _TENSOR)


def exposed(seconds: float, beside: float) -> float:
    """What communication adds to arithmetic of `beside` seconds that it runs along."""
    hidden = min(seconds, beside)
    return seconds - hidden + HIDDEN_COST * hidden


@dataclass
class LayerTimes:
    """Costs of the parts of a model in one layout; each is found once."""

    recipe: Recipe
    hardware: Hardware
    topology: Topology
    ceilings: Ceilings
    kept: dict[tuple[Any, ...], Cost] = field(default_factory=dict)
    counts: dict[tuple[Chunk, ...], RankParameters] = field(default_factory=dict)

    def parameters(self, recipe: Recipe, rank: int, chunks: tuple[Chunk, ...]) -> RankParameters:
        """Weights on a pipeline rank that holds these chunks."""
        if chunks not in self.counts:
            self.counts[chunks] = rank_parameters(recipe, rank)
        return self.counts[chunks]

    def chunk(self, chunk: Chunk) -> Cost:
        """One micro batch through the layers of a chunk and the ends that it holds."""
        key = (chunk.layers, chunk.embedding, chunk.head)
        if key not in self.kept:
            self.kept[key] = self._chunk(chunk)
        return self.kept[key]

    def _chunk(self, chunk: Chunk) -> Cost:
        share = self._recomputed(chunk)
        costs = [(_again(self.layer(*key), share), n) for key, n in self._kinds(chunk).items()]
        if chunk.embedding:
            costs.append((self._end(embedding_part(self.recipe), embedding=True), 1))
        if chunk.head:
            costs.append((self._end(head_part(self.recipe), embedding=False), 1))
        return added(costs)

    def layers(self, stages: int) -> list[float]:
        """Seconds of one micro batch through each layer, where layers are divided among so many stages."""
        n = max(1, len(self._experts) // stages)
        share = recomputed_layers(self.recipe, n) / n
        kinds = [(one, self._in_fp8(i)) for i, one in enumerate(self._experts)]
        seconds = {kind: _again(self.layer(*kind), share).total for kind in set(kinds)}
        return [seconds[kind] for kind in kinds]

    def messages(self, chunk: Chunk) -> Iterator[tuple[Collective, float]]:
        """What one micro batch sends in a chunk, with the seconds that `chunk` counts for it."""
        share = self._recomputed(chunk)
        for (with_experts, in_fp8), layers in self._kinds(chunk).items():
            cost = self.layer(with_experts, in_fp8)
            for one in layer_collectives(self.recipe, self.topology, with_experts=with_experts):
                seconds = layers * self._exposed(one, cost)
                yield replace(one, times=layers * one.times), seconds
                again = round(share * layers)
                if one.phase == "forward" and again:
                    yield replace(one, times=again * one.times, phase="backward"), share * seconds
        for one in end_collectives(self.recipe, self.topology, embedding=chunk.embedding, head=chunk.head):
            yield one, self._exposed(one, Cost())

    def _kinds(self, chunk: Chunk) -> dict[tuple[bool, bool], int]:
        """Layers by whether they have experts, and whether they compute in fp8."""
        count: dict[tuple[bool, bool], int] = {}
        for layer in chunk.layers:
            key = (self._experts[layer], self._in_fp8(layer))
            count[key] = count.get(key, 0) + 1
        return count

    def _recomputed(self, chunk: Chunk) -> float:
        """Share of the layers that the backward pass computes again as a whole."""
        return recomputed_layers(self.recipe, len(chunk.layers)) / max(1, len(chunk.layers))

    def layer(self, with_experts: bool, in_fp8: bool) -> Cost:
        """One micro batch through one layer, without what recomputing the whole of it takes."""
        key = (with_experts, in_fp8)
        if key not in self.kept:
            parts = layer_parts(self.recipe, has_experts=with_experts, in_fp8=in_fp8)
            sums = [list(_NOTHING) for _ in range(3)]
            again = share_of(self.recipe).recomputed_parts
            for times, part_of_gaps in zip(sums, (1 / 3, 2 / 3), strict=False):
                times[_BYTES] += GAPS_SECONDS * part_of_gaps
            for part in parts:
                self._add_part(part, sums, is_recomputed=part.name in again)
            self._add_collectives(layer_collectives(self.recipe, self.topology, with_experts=with_experts), sums)
            self.kept[key] = Cost(*map(tuple, sums))
        return self.kept[key]

    def _end(self, part: Part, *, embedding: bool) -> Cost:
        sums = [list(_NOTHING) for _ in range(3)]
        self._add_part(part, sums, is_recomputed=False)
        # the head's gradients are made with its logits, none is deferred
        for later in sums[1:]:
            sums[0][_PRODUCTS] += later[_PRODUCTS]
            later[_PRODUCTS] = 0.0
        ends = end_collectives(self.recipe, self.topology, embedding=embedding, head=not embedding)
        self._add_collectives(ends, sums)
        return Cost(*map(tuple, sums))

    def _add_part(self, part: Part, sums: list[list[float]], *, is_recomputed: bool) -> None:
        forward, backward, weight = sums
        before = sum(forward)
        for product in part.products:
            forward[_PRODUCTS] += self._product(product, "forward")
            backward[_PRODUCTS] += self._product(product, "dgrad")
            weight[_PRODUCTS] += self._product(product, "wgrad")
        cast_forward, cast_backward = fp8_bytes(part.products)
        forward[_BYTES] += self.ceilings.memory_seconds(part.forward_bytes + cast_forward)
        backward[_BYTES] += self.ceilings.memory_seconds(part.backward_bytes + cast_backward)
        if part.attention is not None:
            forward[_ATTENTION] += self._attention(part, "forward")
            backward[_ATTENTION] += self._attention(part, "backward")
        if is_recomputed:
            backward[_AGAIN] += sum(forward) - before

    def _product(self, one: Product, kind: ProductKind) -> float:
        sizes, precision = (one.m, one.n, one.k), one.precision
        if one.groups:
            alone = self.ceilings.grouped_matmul_seconds(one.groups, *sizes, precision=precision, kind=kind)
        else:
            alone = self.ceilings.matmul_seconds(*sizes, precision=precision, kind=kind)
        cost = FP8_COST[self.recipe.precision.recipe] if precision == "fp8" else 1.0
        return cost * alone / SUSTAINED

    def _attention(self, part: Part, direction: Literal["forward", "backward"]) -> float:
        one, kind = part.attention, self.recipe.precision.kind
        if self.recipe.kernels.attention == "reference":
            return one.share * self._plain_attention(one, direction)

        def seconds(tokens: float) -> float:
            return self.ceilings.attention_seconds(
                tokens=tokens,
                seq_len=one.seq_len,
                heads=one.heads,
                kv_heads=one.kv_heads,
                head_size=one.head_size,
                direction=direction,
                precision="bf16" if kind == "fp8" else kind,
            )

        # what was measured of all at once holds the noise of one long run: never more than twice the half
        return one.share * min(seconds(one.tokens), 2 * seconds(one.tokens / 2))

    def _plain_attention(self, one: AttentionWork, direction: Literal["forward", "backward"]) -> float:
        """Every query against every key, masked ones too, as two products with a softmax in between that is written
        out; the backward pass has both gradients of each product."""
        kind, rows = self.recipe.precision.kind, one.tokens * one.heads
        precision = "bf16" if kind == "fp8" else kind
        scores = self.ceilings.matmul_seconds(rows, one.seq_len, one.head_size, precision=precision, kind="forward")
        values = self.ceilings.matmul_seconds(rows, one.head_size, one.seq_len, precision=precision, kind="forward")
        softmax = self.ceilings.memory_seconds(weights_bytes(self.recipe, one))
        return (scores + values) * (1 if direction == "forward" else 2) + softmax

    def _add_collectives(self, found: Iterable[Collective], sums: list[list[float]]) -> None:
        """What is sent in a layer."""
        for one in found:
            times = sums[0] if one.phase == "forward" else sums[1]
            times[kind_of(one)] += self._exposed(one, sums)

    def _exposed(self, one: Collective, sums: Sequence[Sequence[float]]) -> float:
        """Seconds that a layer waits for it. Weight gradients hide half each of two reductions, attention its ring,
        shared experts what travels to the others."""
        seconds = one.times * collective_seconds(one, self.ceilings)
        if not one.hidden:
            return seconds
        if one.what == "experts' tokens":
            return exposed(seconds, self._shared_experts["forward" if one.phase == "forward" else "dgrad"])
        arithmetic = sums[0] if one.phase == "forward" else sums[1]
        return exposed(seconds, arithmetic[_ATTENTION] if one.what == "context" else sums[2][_PRODUCTS] / 2)

    @cached_property
    def _experts(self) -> Sequence[bool]:
        return has_experts(self.recipe.model)

    @cached_property
    def _shared_experts(self) -> dict[ProductKind, float]:
        """Seconds of the shared experts' products."""
        parts = layer_parts(self.recipe, has_experts=True, in_fp8=False)
        products = [product for part in parts if part.name == "shared_experts" for product in part.products]
        kinds: tuple[ProductKind, ...] = ("forward", "dgrad")
        return {kind: sum(self._product(product, kind) for product in products) for kind in kinds}

    def _in_fp8(self, layer: int) -> bool:
        precision, last = self.recipe.precision, self.recipe.model.n_layers
        if precision.kind != "fp8":
            return False
        return precision.first_layers_bf16 <= layer < last - precision.last_layers_bf16


def _again(cost: Cost, share: float) -> Cost:
    """With a share of its forward pass computed and sent again in the backward pass."""
    if not share:
        return cost
    backward = list(cost.backward)
    for kind, seconds in enumerate(cost.forward):
        backward[kind if kind > _AGAIN else _AGAIN] += share * seconds
    return Cost(cost.forward, tuple(backward), cost.weight)


_KEPT: dict[tuple[Any, ...], LayerTimes] = {}


def layer_times(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> LayerTimes:
    """Layers take the same in every layout that divides them alike, whatever is done with the rest: found once."""
    own = recipe.parallelism
    held = (
        *(recipe.model, recipe.precision, recipe.kernels, recipe.data),
        *(own.context, own.recompute, own.overlap, hardware, ceilings),
    )
    key = (
        *map(id, held),
        *(own.tp, own.cp, own.ep, own.etp, own.pp, own.dp_replicate, own.dp_shard),
        *(own.sequence_parallel, own.dispatch, recipe.train.micro_batch),
    )
    found = _KEPT.get(key)
    if found is None:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        # what the key names by identity is held by the value
        found = _KEPT[key] = LayerTimes(recipe, hardware, topology_of(recipe, hardware), ceilings)
    return found
