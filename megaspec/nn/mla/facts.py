"""What latent attention says of itself. What makes the latents is whole on every rank, heads are split."""

from collections.abc import Iterator
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
from megaspec.nn.attention.facts import AttentionPlace

if TYPE_CHECKING:
    from megaspec.nn.mla.spec import LatentSpec


def latent_facts(spec: "LatentSpec", *, n_heads: int, place: AttentionPlace) -> PartFacts:
    """Module names: attn.w_q or attn.w_q_down, attn.q_norm, attn.w_q_up; attn.w_kv_down, attn.kv_norm, attn.w_kv_up;
    attn.wo; attn.dropout."""
    d_query = spec.d_nope + spec.d_rope
    products = AttentionProducts(
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_key=d_query,
        d_value=spec.d_value,
        rotated=spec.d_rope,
        makes_latents=True,
    )
    d_model = features(place.d_model)
    latent_kv = features(spec.kv_rank)
    keys_and_values = Width(n_heads, spec.d_nope + spec.d_value, "tp")
    linears = [
        # the rotary key of all heads is made beside the latent
        Linear(
            "attn.w_kv_down",
            d_model,
            (features(spec.kv_rank + spec.d_rope),),
            "attention",
            input_kept=place.input_kept,
        ),
        Linear(
            "attn.w_kv_up",
            latent_kv,
            (keys_and_values,),
            "attention",
            recomputed_with="mla_up",
            input_kept="latents.kv",
        ),
    ]
    norms = [Vector("attn.kv_norm.weight", spec.kv_rank, in_flops=True)]
    if spec.q_rank is None:
        linears.append(Linear("attn.w_q", d_model, (products.queries,), "attention", input_kept=place.input_kept))
    else:
        latent_q = features(spec.q_rank)
        linears.append(Linear("attn.w_q_down", d_model, (latent_q,), "attention", input_kept=place.input_kept))
        linears.append(
            Linear(
                "attn.w_q_up",
                latent_q,
                (products.queries,),
                "attention",
                recomputed_with="mla_up",
                input_kept="latents.q",
            )
        )
        norms.append(Vector("attn.q_norm.weight", spec.q_rank, in_flops=True))
    linears.append(Linear("attn.wo", products.outputs, (d_model,), "attention", is_residual=True, input_kept="o"))
    # up projections read latents and write heads, backward the other way for both gradients
    up = Moved(
        "mla_up",
        ((1, keys_and_values), (1, products.queries)),
        ((2, keys_and_values), (2, products.queries)),
    )
    return PartFacts(
        linears=tuple(linears),
        vectors=tuple(norms),
        sites=("attn.dropout",),
        attention=products,
        kept=partial(_kept, spec, products, place),
        moved=(up, _core_moves(products)),
        gradient=(products.queries, products.keys, products.values),
    )


def _kept(
    spec: "LatentSpec", products: AttentionProducts, place: AttentionPlace, execution: Execution
) -> Iterator[Kept]:
    """Latents before and after their norms, and what is made from them."""
    yield Kept("latents.kv", (features(spec.kv_rank),))
    yield Kept("latents.kv.before", (features(spec.kv_rank + spec.d_rope),))
    if spec.q_rank is not None:
        yield Kept("latents.q", (features(spec.q_rank),))
        yield Kept("latents.q.before", (features(spec.q_rank),))
    yield Kept("latents.statistics", (features(2),), element="statistic")
    yield Kept("q", (products.queries,), freed_by=("mla_up",))
    yield Kept("k", (products.keys,), freed_by=("mla_up",))
    yield Kept("kv", (Width(products.n_heads, spec.d_nope + spec.d_value, "tp"),), freed_by=("mla_up",))
    yield from place.rotation.kept(execution)
    if place.dropout:
        yield Kept("attention.dropout", (features(place.d_model),), "stream", "byte")


def _core_moves(products: AttentionProducts) -> Moved:
    """The rotary part of queries is turned, its gradient back; gradients of queries, keys and values are added up."""
    turned = Width(products.n_heads, products.rotated, "tp")
    gradients = (products.queries, products.keys, products.values)
    return Moved("core_attention", ((2, turned),), ((2, turned), *((1, width) for width in gradients)))
