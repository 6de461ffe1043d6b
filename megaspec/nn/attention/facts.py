"""What grouped-query attention says of itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megaspec.core.part_facts import (
    AttentionProducts,
    Execution,
    Kept,
    Linear,
    Moved,
    PartFacts,
    Vector,
    Width,
    features,
)
from megaspec.nn.norm.spec import NormSpec

if TYPE_CHECKING:
    from megaspec.nn.attention.spec import GroupedQuerySpec


@dataclass(frozen=True)
class AttentionPlace:
    """Where attention stands, and what is around it."""

    d_model: int
    norm: NormSpec
    """Of queries and keys, where they are normed."""
    input_kept: str
    """What it takes, by the name of the kept tensor: `norm1.out`."""
    d_rotary: int
    """Features of a head that rotary positions turn; 0: none."""
    rotation: PartFacts
    """Of what turns queries and keys."""
    dropout: bool = False
    """Its output has a site of it that drops."""


def attention_facts(
    spec: "GroupedQuerySpec", *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace
) -> PartFacts:
    """Module names: attn.wqkv, attn.wo, attn.q_norm, attn.k_norm, attn.dropout."""
    norms_heads = spec.qk_norm == "per_head"
    products = AttentionProducts(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_key=d_head,
        d_value=d_head,
        rotated=place.d_rotary,
        norms_heads=norms_heads,
    )
    wqkv = Linear(
        "attn.wqkv",
        features(place.d_model),
        (products.queries, products.keys, products.values),
        "attention",
        bias=spec.qkv_bias,
        input_kept=place.input_kept,
    )
    wo = Linear(
        "attn.wo",
        products.outputs,
        (features(place.d_model),),
        "attention",
        bias=spec.out_bias,
        is_residual=True,
        input_kept="o",
    )
    vectors: tuple[Vector, ...] = place.rotation.vectors
    if norms_heads:
        for name in ("attn.q_norm", "attn.k_norm"):
            vectors += place.norm.facts(d_head, name=name, acts_on_heads=True).vectors
    return PartFacts(
        linears=(wqkv, wo),
        vectors=vectors,
        sites=("attn.dropout",),
        attention=products,
        kept=partial(_kept, products, place),
        moved=(core_moves(products),),
        gradient=(products.queries, products.keys, products.values),
    )


def _kept(products: AttentionProducts, place: AttentionPlace, execution: Execution) -> Iterator[Kept]:
    """Queries, keys and values; attention's own products are counted from `products`."""
    queries, keys, values = products.queries, products.keys, products.values
    heads = (Width(products.n_heads, 1, "tp"), Width(products.n_kv_heads, 1, "tp"))
    takes_values = not execution.keeps_scores or "core_attention" in execution.recomputed
    # a norm of heads keeps what it takes, unless it keeps it in a wider format
    norm_takes_heads = products.norms_heads and not execution.is_compiled and place.norm.wide_copies(execution) == 0
    if takes_values or norm_takes_heads:
        # queries, keys and values are views of one product, so that all of it stays
        yield Kept("qkv", (queries, keys, values))
    if takes_values and (products.rotated or products.norms_heads):
        yield Kept("q", (queries,))
        yield Kept("k", (keys,))
    if products.norms_heads:
        yield Kept("qk_norm.statistics", heads, element="statistic", times=place.norm.statistics)
        wide = place.norm.wide_copies(execution)
        if wide:
            yield Kept("qk_norm.wide", (queries, keys), element="wide", times=wide)
    yield from place.rotation.kept(execution)
    if place.dropout:
        yield Kept("attention.dropout", (features(place.d_model),), "stream", "byte")


def core_moves(products: AttentionProducts) -> Moved:
    """Rotation and norms of heads each read and write queries and keys; backward, gradients of all three are added
    up besides."""
    passes = 0
    if products.rotated:
        passes += 2
    if products.norms_heads:
        passes += 2
    forward = ((passes, products.queries), (passes, products.keys))
    gradients = (products.queries, products.keys, products.values)
    backward = (*forward, *((1, width) for width in gradients))
    return Moved("core_attention", forward, backward)
