"""Bytes that one layer keeps between its forward and its backward pass, for one micro batch on one rank.

Counted tensor by tensor from the facts of the layer's parts, as the layer runs: compiled, or as plain operations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megaspec.core.part_facts import AttentionProducts, Kept, Routing, Width
from megaspec.estimate.layer_run import LayerRun
from megaspec.nn.layer.facts import LayerFacts

# Numbers in at least fp32 of each feature of an expert that its activation's gradient works with as plain operations.
_PLAIN_ACTIVATION = 10


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that waits for the backward pass."""

    what: str
    size: int
    """Bytes."""
    freed_by: tuple[str, ...] = ()
    """Parts whose recomputation makes it again."""
    is_routed: bool = False
    """Tokens on their way to experts or back."""


@dataclass(frozen=True)
class LayerBytes:
    """One layer and one micro batch."""

    input: int
    """Its input alone: what is left when all of it is recomputed."""
    kept: int
    """From forward to backward, the input included, tokens of experts left out."""
    routed: int
    """The same for tokens that experts receive and return."""
    again: int
    """What `selective` makes again before the backward pass."""
    backward: int
    """Gradients of activations that live at once inside the backward pass; where none comes, the activations that live
    at once inside the forward pass."""
    sent: int
    """Tokens on their way to experts, while they move."""
    deferred: int
    """What its weight gradients are made of: inputs of its matrix products and gradients of their outputs."""


@lru_cache(maxsize=16384)
def layer_bytes(run: LayerRun, layer: LayerFacts) -> LayerBytes:
    """What a layer keeps and needs, after recomputation."""
    tensors = kept_tensors(run, layer)
    stream = layer.d_model * run.stream_bytes_per_feature
    kept = 0
    routed = 0
    again = 0
    for tensor in tensors:
        if run.execution.recomputed & set(tensor.freed_by):
            again += tensor.size
        elif tensor.is_routed:
            routed += tensor.size
        else:
            kept += tensor.size
    backward = 0
    if layer.runs_backward:
        backward = _backward(run, layer)
    if not layer.widest.runs_backward:
        # nothing of it waits for a backward pass: it takes most while it runs
        backward = max(backward, _forward(run, layer))
    if run.degrees.tp > 1:
        # beside the feed-forward layer's own gradient that of the stream is gathered
        backward += stream
    sent = 0
    if layer.routing is not None:
        sent = _sent(run, layer.routing)
    return LayerBytes(
        input=stream,
        kept=kept,
        routed=routed,
        again=again,
        backward=backward,
        sent=sent,
        deferred=_deferred(run, layer, tensors),
    )


def _backward(run: LayerRun, layer: LayerFacts) -> int:
    """The largest gradient inside of the layer."""
    features = run.on_rank(layer.gradient)
    routing = layer.widest.routing
    if routing is None:
        return run.tokens.all * features * run.width
    rows = run.expert_rows(routing)
    size = rows * features * run.width
    if not run.execution.is_compiled:
        size += rows * routing.expert_width.on(run.degrees) * _PLAIN_ACTIVATION * run.wide
    return size


def _forward(run: LayerRun, layer: LayerFacts) -> int:
    """What the part that makes most works with, beside the stream before it and what it has normed of that; what is
    kept of it is counted there."""
    made = 0
    for kept in layer.widest.kept(run.execution):
        if kept.what not in layer.trained_inputs:
            made += run.kept_bytes(kept, layer)
    return made + 2 * layer.d_model * run.stream_bytes_per_feature


def _sent(run: LayerRun, routing: Routing) -> int:
    """Rows [rows, d_model] as they leave and as they arrive; with a gather the tokens of all ranks besides."""
    row = routing.d_model * run.width
    rows = run.tokens.stream * routing.top_k + run.expert_rows(routing)
    if run.gathers_tokens:
        rows += run.tokens.stream * run.degrees.ep * run.degrees.etp
    return rows * row


def _deferred(run: LayerRun, layer: LayerFacts, tensors: tuple[KeptTensor, ...]) -> int:
    """Inputs are kept tensors, each of them once; a gradient is as large as what its product made. Of the router, which
    is small, the input alone."""
    sizes = {tensor.what: tensor.size for tensor in tensors}
    inputs = {linear.input_kept for linear in layer.linears if not linear.is_frozen}
    total = sum(sizes.get(what, 0) for what in inputs)
    for linear in layer.linears:
        if linear.in_flops and not linear.is_frozen:
            rows = run.count(linear.tokens, layer.routing)
            total += rows * run.on_rank(linear.outputs) * run.width
    return total


def kept_tensors(run: LayerRun, layer: LayerFacts) -> tuple[KeptTensor, ...]:
    """Every tensor that a layer keeps when nothing is recomputed."""
    found = [_sized(kept, run, layer) for kept in layer.kept(run.execution)]
    if layer.attention is None or not layer.runs_backward:
        return tuple(found)
    core = _core(run, layer.attention, in_fp8=layer.in_fp8)
    if not layer.attends_backward:
        # its output alone, where a product needs it for its weight gradient
        core = (one for one in core if one.what in layer.trained_inputs)
    return (*found, *core)


def _sized(kept: Kept, run: LayerRun, layer: LayerFacts) -> KeptTensor:
    freed_by = kept.freed_by
    if kept.what in layer.fp8_inputs:
        # the product keeps what it has quantised: an activation alone makes again what that was made from
        freed_by = tuple(part for part in freed_by if part != "activation")
    return KeptTensor(kept.what, run.kept_bytes(kept, layer), freed_by, kept.is_routed)


def _beside_sinks(run: LayerRun, out: int, heads: int, *, in_fp8: bool) -> int:
    """Bytes of what is kept beside an output of `out` numbers that sinks have scaled, `heads` of them over all tokens:
    the output before, and what the sinks leave of each head, at least in fp32."""
    wide = max(run.width, 4)
    kept = heads * wide
    if not in_fp8:
        # in fp8 the product keeps none of its own in the model's format
        kept += out * run.width
    if not run.execution.is_compiled and wide > run.width:
        # in the format in which it is scaled
        kept += out * wide
    return kept


def _core(run: LayerRun, attention: AttentionProducts, *, in_fp8: bool) -> Iterator[KeptTensor]:
    """softmax(q kᵀ) v, and its output, which the matrix product after it keeps. Attention written out turns heads and
    tokens round in a copy, which recomputation does not free."""
    tokens = run.tokens.all
    heads = Width(attention.n_heads, 1, "tp").on(run.degrees)
    # numbers of the output [tokens, heads, d_value]
    out = tokens * heads * attention.d_value
    by_core = ("core_attention",)
    freed_by = by_core
    if run.execution.keeps_scores:
        freed_by = ()
    yield KeptTensor("o", out * run.width, freed_by)
    if in_fp8:
        # as the product after it takes it
        yield KeptTensor("o.fp8", run.fp8_bytes(out))
    if attention.has_sinks and attention.is_in(run.execution.keeps_without_sinks, seq_len=run.execution.seq_len):
        yield KeptTensor("o.without_sinks", _beside_sinks(run, out, tokens * heads, in_fp8=in_fp8), by_core)
    if run.execution.swaps_heads:
        # as attention made it
        yield KeptTensor("o.of_heads", out * run.width, freed_by)
    if not run.execution.keeps_scores:
        yield KeptTensor("log_sum", tokens * heads * run.bytes_of("statistic"), by_core)
        return
    # the weights [tokens, heads, seq_len] in fp32 and in the model's format, which may be one; the mask, a byte each
    both_formats = run.width
    if run.width < 4:
        both_formats += 4
    scores = tokens * run.tokens.seq_len * heads
    weights = scores * both_formats + run.tokens.seq_len**2
    in_fp32 = max(run.width, 4)
    if attention.has_sinks:
        # a column beside the weights, before they change their format
        weights += tokens * heads * in_fp32
    yield KeptTensor("weights", weights, by_core)
    if attention.caps_scores:
        # a tanh keeps what it made
        yield KeptTensor("capped", scores * in_fp32, by_core)
    # keys and values once for each query head, and queries, in the order of the products
    turned = tokens * heads * (2 * attention.d_key + attention.d_value) * run.width
    yield KeptTensor("turned", turned, by_core)
