"""Every collective of a training step: what it carries, over which ranks, on which link. Counted for one rank.

Here: what a micro batch sends inside of its layers, at the model's ends and between pipeline stages, and the sum of a
step. What follows the micro batches stands in step_communication.py.

Sizes are bytes of the whole tensor (see Collective.bytes):
    T       tokens of a rank in a matrix product        run.tokens.all
    T_s     tokens of a rank between matrix products    run.tokens.stream, T / tp under sequence parallelism
    D       d_model
    e       bytes of a number in the model's format     run.width, of one in fp8 1
    w       bytes of one in at least fp32               run.wide
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from megaspec.core.part_facts import AttentionProducts, Linear, Routing
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_run import LayerRun, context_split, layer_run
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.step_communication import step_collectives
from megaspec.estimate.topology import Collective, CollectiveKind, Phase, Topology, topology_of
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import head_sizes, recomputed_layers
from megaspec.nn.fp8_facts import GRADIENTS_IN_FP8, INPUTS_IN_FP8, VALUE_BYTES
from megaspec.nn.layer.facts import LayerFacts, SubLayer
from megaspec.parallelism.passes import Shape, rank_of_stage, stage_number
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.precision.spec import fp8_recipe
from megaspec.recipe import Recipe

AGREED = "largest elements of products"
"""Sent inside of operations that a trace does not look into."""

# Bytes of a number of an expert or of a count of tokens: int64.
_INDEX = 8


def collectives_of(recipe: Recipe, hardware: Hardware | None, rank: int | None = None) -> tuple[Collective, ...]:
    """All collectives of a step of one pipeline rank; None: of the one that sends most."""
    if rank is not None:
        return _rank_collectives(recipe, hardware, rank)
    # the first has the embedding, the last the output head, and those between them are alike
    pp = recipe.parallelism.pp
    candidates = [_rank_collectives(recipe, hardware, number) for number in sorted({0, pp // 2, pp - 1})]
    return max(candidates, key=_bytes_sent)


def _bytes_sent(collectives: tuple[Collective, ...]) -> float:
    return sum(one.sent for one in collectives)


def _rank_collectives(recipe: Recipe, hardware: Hardware | None, rank: int) -> tuple[Collective, ...]:
    topology = topology_of(recipe, hardware)
    shape = shape_of(recipe)
    # how often each occurs in a step, by the collective with times=1
    found: Counter[Collective] = Counter()
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[rank]:
        for one in chunk_collectives(recipe, topology, chunk):
            found[replace(one, times=1)] += one.times * shape.micro_batches
    for one in transfers(recipe, topology, shape, rank):
        found[replace(one, times=1)] += one.times
    for one in step_collectives(recipe, topology, rank):
        found[replace(one, times=1)] += one.times
    return tuple(replace(one, times=times) for one, times in found.items())


def chunk_collectives(recipe: Recipe, topology: Topology, chunk: Chunk) -> Iterator[Collective]:
    """Of one micro batch through one chunk."""
    facts = facts_of(recipe)
    again = chunk.layers[: recomputed_layers(recipe, len(chunk.layers))]
    layers = facts.kinds_of(chunk.layers)
    repeated = facts.kinds_of(again)
    ended_early = facts.kinds_of(_ends_of_groups(recipe, again))
    for kind in layers:
        for one in layer_collectives(recipe, topology, kind):
            yield replace(one, times=one.times * layers[kind], last=False)
            # recomputation sends again what the forward pass sent, but for a last collective whose result nothing needs
            times = one.times * (repeated[kind] - one.last * ended_early[kind]) * kind.runs_backward
            if one.phase == "forward" and times:
                yield replace(one, times=times, phase="backward", last=False)
    yield from end_collectives(recipe, topology, embedding=chunk.embedding, head=chunk.head)


def _ends_of_groups(recipe: Recipe, again: tuple[int, ...]) -> list[int]:
    """Layers that run again together are a group; its last layer ends with the last tensor that is missing."""
    recompute = recipe.parallelism.recompute
    group = 1
    if recompute.method != "block":
        group = recompute.layers or 1
    ends = list(again[group - 1 :: group])
    if len(again) % group:
        ends.append(again[-1])
    return ends


def layer_collectives(recipe: Recipe, topology: Topology, layer: LayerFacts) -> Iterator[Collective]:
    """Of one micro batch through one layer."""
    for number, sublayer in enumerate(layer.sublayers):
        is_last = number == len(layer.sublayers) - 1 and sublayer.post is None
        if sublayer.kind == "attention":
            yield from _attention_collectives(recipe, topology, layer, is_last=is_last)
        elif sublayer.kind == "feed-forward":
            yield from _feed_forward_collectives(recipe, topology, sublayer, in_fp8=layer.in_fp8, is_last=is_last)
        else:
            yield from _expert_collectives(recipe, topology, layer.routing, sublayer, is_last=is_last)


def _attention_collectives(
    recipe: Recipe, topology: Topology, layer: LayerFacts, *, is_last: bool
) -> Iterator[Collective]:
    """The residual stream over tp, and what norms over all heads need; keys and values (or heads) over cp. `is_last`:
    nothing of the layer comes behind it."""
    run = layer_run(recipe)
    products = [linear for part in layer.parts if part.attention is not None for linear in part.linears]
    pair = (products[0], products[-1])
    if layer.attention.sums_heads:
        # a token's squares of queries and of keys; their gradients the other way
        squares = 2 * run.tokens.all * run.wide
        phases: list[Phase] = ["forward"]
        if _is_reached(pair[0]):
            phases.append("backward")
        for phase in phases:
            yield from topology.make("norms of heads", "all_reduce", ("tp",), squares, 1, phase=phase)
    last = is_last and _ends_with_a_sum(recipe)
    yield from _tensor_parallel(recipe, topology, "attention", pair, in_fp8=layer.in_fp8, last=last)
    for one in _context_parallel(recipe, topology, layer.attention):
        if not layer.attends_backward and one.phase == "backward":
            continue
        yield one
        if one.phase == "forward" and layer.attends_backward and "core_attention" in run.execution.recomputed:
            yield replace(one, phase="backward")


def _ends_with_a_sum(recipe: Recipe) -> bool:
    """Whether what comes behind a pair of products keeps nothing: a compiled block runs again as a whole, and dropout
    behind it keeps its mask."""
    return recipe.model.dropout == 0 and recipe.kernels.compile != "block"


def _feed_forward_collectives(
    recipe: Recipe, topology: Topology, sublayer: SubLayer, *, in_fp8: bool, is_last: bool
) -> Iterator[Collective]:
    """The residual stream over tp."""
    again = "mlp" in layer_run(recipe).execution.recomputed
    # a norm or dropout behind it takes the sum once more
    output_again = recipe.model.dropout > 0 or sublayer.post is not None
    last = is_last and _ends_with_a_sum(recipe)
    pair = (sublayer.mix.linears[0], sublayer.mix.linears[-1])
    yield from _tensor_parallel(
        recipe, topology, "feed-forward", pair, in_fp8=in_fp8, again=again, output_again=output_again, last=last
    )


def _expert_collectives(
    recipe: Recipe, topology: Topology, routing: Routing, sublayer: SubLayer, *, is_last: bool
) -> Iterator[Collective]:
    """Routers' choices over cp · tp, tokens over ep · etp, and the shared experts' residual stream over tp."""
    parallelism = recipe.parallelism
    recomputed = layer_run(recipe).execution.recomputed
    runs_backward = any(_is_reached(linear) for linear in sublayer.mix.linears)
    routed = [linear for linear in sublayer.mix.linears if linear.tokens == "routed"]
    reached = _Reached(tokens=routed[0].makes_input_gradient, weights=_is_reached(sublayer.mix.linears[0]))
    whole_again = "moe" in recomputed and runs_backward
    takes_output = recipe.model.dropout > 0 or sublayer.post is not None
    for one in _router_exchanges(recipe, topology, routing):
        yield one
        if whole_again:
            yield replace(one, phase="backward")
    # shared experts come before the way back where they run beside the way there
    run_beside = parallelism.overlap.shared_experts and parallelism.ep * parallelism.etp > 1
    shared_last = routing.has_shared and not run_beside
    last_way = not (takes_output or shared_last)
    for one in _token_dispatch(recipe, topology, routing, reached, again=whole_again, last=last_way):
        if runs_backward or one.phase == "forward":
            yield one
    if routing.has_shared:
        # the gate keeps their output
        last = is_last and shared_last and _ends_with_a_sum(recipe) and not routing.gates_shared
        yield from _tensor_parallel(
            recipe,
            topology,
            "shared experts",
            (sublayer.shared.linears[0], sublayer.shared.linears[-1]),
            again=whole_again or "shared_experts" in recomputed,
            output_again=takes_output or (whole_again and not last),
            last=last,
        )


def _tensor_parallel(
    recipe: Recipe,
    topology: Topology,
    what: str,
    pair: tuple[Linear, Linear],
    *,
    in_fp8: bool = False,
    again: bool = False,
    output_again: bool = False,
    last: bool = False,
) -> Iterator[Collective]:
    """The residual stream [T, D] around a pair of matrix products that split columns, then rows: each rank has a part
    of the features between them, so that outputs are summed, and under sequence parallelism a part of the tokens
    outside.

    The backward pass gathers the input of the first once more for its weight gradient, unless a compiled block keeps
    it; it reduces the gradient of that input beside the weight gradient. `in_fp8`: the layer's products take fp8, and
    what they take is gathered as bytes where it can be. `again`: the pair runs again, and `output_again` with the sum
    of its output; `last`: see Collective. Where the first of the `pair` is frozen, its input is not gathered again, and
    where nothing is trained before it, nobody waits for its input's gradient.
    """
    first, second = pair
    again = again and _is_reached(second)
    run = layer_run(recipe)
    beside = recipe.parallelism.overlap.tp
    numbers = run.tokens.all * recipe.model.d_model
    # T · D · e
    size = numbers * run.width
    sums_again = int(again and output_again)

    def make(
        kind: CollectiveKind,
        times: int,
        phase: Phase,
        *,
        size: int = size,
        overlapped: bool = False,
        last: bool = False,
    ) -> Iterator[Collective]:
        return topology.make(what, kind, ("tp",), size, times, phase=phase, overlapped=overlapped, last=last)

    fp8 = None
    if in_fp8 and first.takes_fp8 and second.takes_fp8:
        fp8 = fp8_recipe(recipe.precision)
        yield from _agreements(recipe, topology, pair, again=again)
    if not recipe.parallelism.sequence_parallel:
        yield from make("all_reduce", 1, "forward", last=last)
        yield from make("all_reduce", sums_again, "backward")
        yield from make("all_reduce", int(first.makes_input_gradient), "backward", overlapped=beside)
        return
    input_size = size
    gradient_size = size
    # what the backward pass takes of the input: of a recipe that gathers first as well, quantised since
    input_again_size = size
    if fp8 is not None:
        input_again_size = ceil(numbers * VALUE_BYTES.get(fp8, 1))
    if fp8 in INPUTS_IN_FP8:
        input_size = numbers
    if fp8 in GRADIENTS_IN_FP8:
        gradient_size = numbers
    yield from make("all_gather", 1, "forward", size=input_size)
    yield from make("reduce_scatter", 1, "forward", last=last)
    yield from make("all_gather", int(_is_reached(second)), "backward", size=gradient_size)
    yield from make("all_gather", int(again), "backward", size=input_size)
    input_again = int(not first.is_frozen)
    if recipe.kernels.compile != "block":
        yield from make("all_gather", input_again, "backward", size=input_again_size)
    elif fp8 is not None and fp8 not in GRADIENTS_IN_FP8:
        # compiled, a block keeps the input as it was gathered; what the backward pass takes by other scales it gathers
        # in its forward pass, too
        yield from make("all_gather", input_again, "forward", size=input_again_size)
        yield from make("all_gather", input_again * again, "backward", size=input_again_size)
    if fp8 == "rowwise":
        # the scales of tokens
        scales = run.tokens.all * run.wide
        yield from make("all_gather", 1, "forward", size=scales)
        yield from make("all_gather", int(again), "backward", size=scales)
    yield from make("reduce_scatter", sums_again, "backward")
    yield from make("reduce_scatter", int(first.makes_input_gradient), "backward", overlapped=beside)


def _agreements(
    recipe: Recipe, topology: Topology, pair: tuple[Linear, Linear], *, again: bool
) -> Iterator[Collective]:
    """The largest elements of what tensor-parallel ranks hold parts of while it is quantised, inside the operations of
    products. Delayed scales need none, and blocks lie on one rank."""
    first, second = pair
    fp8 = fp8_recipe(recipe.precision)
    run = layer_run(recipe)
    splits_tokens = recipe.parallelism.sequence_parallel

    def make(numbers: int, times: int, phase: Phase) -> Iterator[Collective]:
        return topology.make(AGREED, "all_reduce", ("tp",), numbers * run.wide, times, phase=phase)

    if fp8 == "tensorwise":
        # the second's input, and with tokens apart the first's; their gradients the other way
        inputs = 1 + splits_tokens
        gradients = int(_is_reached(first)) + int(splits_tokens and _is_reached(second))
        yield from make(1, inputs, "forward")
        yield from make(1, inputs * again, "backward")
        yield from make(1, gradients, "backward")
    elif fp8 == "nvfp4":
        # of what lies apart, in rows and in columns
        yield from make(2, 1, "forward")
        yield from make(2, int(again), "backward")
        yield from make(2, int(_is_reached(first)), "backward")
    elif fp8 == "rowwise":
        # of each token's features that lie apart, and of each feature's tokens for a weight gradient
        tokens = run.tokens.all
        features = int(splits_tokens and not first.is_frozen)
        yield from make(tokens, 1, "forward")
        yield from make(tokens, int(again), "backward")
        yield from make(recipe.model.d_model, features, "forward")
        yield from make(recipe.model.d_model, features * again, "backward")
        yield from make(tokens, int(first.makes_input_gradient), "backward")


def _is_reached(linear: Linear) -> bool:
    """The gradient of what a product puts out is made."""
    return linear.makes_input_gradient or not linear.is_frozen


def _context_parallel(recipe: Recipe, topology: Topology, attention: AttentionProducts) -> Iterator[Collective]:
    """Keys and values [T, heads · size], or heads against tokens, among the ranks that share a sequence: each query
    needs the keys of all tokens before it."""
    parallelism = recipe.parallelism
    cp = parallelism.cp
    if cp == 1:
        return
    run = layer_run(recipe)
    sizes = head_sizes(run, attention)
    kv = run.tokens.all * sizes.keys_and_values * run.width
    # their gradients are summed in at least fp32
    grad_kv = run.tokens.all * sizes.keys_and_values * run.wide

    def make(
        kind: CollectiveKind, size: float, times: int, phase: Phase, *, overlapped: bool = False
    ) -> Iterator[Collective]:
        return topology.make("context", kind, ("cp",), size, times, phase=phase, overlapped=overlapped)

    if parallelism.context.kind == "all_gather":
        yield from make("all_gather", kv * cp, 1, "forward")
        yield from make("all_gather", kv * cp, 1, "backward")
        yield from make("reduce_scatter", grad_kv * cp, 1, "backward")
        return
    split = context_split(parallelism.context, cp)
    if split.heads > 1:
        # q, k and v to whole sequences of fewer heads, and the output back: two messages, whose mean is half of all
        # four tensors. The gradients go the other way.
        queries_and_outputs = run.tokens.all * (sizes.queries + sizes.outputs) * run.width
        for phase in ("forward", "backward"):
            for one in make("all_to_all", (kv + queries_and_outputs) / 2, 2, phase):
                yield replace(one, ranks=split.heads)
    if split.ring > 1:
        # keys and values go round; in the backward pass their gradients with them
        yield from make("p2p", kv, split.ring - 1, "forward", overlapped=True)
        yield from make("p2p", kv + grad_kv, split.ring - 1, "backward", overlapped=True)


class _Reached(NamedTuple):
    """Of what is sent to experts, what has a gradient that goes the other way."""

    tokens: bool
    weights: bool


def _token_dispatch(
    recipe: Recipe, topology: Topology, routing: Routing, reached: _Reached, *, again: bool, last: bool
) -> Iterator[Collective]:
    """Tokens [rows, D] to their experts and back: the way there, and its gradients' way, beside the shared experts.

    With them go the weights that they have for their experts, with a gather the experts' numbers. `again`: all of it
    runs again, but for a way back that is the `last` (see Collective).
    """
    run = layer_run(recipe)
    parallelism = recipe.parallelism
    # bytes of a token's features and of its weight for one expert
    row = routing.d_model * run.width
    weight = run.wide
    beside = routing.has_shared and parallelism.overlap.shared_experts
    there_again = int(again)
    back_again = int(again and not last)

    def make(
        kind: CollectiveKind, size: float, times: int, phase: Phase, *, overlapped: bool = False, last: bool = False
    ) -> Iterator[Collective]:
        what = "experts' tokens"
        return topology.make(what, kind, ("ep", "etp"), size, times, phase=phase, overlapped=overlapped, last=last)

    if parallelism.dispatch == "all_gather":
        # every rank gets all tokens, and returns a sum for each
        tokens = run.tokens.stream * parallelism.ep * parallelism.etp
        choices = tokens * routing.top_k * (weight + _INDEX)
        yield from make("all_gather", tokens * row, 1, "forward", overlapped=beside)
        yield from make("all_gather", choices, 1, "forward")
        yield from make("all_gather", tokens * row, there_again, "backward", overlapped=beside)
        yield from make("all_gather", choices, there_again, "backward")
        yield from make("reduce_scatter", tokens * row, 1, "forward", last=last)
        yield from make("reduce_scatter", tokens * row, back_again, "backward")
        # the gradients of the sums, of the tokens and of their weights
        yield from make("all_gather", tokens * row, 1, "backward")
        yield from make("reduce_scatter", tokens * row, int(reached.tokens), "backward", overlapped=beside)
        yield from make("reduce_scatter", tokens * routing.top_k * weight, int(reached.weights), "backward")
        return
    rows = run.expert_rows(routing)
    yield from make("all_to_all", rows * row, 1, "forward", overlapped=beside)
    yield from make("all_to_all", rows * row, 1, "forward", last=last)
    yield from make("all_to_all", rows * weight, 1, "forward")
    yield from make("all_to_all", rows * row, reached.tokens + there_again, "backward", overlapped=beside)
    yield from make("all_to_all", rows * row, 1 + back_again, "backward")
    yield from make("all_to_all", rows * weight, reached.weights + there_again, "backward")


def _router_exchanges(recipe: Recipe, topology: Topology, routing: Routing) -> Iterator[Collective]:
    """What routers tell each other where sequences are split: all scores [tokens, experts] under sinkhorn, how often
    each expert was chosen for a balancing loss, and who chose it with what weight where experts drop tokens."""
    run = layer_run(recipe)
    tokens = run.tokens.whole

    def make(what: str, kind: CollectiveKind, size: int) -> Iterator[Collective]:
        return topology.make(what, kind, ("cp", "tp"), size, 1, phase="forward")

    if "scores" in routing.exchanges:
        yield from make("experts' scores", "all_gather", tokens * routing.n_experts * run.wide)
    if "choices" in routing.exchanges:
        yield from make("experts' choices", "all_gather", tokens * routing.top_k * _INDEX)
    if "choice weights" in routing.exchanges:
        yield from make("experts' choices", "all_gather", tokens * routing.top_k * run.wide)
    if "loads" in routing.exchanges:
        yield from make("experts' loads", "all_reduce", run.tokens.sequences * routing.n_experts * _INDEX)


def end_collectives(recipe: Recipe, topology: Topology, *, embedding: bool, head: bool) -> Iterator[Collective]:
    """The residual stream [T, D] at the embedding and the head, and statistics [T] of the loss: the vocabulary is split
    over tp, so that a rank has the rows of some tokens and the logits of some classes."""
    run = layer_run(recipe)
    # T · D · e
    size = run.tokens.all * recipe.model.d_model * run.width
    facts = facts_of(recipe)
    splits_tokens = recipe.parallelism.sequence_parallel
    sums: CollectiveKind = "all_reduce"
    if splits_tokens:
        sums = "reduce_scatter"
    if embedding:
        yield from topology.make("embedding", sums, ("tp",), size, 1, phase="forward")
        if splits_tokens and not facts.embedding_table.is_frozen:
            yield from topology.make("embedding", "all_gather", ("tp",), size, 1, phase="backward")
    if head:
        if splits_tokens:
            yield from topology.make("output head", "all_gather", ("tp",), size, 1, phase="forward")
        if facts.head_makes_input_gradient:
            yield from topology.make("output head", sums, ("tp",), size, 1, phase="backward")
        # three times: the largest logit, the sum of exponentials and the target's logit of each token
        yield from topology.make("loss", "all_reduce", ("tp",), run.wide * run.tokens.all, 3, phase="forward")


def transfers(recipe: Recipe, topology: Topology, shape: Shape, rank: int) -> Iterator[Collective]:
    """The residual stream [T_s, D] to the next stage, and its gradient to the one before."""
    last = shape.pp * shape.virtual - 1
    stages = [stage_number(rank, chunk, pp=shape.pp, is_v=shape.is_v) for chunk in range(shape.virtual)]
    size = _stream_bytes(layer_run(recipe), recipe)
    overlapped = shape.virtual > 1 and recipe.parallelism.overlap.p2p
    for phase, step in (("forward", 1), ("backward", -1)):
        sends = 0
        for stage in stages:
            target = stage + step
            # at the turn of a V two stages that follow each other lie on one rank
            first = 0 if phase == "forward" else shape.first_trained
            if first <= target <= last and rank_of_stage(shape, target) != rank:
                sends += 1
        times = sends * shape.micro_batches
        yield from topology.make("stages", "p2p", ("pp",), size, times, phase=phase, overlapped=overlapped)


def transfer_of(recipe: Recipe, topology: Topology) -> Collective | None:
    """One micro batch from a stage to the next; None with one stage."""
    size = _stream_bytes(layer_run(recipe), recipe)
    return next(topology.make("stages", "p2p", ("pp",), size, 1, phase="forward"), None)


def _stream_bytes(run: LayerRun, recipe: Recipe) -> int:
    """Of a micro batch between two layers: T_s · D · e."""
    return run.tokens.stream * recipe.model.d_model * run.width
