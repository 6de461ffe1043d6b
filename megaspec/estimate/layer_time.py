"""How long one micro batch takes through a layer, the embedding and the head, on one rank."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megaspec.estimate.attention_rates import against_causal
from megaspec.estimate.communication import end_collectives, layer_collectives
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_run import layer_run, takes_all_layers
from megaspec.estimate.one_order import one_order_cost
from megaspec.estimate.parameters import rank_parameters
from megaspec.estimate.tables import tables_in_place
from megaspec.estimate.throughput import MeasuredThroughput, ProductKind
from megaspec.estimate.topology import Collective, Topology, topology_of
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import (
    ADDING_REACHES,
    ALL_OF_IT,
    CAST_REACHES,
    AttentionWork,
    Product,
    RecomputablePart,
    dequantised_precision,
    embedding_part,
    fp8_bytes,
    head_part,
    is_dequantised,
    layer_parts,
    precision_outside_fp8,
    recomputed_layers,
    shared_products,
    weights_bytes,
)
from megaspec.nn.layer.facts import LayerFacts, WeightCount
from megaspec.parallelism.stages import Chunk
from megaspec.recipe import Recipe

# What a collective that runs beside arithmetic costs all the same, as a share of its time: it takes SMs and memory
# bandwidth away. Measured on 2 and 4 H200: an overlapped all-reduce of gradients adds about half of its time.
OVERLAPPED_COST = 0.5
# Matrix products in a step reach this much of what they reach alone on a GPU whose power is not limited: their factors
# are no longer in the cache.
SUSTAINED = 0.95
# Attention is measured between products that it lets cool down: at nearly the full clock, where theirs is lower.
# Seconds of attention at the clock of the measured products over measured ones, of a GPU whose power is limited. One
# H200, in profiled steps: 0.99 of the measured seconds at 1,924 MHz, 1.19 at 1,636, 1.26 at 1,525: they are those of
# 1,910 MHz.
ATTENTION_HOT = 1.28
# Seconds of an fp8 product against one whose scales are of whole tensors, the way that throughput is measured. Blocks
# of 1x128 and 128x128: 1297 of 1508 TFLOP/s on an H200 (8192 on each side, forward). Blackwell scales mxfp8 in its
# tensor cores. Both formats, e4m3 and e5m2, run at one rate. With scales of rows and columns products take as long and
# draw more: on two H200 the clock of steps of 8B was 27 and 32 MHz lower than with scales of tensors under the same
# power, and steps took 1.015 and 1.012 times as long, which a share of products of about a half makes of this. nvfp4 by
# NVIDIA's data sheets, of which nothing is measured: 9 PFLOP/s without sparsity for fp8's 4.5 (HGX B200), 10 for 5
# (GB200 NVL72).
FP8_COST = {
    "tensorwise": 1.0,
    "delayed": 1.0,
    "rowwise": 1.025,
    "blockwise": 1508 / 1297,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
# Of weight gradients. Blockwise, both factors have blocks of 1x128: in profiled steps of 8B on one H200 they took 261
# ms at 1,600 MHz, and with scales of whole tensors 182 ms at 1,511 MHz.
FP8_WGRAD_COST = FP8_COST | {"blockwise": (261 * 1600) / (182 * 1511)}
# Seconds of a grouped product in fp8 over what they were if it gained as much by fp8 as dense ones do. CUTLASS computes
# it, not cuBLAS: 885 TFLOP/s in a profiled step of an H200 (32 experts of 2,880, 1,024 rows each, 1,889 MHz), where
# bf16 reaches 622 (512 rows each, 1,894 MHz): 1.42 times as much, and dense products 1.85 times. The plan takes
# products from the clock of the measured table, 1,490 MHz, to that of the step: one measured at 1,889 counts for more.
GROUPED_FP8_COST = 1.85 / 1.42 * (1889 / 1490)
# Seconds between the some 50 kernels of a layer's forward and backward pass, about 1 microsecond each. The backward
# pass has twice as many as the forward pass.
GAPS_SECONDS = 0.05e-3
# What a pass spends its seconds on. What is computed of the forward pass again in the backward pass is told apart, in
# the order of what it repeats; what that sends again counts by what it is.
COMPUTED = ("matrix products", "attention", "element-wise")
RECOMPUTED = tuple(f"{kind} again" for kind in COMPUTED)
KINDS = (
    *COMPUTED,
    *RECOMPUTED,
    "tensor parallel",
    "context parallel",
    "expert parallel",
)
_PRODUCTS = KINDS.index("matrix products")
_ATTENTION = KINDS.index("attention")
_BYTES = KINDS.index("element-wise")
_AGAIN = len(COMPUTED)
"""From the place of what is computed to that of the same computed again."""
_ON_TENSOR_CORES = (_PRODUCTS, _ATTENTION, _PRODUCTS + _AGAIN, _ATTENTION + _AGAIN)
_TENSOR = KINDS.index("tensor parallel")
_KIND_OF = {"context": KINDS.index("context parallel"), "experts' tokens": KINDS.index("expert parallel")}
# Layouts whose times are remembered; when there are more, all are forgotten.
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


class _CostSum:
    """A Cost that is being added up."""

    def __init__(self) -> None:
        self.forward = list(_NOTHING)
        self.backward = list(_NOTHING)
        self.weight = list(_NOTHING)

    def add(self, cost: Cost, times: int) -> None:
        for kind in range(len(KINDS)):
            self.forward[kind] += times * cost.forward[kind]
            self.backward[kind] += times * cost.backward[kind]
            self.weight[kind] += times * cost.weight[kind]

    @property
    def cost(self) -> Cost:
        return Cost(tuple(self.forward), tuple(self.backward), tuple(self.weight))


def at_clock(cost: Cost, seconds: float) -> Cost:
    """A cost whose products and attention take so many times as long."""

    def scaled(times: Times) -> Times:
        return tuple(seconds * one if kind in _ON_TENSOR_CORES else one for kind, one in enumerate(times))

    return Cost(scaled(cost.forward), scaled(cost.backward), scaled(cost.weight))


def added(costs: Iterable[tuple[Cost, int]]) -> Cost:
    """The sum of costs, each so many times."""
    total = _CostSum()
    for cost, times in costs:
        total.add(cost, times)
    return total.cost


def collective_seconds(one: Collective, throughput: MeasuredThroughput, *, messages: int = 1) -> float:
    """One of its times, cut into so many messages."""
    each = throughput.collective_seconds(
        one.kind, one.bytes / messages, one.ranks, within_node=one.within_node, ranks_per_node=one.per_node
    )
    return messages * each


def kind_of(one: Collective) -> int:
    """The place in KINDS where a layer's collective counts."""
    return _KIND_OF.get(one.what, _TENSOR)


def exposed(seconds: float, beside: float) -> float:
    """Seconds that communication adds to arithmetic of `beside` seconds that it runs along: all that lasts longer than
    the arithmetic, and a share of the rest."""
    overlapped = min(seconds, beside)
    return seconds - overlapped + OVERLAPPED_COST * overlapped


@dataclass
class LayerTimes:
    """Costs of the parts of a model in one layout; each is found once."""

    recipe: Recipe
    hardware: Hardware
    topology: Topology
    throughput: MeasuredThroughput
    kept: dict[tuple[Any, ...], Cost] = field(default_factory=dict)
    counts: dict[tuple[Chunk, ...], WeightCount] = field(default_factory=dict)

    def parameters(self, recipe: Recipe, rank: int, chunks: tuple[Chunk, ...]) -> WeightCount:
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
        share = self._recomputed_share(chunk)
        costs = []
        for (layer, in_fp8), count in self._kinds(chunk).items():
            costs.append((_with_recomputation(self.layer(layer, in_fp8), share * layer.runs_backward), count))
        if chunk.embedding:
            costs.append((self._end(embedding_part(self.recipe), embedding=True), 1))
        if chunk.head:
            costs.append((self._end(head_part(self.recipe), embedding=False), 1))
        return added(costs)

    def layers(self, stages: int) -> list[float]:
        """Seconds of one micro batch through each layer, where layers are divided among so many stages."""
        layers = facts_of(self.recipe).layers
        n = max(1, len(layers) // stages)
        share = recomputed_layers(self.recipe, n) / n
        seconds = []
        for number, layer in enumerate(layers):
            cost = self.layer(layer, self._in_fp8(number))
            seconds.append(_with_recomputation(cost, share * layer.runs_backward).total)
        return seconds

    def messages(self, chunk: Chunk) -> Iterator[tuple[Collective, float]]:
        """What one micro batch sends in a chunk, with the seconds that `chunk` counts for it."""
        share = self._recomputed_share(chunk)
        for (layer, in_fp8), layers in self._kinds(chunk).items():
            cost = self.layer(layer, in_fp8)
            for one in layer_collectives(self.recipe, self.topology, layer):
                seconds = layers * self._exposed(one, cost, layer)
                yield replace(one, times=layers * one.times), seconds
                again = round(share * layers) * layer.runs_backward
                if one.phase == "forward" and again:
                    yield replace(one, times=again * one.times, phase="backward"), share * seconds
        for one in end_collectives(self.recipe, self.topology, embedding=chunk.embedding, head=chunk.head):
            yield one, self._exposed(one, Cost(), None)

    def _kinds(self, chunk: Chunk) -> dict[tuple[LayerFacts, bool], int]:
        """Layers that differ, by whether they compute in fp8."""
        layers = facts_of(self.recipe).layers
        return Counter((layers[number], self._in_fp8(number)) for number in chunk.layers)

    def _recomputed_share(self, chunk: Chunk) -> float:
        """Share of the layers that the backward pass computes again as a whole."""
        return recomputed_layers(self.recipe, len(chunk.layers)) / max(1, len(chunk.layers))

    def layer(self, layer: LayerFacts, in_fp8: bool) -> Cost:
        """One micro batch through one layer, without what recomputing the whole of it takes."""
        key = (layer, in_fp8)
        if key not in self.kept:
            self.kept[key] = self._layer(layer, in_fp8)
        return self.kept[key]

    def _layer(self, layer: LayerFacts, in_fp8: bool) -> Cost:
        sums = _CostSum()
        sums.forward[_BYTES] += GAPS_SECONDS * (1 / 3)
        if layer.runs_backward:
            sums.backward[_BYTES] += GAPS_SECONDS * (2 / 3)
        recomputed = layer_run(self.recipe).execution.recomputed
        for part in layer_parts(self.recipe, layer, in_fp8=in_fp8):
            self._add_part(part, sums, is_recomputed=part.name in recomputed and layer.runs_backward)
        # behind all parts: what overlaps is compared with the arithmetic of the whole layer
        self._add_collectives(layer_collectives(self.recipe, self.topology, layer), sums, layer)
        return sums.cost

    def _end(self, part: RecomputablePart, *, embedding: bool) -> Cost:
        sums = _CostSum()
        self._add_part(part, sums, is_recomputed=False)
        # the head's gradients are made with its logits, none is deferred
        for later in (sums.backward, sums.weight):
            sums.forward[_PRODUCTS] += later[_PRODUCTS]
            later[_PRODUCTS] = 0.0
        ends = end_collectives(self.recipe, self.topology, embedding=embedding, head=not embedding)
        self._add_collectives(ends, sums, None)
        return sums.cost

    def _add_part(self, part: RecomputablePart, sums: _CostSum, *, is_recomputed: bool) -> None:
        forward = sums.forward
        backward = sums.backward
        before = forward[:_AGAIN]
        for product in part.products:
            forward[_PRODUCTS] += self._product(product, "forward")
            if product.makes_input_gradient:
                backward[_PRODUCTS] += self._product(product, "dgrad")
            if product.makes_weight_gradient:
                sums.weight[_PRODUCTS] += self._product(product, "wgrad")
        cast = fp8_bytes(self.recipe, part.products)
        reached = part.reached
        if not self.hardware.throttles:
            reached = ALL_OF_IT
        forward_bytes = part.forward_bytes / reached.forward + cast.forward / CAST_REACHES
        backward_bytes = part.backward_bytes / reached.backward + cast.backward / CAST_REACHES
        forward[_BYTES] += self.throughput.memory_seconds(forward_bytes)
        backward[_BYTES] += self.throughput.memory_seconds(backward_bytes)
        sums.weight[_BYTES] += self.throughput.memory_seconds(part.summed_bytes / ADDING_REACHES)
        if part.attention is not None:
            forward[_ATTENTION] += self._attention(part, "forward")
            if part.attends_backward:
                backward[_ATTENTION] += self._attention(part, "backward")
        if is_recomputed:
            for kind in range(_AGAIN):
                backward[_AGAIN + kind] += forward[kind] - before[kind]

    def _product(self, one: Product, kind: ProductKind) -> float:
        """Seconds in a step, of what was measured of the product alone."""
        precision = one.precision
        if is_dequantised(self.recipe, one):
            precision = dequantised_precision(self.recipe)
        if one.groups:
            alone = self.throughput.grouped_matmul_seconds(
                one.groups, one.m, one.n, one.k, precision=precision, kind=kind
            )
        else:
            alone = self.throughput.matmul_seconds(one.m, one.n, one.k, precision=precision, kind=kind)
        scales_cost = 1.0
        if precision == "fp8":
            costs = FP8_COST
            if kind == "wgrad":
                costs = FP8_WGRAD_COST
            scales_cost = costs[self.recipe.precision.recipe]
            if one.groups:
                scales_cost *= GROUPED_FP8_COST
        if self.hardware.throttles:
            # at the table's clock; what it is in a step depends on all of it, see power.py
            return scales_cost * alone
        return scales_cost * alone / SUSTAINED

    def _attention(self, part: RecomputablePart, direction: Literal["forward", "backward"]) -> float:
        one = part.attention
        if self.recipe.kernels.attention == "reference":
            return one.share * self._plain_attention(one, direction)

        length: float = one.seq_len
        if one.document_length is not None:
            # nothing is known of the rate of shorter ones than were measured
            length = min(length, max(one.document_length, self.throughput.shortest_attention))

        def seconds(tokens: float) -> float:
            of_length = self.throughput.attention_seconds(
                tokens=tokens,
                seq_len=length,
                heads=one.heads,
                kv_heads=one.kv_heads,
                head_size=one.head_size,
                direction=direction,
                precision=precision_outside_fp8(self.recipe),
            )
            # at the rate of that length, whole sequences would take so long
            return of_length * one.seq_len / length

        # what was measured of all at once holds the noise of one long run: never more than twice the half
        measured = self._pairs(one) * one.share * min(seconds(one.tokens), 2 * seconds(one.tokens / 2))
        if self.hardware.throttles:
            return ATTENTION_HOT * measured
        return measured

    def _pairs(self, one: AttentionWork) -> float:
        """Pairs of causal attention that take as long, in the order of sums that the recipe asks for; where nobody
        measured that, as in any order."""
        if not self.recipe.train.deterministic:
            return self._pairs_in_any_order(one)
        cost = one_order_cost(self.recipe, self.hardware, self.throughput, one)
        if cost is not None:
            return cost.in_step * self._pairs_in_any_order(one)
        if takes_all_layers(self.recipe) and not one.hides_keys:
            # the table's figure in any order is another kernel's, which it goes through there
            return one.pairs
        return self._pairs_in_any_order(one)

    def _pairs_in_any_order(self, one: AttentionWork) -> float:
        """By the table's own figures of the implementation where it has them, else as work.py reckons."""
        if not one.is_plain or precision_outside_fp8(self.recipe) not in ("bf16", "fp16"):
            return one.pairs
        measured = against_causal(
            self.throughput.attention_rates,
            self.recipe.kernels.attention,
            head_size=one.head_size,
            seq_len=one.seq_len,
            window=one.window,
        )
        return one.pairs if measured is None else measured

    def _plain_attention(self, one: AttentionWork, direction: Literal["forward", "backward"]) -> float:
        """Every query against every key, masked ones too, as two products with a softmax in between that is written
        out; the backward pass has both gradients of each product."""
        rows = one.tokens * one.heads
        precision = precision_outside_fp8(self.recipe)
        # [rows, head_size] x [head_size, seq_len], and [rows, seq_len] x [seq_len, head_size]
        scores = self.throughput.matmul_seconds(rows, one.seq_len, one.head_size, precision=precision, kind="forward")
        values = self.throughput.matmul_seconds(rows, one.head_size, one.seq_len, precision=precision, kind="forward")
        softmax = self.throughput.memory_seconds(weights_bytes(self.recipe, one))
        gradients = {"forward": 1, "backward": 2}[direction]
        return (scores + values) * gradients + softmax

    def _add_collectives(self, found: Iterable[Collective], sums: _CostSum, layer: LayerFacts | None) -> None:
        """What is sent in a layer, or at an end."""
        for one in found:
            seconds = self._exposed(one, sums, layer)
            if one.phase == "forward":
                sums.forward[kind_of(one)] += seconds
            else:
                sums.backward[kind_of(one)] += seconds

    def _exposed(self, one: Collective, cost: Cost | _CostSum, layer: LayerFacts | None) -> float:
        """Seconds that a layer waits for it, in the pass that it belongs to."""
        seconds = one.times * collective_seconds(one, self.throughput)
        if not one.overlapped:
            return seconds
        return exposed(seconds, self._arithmetic_beside(one, cost, layer))

    def _arithmetic_beside(self, one: Collective, cost: Cost | _CostSum, layer: LayerFacts | None) -> float:
        """Seconds of what a collective overlaps with: tokens on their way to experts with the shared experts, the ring
        of keys and values with attention, and each of a layer's two reductions over tp with half of its weight
        gradients."""
        is_forward = one.phase == "forward"
        if one.what == "experts' tokens":
            return self._shared_experts(layer, "forward" if is_forward else "dgrad")
        if one.what != "context":
            return cost.weight[_PRODUCTS] / 2
        if is_forward:
            return cost.forward[_ATTENTION]
        return cost.backward[_ATTENTION]

    def _shared_experts(self, layer: LayerFacts, kind: ProductKind) -> float:
        """Seconds of the products of a layer's shared experts."""
        seconds = 0.0
        for sublayer in layer.sublayers:
            if sublayer.shared is not None:
                products = shared_products(self.recipe, sublayer.shared, layer)
                seconds += sum(self._product(product, kind) for product in products)
        return seconds

    def _in_fp8(self, layer: int) -> bool:
        """Whether the products of a layer, by its number, take fp8."""
        precision = self.recipe.precision
        if precision.kind != "fp8":
            return False
        end = self.recipe.model.n_layers - precision.last_layers_bf16
        return precision.first_layers_bf16 <= layer < end


def _with_recomputation(cost: Cost, share: float) -> Cost:
    """With a share of its forward pass computed and sent again in the backward pass."""
    if not share:
        return cost
    backward = list(cost.backward)
    for kind, seconds in enumerate(cost.forward):
        # what is sent keeps its kind
        if kind < _AGAIN:
            kind += _AGAIN
        backward[kind] += share * seconds
    return Cost(cost.forward, tuple(backward), cost.weight)


_KEPT: dict[tuple[Any, ...], LayerTimes] = {}


def layer_times(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> LayerTimes:
    """Layers take the same in every layout that divides them alike, whatever is done with the rest: found once."""
    parallelism = recipe.parallelism
    # Sections by identity: a search compares thousands of recipes that share them, and hashing a model takes longer
    # than finding its times here. What the key names is held by the value, so that no other object gets its identity.
    key = (
        id(recipe.model),
        id(recipe.precision),
        id(recipe.kernels),
        id(recipe.data),
        id(parallelism.context),
        id(parallelism.recompute),
        id(parallelism.overlap),
        id(hardware),
        id(throughput),
        parallelism.tp,
        parallelism.cp,
        parallelism.ep,
        parallelism.etp,
        parallelism.pp,
        parallelism.dp_replicate,
        parallelism.dp_shard,
        parallelism.sequence_parallel,
        parallelism.dispatch,
        recipe.train.micro_batch,
        # what is done once a step is divided among its micro batches
        recipe.train.global_batch,
        recipe.train.trainable,
        recipe.train.deterministic,
        # which the strategy decides
        tables_in_place(recipe),
    )
    found = _KEPT.get(key)
    if found is None:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        found = LayerTimes(recipe, hardware, topology_of(recipe, hardware), throughput)
        _KEPT[key] = found
    return found
