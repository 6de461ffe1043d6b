"""What one rank computes for one micro batch: matrix products, attention, and the bytes that all else moves.

Counted from the modules in nn/ as they run compiled block by block: everything between matrix products is limited by
memory, so that its time is the bytes that its kernels read and write.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megaspec.estimate.share import Share, share_of
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import mla_of
from megaspec.parallelism.spec import ContextSpec
from megaspec.recipe import Recipe

# Elements of the residual stream that a norm's backward reads and writes. The sum over tokens for the norm's weight
# is a second pass, and both passes reach about half of the bandwidth (measured: 1.6 of 4.2 TB/s for 3 elements).
NORM_BACKWARD = 8
# A final norm outside the compiled blocks works in fp32 and step by step: bytes per element, forward and backward.
LOOSE_NORM = (30, 60)
# A copy that turns [sequence, token] round takes so much longer than its bytes (tensor parallel on 2 and 4 H200).
TURNING = 2.6


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n], forward and both gradients. With `groups`, m rows are shared out to as many matrices."""

    m: int
    n: int
    k: int
    precision: str
    groups: int = 0


@dataclass(frozen=True)
class AttentionWork:
    """Causal attention of `tokens` tokens in sequences of `seq_len`; `share` of it is this rank's."""

    tokens: int
    seq_len: int
    heads: int
    kv_heads: int
    head_size: int
    share: float = 1.0


@dataclass(frozen=True)
class Part:
    """A part of a layer that can be recomputed on its own."""

    name: str
    products: tuple[Product, ...] = ()
    attention: AttentionWork | None = None
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0


def layer_parts(recipe: Recipe, *, has_experts: bool, in_fp8: bool) -> tuple[Part, ...]:
    """The parts of one layer. `in_fp8`: its matrix products take fp8."""
    share = share_of(recipe)
    kind = recipe.precision.kind
    precision = "fp8" if in_fp8 else "bf16" if kind == "fp8" else kind
    parts = [*_attention_parts(recipe, share, precision)]
    parts += _expert_parts(share, precision) if has_experts else _mlp_parts(share, precision)
    return (*parts, _norms(share))


def _attention_parts(recipe: Recipe, share: Share, precision: str) -> Iterator[Part]:
    model, own, t = recipe.model, recipe.parallelism, share.tokens
    mla, d, e = mla_of(model), model.d_model, share.width * share.passes
    if mla:
        q_out, kv_out = share.q_size, share.heads * (mla.d_nope + mla.d_value)
        down = [Product(t, mla.kv_rank + mla.d_rope, d, precision)]
        down += [Product(t, mla.q_rank, d, precision)] if mla.q_rank else [Product(t, q_out, d, precision)]
        up = [Product(t, kv_out, mla.kv_rank, precision)]
        up += [Product(t, q_out, mla.q_rank, precision)] if mla.q_rank else []
        yield Part("projections", (*down, Product(t, d, share.v_size, precision)), None, 0.0, 0.0)
        yield Part("mla_up", tuple(up), None, e * t * (kv_out + q_out), 2 * e * t * (kv_out + q_out))
        head_size, rotated = (model.d_head + mla.d_value) // 2, share.heads * mla.d_rope
    else:
        products = (Product(t, share.q_size + share.kv_size, d, precision), Product(t, d, share.q_size, precision))
        yield Part("projections", products)
        head_size = model.d_head
        rotated = 0 if isinstance(model, GptSpec) else share.q_size + share.kv_size // 2
    norms = 2 * rotated if getattr(model, "qk_norm", False) else 0
    heads_split = own.cp if own.context.kind == "all_to_all" else 1
    if own.context.kind == "hierarchical" and own.context.factors:
        heads_split = own.context.factors[0]
    work = AttentionWork(
        tokens=t * own.cp,
        seq_len=recipe.data.seq_len,
        heads=max(1, share.heads // heads_split),
        kv_heads=max(1, share.heads if mla else share.kv_heads // heads_split),
        head_size=head_size,
        share=heads_split / own.cp,
    )
    moved = e * t * (2 * rotated + norms)
    merged, merged_backward = _merged_bytes(share, own.context)
    backward = moved + e * t * (share.q_size + share.kv_size) + merged_backward
    yield Part("core_attention", (), work, moved + merged, backward)


def _merged_bytes(share: Share, context: ContextSpec) -> tuple[float, float]:
    """Forward and backward bytes of putting blocks of attention together, in at least fp32, on the rank that has most
    of it: the last one, all of whose queries see a part of every other rank's keys."""
    ring = {"ring": share.cp, "hierarchical": (context.factors or (1, 1))[1]}.get(context.kind, 1)
    narrow, wide = share.width, max(4, share.width)
    cast, add = narrow + wide, narrow + 2 * wide
    q, kv = share.tokens * share.q_size, share.tokens * share.kv_size
    if ring > 1:
        forward = q * (2 * cast + (ring - 1) * add)
        # the causal part, that of every other rank, the rest of its own; the sum that comes home
        backward = (q + kv) * (2 * cast + add / 2) + (ring - 1) * add * (q + kv / 2) + 4 * wide * kv
        return forward + 2 * narrow * kv, backward
    if share.cp > 1 and context.kind == "all_gather":
        # keys are put in the order of the sequence and their gradients back
        whole, seen = share.cp * kv, share.cp * kv - kv / 2
        forward = q * (2 * cast + add) + 2 * narrow * (kv + whole)
        backward = q * (wide + 2 * add + cast) + kv * (add + cast) + seen * add + whole * (5 * wide + 2 * narrow)
        return forward, backward
    return 0.0, 0.0


def _mlp_parts(share: Share, precision: str) -> Iterator[Part]:
    yield from _feed_forward(share, "mlp", share.tokens, share.model.d_ffn // share.tp, precision)


def _feed_forward(share: Share, name: str, rows: int, width: int, precision: str, groups: int = 0) -> Iterator[Part]:
    model, e = share.model, share.width * share.passes
    gates = 1 if isinstance(model, GptSpec) else 2
    up = Product(rows, gates * width, model.d_model, precision, groups)
    yield Part(name, (up, Product(rows, model.d_model, width, precision, groups)))
    yield Part("activation", (), None, e * rows * width * (gates + 1), e * rows * width * (2 * gates + 1))


def _expert_parts(share: Share, precision: str) -> Iterator[Part]:
    moe, d, e = share.model.moe, share.model.d_model, share.width
    rows = share.expert_tokens
    local = max(1, moe.n_experts // share.ep)
    yield Part("router", (Product(share.split_tokens, moe.n_experts, d, "fp32"),))
    yield from _feed_forward(share, "moe", rows, moe.d_expert // share.etp, precision, groups=local)
    # rows are sorted by expert and put back in order, each time read and written
    yield Part("moe", (), None, 4 * e * d * rows, 4 * e * d * rows)
    if moe.d_shared:
        yield from _feed_forward(share, "shared_experts", share.tokens, moe.d_shared // share.tp, precision)


def _norms(share: Share) -> Part:
    """Both norms and the residual stream: 9 elements a token forward, read or written. Under tensor parallel a gather
    or scatter of several sequences turns them round, which is a copy each."""
    d, e = share.model.d_model, share.width * share.passes
    turned = 0
    if share.is_sequence_split and share.micro_batch > 1:
        turned = TURNING * share.width * d * (8 * share.tokens + 4 * share.split_tokens)
    forward = 9 * e * d * share.split_tokens
    return Part("norm", (), None, forward + turned, 2 * NORM_BACKWARD * e * d * share.split_tokens + turned)


def weights_bytes(recipe: Recipe, work: AttentionWork) -> float:
    """Bytes that the softmax of attention written out reads and writes, in either direction: a number of the model's
    format in and one out, and one in fp32 that the forward pass keeps and the backward pass reads."""
    share = share_of(recipe)
    return work.tokens * work.heads * work.seq_len * (2.0 * share.width + 4) * share.passes


def fp8_bytes(products: tuple[Product, ...]) -> tuple[float, float]:
    """Forward and backward bytes of turning the factors of products into fp8, in both layouts."""
    cast = [p for p in products if p.precision == "fp8"]
    return sum(4.0 * p.m * p.k for p in cast), sum(4.0 * p.m * p.n for p in cast)


def embedding_part(recipe: Recipe) -> Part:
    """Rows are read and written; the gradient is as large as the whole table and is added to its sum."""
    share = share_of(recipe)
    d, e = recipe.model.d_model, share.width
    table = share.vocab * d
    return Part("embedding", (), None, 2 * e * d * share.tokens, 2 * e * d * share.tokens + (e + e + 8) * table)


def head_part(recipe: Recipe) -> Part:
    """The last norm, the output head and the loss, whose backward pass runs with its forward, piece by piece."""
    share = share_of(recipe)
    d, e, t = recipe.model.d_model, share.width, share.tokens
    table = share.vocab * d
    precision = "bf16" if recipe.precision.kind == "fp8" else recipe.precision.kind
    logits = share.vocab * t
    passes = 3 * e if recipe.kernels.cross_entropy == "triton" else 8 * e
    norm_forward, norm_backward = (each * d * share.split_tokens for each in LOOSE_NORM)
    product = Product(t, share.vocab, d, precision)
    # the gradient of the table: to the model's format, scaled, added to its sum
    backward = norm_backward + (4 + e + 2 * e + e + 8) * table + 2 * e * d * t
    return Part("head", (product,), None, norm_forward + passes * logits, backward)


def recomputed_layers(recipe: Recipe, layers: int) -> int:
    """Of a chunk of so many layers, those that the backward pass computes again as a whole."""
    own = recipe.parallelism.recompute
    if own.kind != "full":
        return 0
    return min(layers, own.layers or 1) if own.method == "block" else layers
