"""What grouped-query attention says of itself."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from megaspec.core.placement import Row
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

    @property
    def is_rotary(self) -> bool:
        """Rotary positions turn queries and keys here."""
        return self.d_rotary > 0


def attention_facts(
    spec: "GroupedQuerySpec", *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace
) -> PartFacts:
    """Module names: attn.wqkv, attn.wo, attn.q_norm, attn.k_norm, attn.mean_squares, attn.dropout; attn itself has
    the sinks."""
    products = AttentionProducts(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_key=d_head,
        d_value=d_head,
        rotated=place.d_rotary,
        sums_heads=spec.qk_norm == "whole",
        sight=spec.mask.sight,
        caps_scores=spec.caps_scores,
        has_sinks=spec.sinks,
    )
    gate = (products.outputs,) if spec.output_gate else ()
    wqkv = Linear(
        "attn.wqkv",
        features(place.d_model),
        (products.queries, products.keys, products.values, *gate),
        "attention",
        bias=spec.qkv_bias,
        input_kept=place.input_kept,
        gradient_by="rope" if place.is_rotary and spec.writes_gradient else "",
    )
    wo = Linear(
        "attn.wo",
        products.outputs,
        (features(place.d_model),),
        "attention",
        bias=spec.out_bias,
        is_residual=True,
        input_kept="o.gated" if spec.output_gate else "o",
    )
    vectors = place.rotation.vectors + _norm_vectors(spec, products, place)
    if spec.sinks:
        heads = Width(n_heads, 1, "tp")
        vectors += (Vector("attn.sinks", n_heads, 0.0, "attention", by_heads=heads),)
    head_sums: tuple[Row, ...] = ()
    if spec.qk_norm == "whole":
        head_sums = (Row("attn.mean_squares", "heads_whole", (n_heads, n_kv_heads)),)
    return PartFacts(
        linears=(wqkv, wo),
        vectors=vectors,
        sites=("attn.dropout",),
        head_sums=head_sums,
        attention=products,
        kept=partial(_kept, spec, products, place),
        moved=_moved(spec, products, place),
        gradient=wqkv.outputs,
    )


def _norm_vectors(spec: "GroupedQuerySpec", products: AttentionProducts, place: AttentionPlace) -> tuple[Vector, ...]:
    """Parameters of the norms of queries and keys."""
    vectors: tuple[Vector, ...] = ()
    for name, heads in (("attn.q_norm", products.queries), ("attn.k_norm", products.keys)):
        if spec.qk_norm == "per_head":
            vectors += place.norm.facts(heads.size, name=name, acts_on_heads=True).vectors
        if spec.qk_norm == "whole":
            for vector in place.norm.vectors(heads.whole, name=name):
                vectors += (replace(vector, by_heads=heads),)
    return vectors


def _norms_heads(spec: "GroupedQuerySpec", place: AttentionPlace) -> bool:
    """Queries and keys of the layer are normed."""
    if spec.qk_norm == "l2":
        return place.is_rotary
    return spec.qk_norm != "none"


def _kept(
    spec: "GroupedQuerySpec", products: AttentionProducts, place: AttentionPlace, execution: Execution
) -> Iterator[Kept]:
    """Queries, keys and values; attention's own products are counted from `products`."""
    queries, keys, values = products.queries, products.keys, products.values
    normed = _norms_heads(spec, place)
    clips = spec.clip_qkv is not None
    warms = spec.temperature.kind != "none" and not place.is_rotary
    takes_values = not execution.keeps_scores or "core_attention" in execution.recomputed
    # a clamp keeps what it takes; a norm of heads too, unless it keeps it in a wider format
    norm_takes_heads = spec.qk_norm == "per_head" and place.norm.wide_copies(execution) == 0
    takes_product = (clips or norm_takes_heads) and not execution.is_compiled
    gates_compiled = spec.output_gate and execution.is_compiled
    copies = takes_values and _copies_values(products, execution)
    if (takes_values and not copies) or takes_product or gates_compiled:
        # queries, keys and values are views of one product, so that all of it stays
        yield Kept("qkv", (queries, keys, values, *((products.outputs,) if spec.output_gate else ())))
    if clips and normed and spec.qk_norm != "l2" and not execution.is_compiled:
        yield Kept("qk_norm.out", (queries, keys))
    if takes_values and (copies or place.is_rotary or normed or clips or warms):
        yield Kept("q", (queries,))
    if takes_values and (copies or place.is_rotary or normed or clips):
        yield Kept("k", (keys,))
    if takes_values and (copies or clips):
        yield Kept("v", (values,))
    if normed:
        yield from _kept_by_norms(spec, products, place, execution)
    if warms and not execution.is_compiled:
        yield Kept("temperature", (features(1),), element="statistic")
    yield from place.rotation.kept(execution)
    if spec.output_gate:
        if not execution.is_compiled:
            yield Kept("o.gate", (products.outputs,))
        yield Kept("o.gated", (products.outputs,), element="product", for_weights=True)
    if place.dropout:
        yield Kept("attention.dropout", (features(place.d_model),), "stream", "byte")


def _copies_values(products: AttentionProducts, execution: Execution) -> bool:
    """See Execution. What computes attention again takes views, as they were."""
    if "core_attention" in execution.recomputed:
        return False
    return products.is_in(execution.copies_values, seq_len=execution.seq_len)


def _kept_by_norms(
    spec: "GroupedQuerySpec", products: AttentionProducts, place: AttentionPlace, execution: Execution
) -> Iterator[Kept]:
    """What norms of queries and keys keep beside what they take and make."""
    heads = (Width(products.n_heads, 1, "tp"), Width(products.n_kv_heads, 1, "tp"))
    wide = place.norm.wide_copies(execution)
    statistics = place.norm.statistics
    if spec.qk_norm == "l2":
        wide = 0 if execution.is_compiled else 1
        statistics = 1
    if spec.qk_norm == "whole":
        # one of queries and one of keys
        heads = (features(2),)
    yield Kept("qk_norm.statistics", heads, element="statistic", times=statistics)
    if wide:
        yield Kept("qk_norm.wide", (products.queries, products.keys), element="wide", times=wide)


def _moved(spec: "GroupedQuerySpec", products: AttentionProducts, place: AttentionPlace) -> tuple[Moved, ...]:
    """Rotation and norms of heads each read and write queries and keys, a clamp values besides; a norm over all heads
    reads them once more. Backward, gradients of all three are added up besides."""
    queries, keys, values = products.queries, products.keys, products.values
    passes = 0
    if products.rotated:
        passes += 2
    if _norms_heads(spec, place):
        passes += 2
    if spec.qk_norm == "whole":
        passes += 1
    clips = spec.clip_qkv is not None
    if clips:
        passes = max(2, passes)
    of_queries = passes
    if spec.temperature.kind != "none" and not place.is_rotary:
        of_queries = max(2, passes)
    forward = [(of_queries, queries), (passes, keys)]
    if clips:
        forward.append((2, values))
    backward = [*forward, *((1, width) for width in (queries, keys, values))]
    if spec.sinks:
        # the output is scaled; backward, it is multiplied by its gradient
        forward.append((2, products.outputs))
        backward.append((2, products.outputs))
    moved = (Moved("core_attention", tuple(forward), tuple(backward)),)
    if place.is_rotary and spec.turns_product and spec.qk_norm == "none" and not spec.sinks:
        # backward it reads the gradients of all three and writes that of their product
        all_three = ((2, queries), (2, keys), (2, values))
        of_kernel = Moved("core_attention", tuple(forward), all_three, is_fused=True)
        moved = (replace(moved[0], operation="rope", of_kernel=of_kernel),)
    if not spec.output_gate:
        return moved
    # output and gate are read, their product is written; backward, its gradient is read and both of theirs are written
    gate = Moved("output_gate", ((3, products.outputs),), ((5, products.outputs),))
    return (*moved, gate)
