"""Bytes that one layer keeps between its forward and its backward pass, for one micro batch on one rank.

Counted tensor by tensor from nn/ as the blocks run: compiled, or as plain operations. What can't be trained yet is
counted from the same tensors of a plain way to write it. Letters as in nn/: D model, N heads, H head size, F width.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from megaspec.estimate.share import Share
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import mla_of, moe_of

_STATISTIC = 4
"""Bytes of a row's sum, which is kept in fp32."""


@dataclass(frozen=True)
class Kept:
    """A tensor that waits for the backward pass."""

    what: str
    size: int
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
    """Gradients of activations that live at once inside the backward pass."""
    sent: int
    """Tokens on their way to experts, while they move."""
    deferred: int
    """What its weight gradients are made of: inputs of its matrix products and gradients of their outputs."""


@lru_cache(maxsize=16384)
def layer_bytes(share: Share, *, with_experts: bool) -> LayerBytes:
    """What a layer keeps and needs, after recomputation."""
    tensors = kept_tensors(share, with_experts=with_experts)
    parts = share.recomputed_parts
    freed = [t for t in tensors if parts & set(t.freed_by)]
    stays = [t for t in tensors if not parts & set(t.freed_by)]
    model, moe, e = share.model, moe_of(share.model), share.width
    stream = share.split_tokens * model.d_model * e
    gates = 1 if isinstance(model, GptSpec) else 2
    if with_experts and moe is not None:
        arrived = expert_tokens(share)
        sent = share.split_tokens * moe.top_k * model.d_model * e + arrived * model.d_model * e
        if share.dispatch == "all_gather":
            sent += stream * share.ep * share.etp
        columns = ceil(moe.d_expert / share.etp)
        # as plain operations the activation's gradient holds ten numbers of each feature in fp32
        backward = arrived * columns * (gates * e + (0 if share.is_compiled else 10 * share.wide))
    else:
        sent, backward = 0, share.tokens * gates * ceil(model.d_ffn / share.tp) * e
    return LayerBytes(
        input=stream,
        kept=sum(t.size for t in stays if not t.is_routed),
        routed=sum(t.size for t in stays if t.is_routed),
        again=sum(t.size for t in freed),
        # beside the feed-forward layer's own gradient that of the stream is gathered
        backward=backward + (stream if share.tp > 1 else 0),
        sent=sent,
        deferred=_deferred(share, tensors),
    )


def _deferred(share: Share, tensors: tuple[Kept, ...]) -> int:
    """Inputs are kept tensors; a gradient is as large as what its product made. Latent attention counts as plain."""
    model, sizes = share.model, {t.what: t.size for t in tensors}
    inputs = sum(size for what, size in sizes.items() if what in ("o", "dispatched") or what.endswith(".out"))
    heads, kv_heads = share.heads, share.kv_heads
    # of queries, keys and values, of what attention puts out, and of both products of each feed-forward part
    features = (heads + 2 * kv_heads) * model.d_head + model.d_model * (1 + sum(f"{n}.in" in sizes for n in _ON_TOKENS))
    routed = expert_tokens(share) * model.d_model if "experts.in" in sizes else 0
    wide = sum(size for what, size in sizes.items() if what.endswith(".in"))
    return inputs + (share.tokens * features + routed) * share.width + wide


_ON_TOKENS = ("mlp", "shared")
"""Feed-forward parts that take every token."""


def expert_tokens(share: Share) -> int:
    """Rows that the experts of a rank take when tokens are spread evenly."""
    rows = moe_of(share.model).rows(share.split_tokens, micro_batch=share.micro_batch * share.seq_len)
    return rows * share.etp


def kept_tensors(share: Share, *, with_experts: bool) -> tuple[Kept, ...]:
    """Every tensor that a layer keeps when nothing is recomputed."""
    attention = _latent_attention(share) if mla_of(share.model) else _attention(share)
    mlp = _experts(share) if with_experts and moe_of(share.model) else _mlp(share)
    has_experts = with_experts and moe_of(share.model) is not None
    dropout = _dropout(share, with_experts=has_experts)
    return (*_norm(share, "norm1"), *attention, *_norm(share, "norm2"), *mlp, *dropout)


def _linear_input(share: Share, rows: int, columns: int) -> int:
    """What a matrix product keeps of its input."""
    return rows * columns * (1 if share.is_fp8 else share.width)


def _norm(share: Share, name: str) -> list[Kept]:
    """A norm, its input (for norm2: what attention added to it) and its output, which a matrix product takes."""
    d, rows, e = share.model.d_model, share.split_tokens, share.width
    is_layer_norm = isinstance(share.model, GptSpec)
    statistics = Kept(f"{name}.statistics", rows * _STATISTIC * (2 if is_layer_norm else 1), ("norm",))
    stream = [Kept(f"{name}.stream", rows * d * e)]
    if not share.is_compiled and not is_layer_norm:
        wide = [Kept(f"{name}.{what}", rows * d * share.wide, ("norm",)) for what in ("wide", "normed")]
        # to make them again takes the norm's input, which is kept in the model's format then
        stream = [*stream, *wide] if "norm" in share.recomputed_parts else wide
    # The gather of the forward pass and that of the backward pass are one operation to the compiler, which keeps its
    # result: the whole sequence, not this rank's part of it.
    out_rows = share.tokens if share.is_compiled else rows
    return [*stream, statistics, Kept(f"{name}.out", _linear_input(share, out_rows, d), ("norm",))]


def _attention(share: Share) -> list[Kept]:
    model, rows, e = share.model, share.tokens, share.width
    heads, kv_heads = share.heads, share.kv_heads
    q, kv = heads * model.d_head, kv_heads * model.d_head
    tensors = []
    if share.attention != "reference" or "core_attention" in share.recomputed_parts:
        # values are a view of the product, so that all of it stays
        tensors.append(Kept("qkv", rows * (q + 2 * kv) * e))
        if not isinstance(model, GptSpec):
            tensors += [Kept("q", rows * q * e), Kept("k", rows * kv * e)]
    if getattr(model, "qk_norm", False):
        tensors.append(Kept("qk_norm.statistics", rows * (heads + kv_heads) * _STATISTIC))
        if not share.is_compiled:
            tensors.append(Kept("qk_norm.wide", 2 * rows * (q + kv) * share.wide))
    return [*tensors, *_core(share, heads=heads, d_key=model.d_head, d_value=model.d_head)]


def _latent_attention(share: Share) -> list[Kept]:
    rows, e, mla = share.tokens, share.width, mla_of(share.model)
    heads, d_query = share.heads, mla.d_nope + mla.d_rope
    latents = 2 * mla.kv_rank + mla.d_rope + 2 * (mla.q_rank or 0)
    return [
        # each latent before and after its norm
        Kept("latents", rows * latents * e),
        Kept("latents.statistics", rows * 2 * _STATISTIC),
        Kept("q", rows * heads * d_query * e, ("mla_up",)),
        Kept("k", rows * heads * d_query * e, ("mla_up",)),
        Kept("kv", rows * heads * (mla.d_nope + mla.d_value) * e, ("mla_up",)),
        *_core(share, heads=heads, d_key=d_query, d_value=mla.d_value),
    ]


def _core(share: Share, *, heads: int, d_key: int, d_value: int) -> list[Kept]:
    """softmax(q kᵀ) v, and its output, which the matrix product after it keeps. Attention written out turns heads and
    tokens round in a copy, which recomputation does not free."""
    rows, e = share.tokens, share.width
    out = Kept("o", rows * heads * d_value * e, () if share.attention == "reference" else ("core_attention",))
    tensors = [out, Kept("o.fp8", rows * heads * d_value)] if share.is_fp8 else [out]
    if share.attention == "reference":
        # the weights in fp32 and in the model's format; keys and values once for each query head, and queries, in the
        # order of the products; the mask
        weights = rows * share.seq_len * heads * (e if e >= 4 else 4 + e) + share.seq_len**2
        turned = rows * heads * (2 * d_key + d_value) * e
        return [*tensors, Kept("weights", weights, ("core_attention",)), Kept("turned", turned, ("core_attention",))]
    return [*tensors, Kept("log_sum", rows * heads * _STATISTIC, ("core_attention",))]


def _mlp(share: Share) -> list[Kept]:
    return _feed_forward(share, "mlp", share.tokens, ceil(share.model.d_ffn / share.tp))


def _feed_forward(share: Share, name: str, rows: int, columns: int, parts: tuple[str, ...] = ("mlp",)) -> list[Kept]:
    """The product that goes in, and what comes out of the activation."""
    gates = 1 if isinstance(share.model, GptSpec) else 2
    tensors = [Kept(f"{name}.in", rows * gates * columns * share.width, parts)]
    # experts compute theirs in one operation, which keeps what goes in alone
    if gates == 2 and not share.is_compiled and name != "experts":
        tensors.append(Kept(f"{name}.silu", rows * columns * share.width, ("activation", *parts)))
    return [*tensors, Kept(f"{name}.out", _linear_input(share, rows, columns), ("activation", *parts))]


def _experts(share: Share) -> list[Kept]:
    model, moe, own_tokens = share.model, moe_of(share.model), share.split_tokens
    rows = expert_tokens(share)
    choices = own_tokens * moe.top_k
    tensors = [
        # scores before and after the softmax in fp32; weights and numbers of the chosen
        Kept("router", own_tokens * moe.n_experts * 2 * share.wide + choices * (share.wide + 8), ("moe",)),
        Kept("dispatched", _linear_input(share, rows, model.d_model), ("moe",), is_routed=True),
        *_feed_forward(share, "experts", rows, ceil(moe.d_expert / share.etp), ("moe",)),
    ]
    if moe.d_shared:
        # they run while tokens travel, so that what makes the one again makes the other
        parts = ("shared_experts", "moe")
        tensors += _feed_forward(share, "shared", share.tokens, ceil(moe.d_shared / share.tp), parts)
    return tensors


def _dropout(share: Share, *, with_experts: bool) -> list[Kept]:
    """Which features stayed, a byte each, after attention and after the feed-forward layer."""
    size = share.split_tokens * share.model.d_model
    part = "moe" if with_experts else "mlp"
    return [Kept("attention.dropout", size), Kept(f"{part}.dropout", size, (part,))] if share.model.dropout else []
