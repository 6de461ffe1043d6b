"""The matrices of hidden layers, which Muon orthogonalises: how many weights, what travels, how long it takes."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import ceil

from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.parameters import RankParameters, layer_parameters
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import has_experts, mla_of, moe_of
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.heads import local_kv_heads
from megaspec.parallelism.stages import Chunk
from megaspec.recipe import ModelSpec, Recipe

Shape = tuple[int, int]
"""Outputs and inputs."""


@lru_cache(maxsize=256)
def hidden_matrices(model: ModelSpec, *, with_experts: bool) -> dict[Shape, int]:
    """How many matrices of each shape a layer holds on all its ranks together."""
    d, moe = model.d_model, moe_of(model)
    found = Counter(_attention(model))
    if not with_experts or moe is None:
        found.update({(model.d_ffn, d): 1 if isinstance(model, GptSpec) else 2})
        found.update({(d, model.d_ffn): 1})
        return dict(found)
    for count, size in ((moe.n_experts, moe.d_expert), (1, moe.d_shared)):
        if size:
            found.update({(size, d): 2 * count})
            found.update({(d, size): count})
    return dict(found)


def _attention(model: ModelSpec) -> Iterator[Shape]:
    d, heads, mla = model.d_model, model.n_heads, mla_of(model)
    if mla is None:
        yield from ((heads * model.d_head, d), (d, heads * model.d_head))
        yield from ((model.n_kv_heads * model.d_head, d),) * 2
        return
    queries = heads * (mla.d_nope + mla.d_rope)
    yield from ((mla.q_rank, d), (queries, mla.q_rank)) if mla.q_rank else ((queries, d),)
    yield from ((mla.kv_rank + mla.d_rope, d), (heads * (mla.d_nope + mla.d_value), mla.kv_rank))
    yield (d, heads * mla.d_value)


def hidden_of_layer(model: ModelSpec, *, with_experts: bool, tp: int) -> int:
    """Weights of hidden matrices that one rank holds of a layer, routed experts left out."""
    layer = layer_parameters(model, with_experts=with_experts, tp=tp)
    biases = 0
    if isinstance(model, GptSpec):
        heads = ceil(model.n_heads / tp) + 2 * local_kv_heads(model.n_kv_heads, tp=tp)
        biases = heads * model.d_head + ceil(model.d_ffn / tp) + 2 * model.d_model
    return layer.dense - layer.router - layer.norms - biases


def hidden_parameters(recipe: Recipe, chunks: tuple[Chunk, ...]) -> RankParameters:
    """Weights of hidden matrices that one rank with these chunks holds."""
    model, own, experts = recipe.model, recipe.parallelism, has_experts(recipe.model)
    dense = expert = 0
    for number in (number for chunk in chunks for number in chunk.layers):
        dense += hidden_of_layer(model, with_experts=experts[number], tp=own.tp)
        layer = layer_parameters(model, with_experts=experts[number], tp=own.tp, ep=own.ep, etp=own.etp)
        expert += layer.experts
    return RankParameters(dense, expert)


def working_width(recipe: Recipe) -> int:
    """Bytes of an element of what is orthogonalised: bf16 on a GPU, but fp64 of an fp64 model."""
    return 8 if recipe.precision.kind == "fp64" else 2


def orthogonalising_seconds(recipe: Recipe, optim: MuonSpec, chunks: tuple[Chunk, ...], ceilings: Ceilings) -> float:
    """Newton-Schulz on the stage's matrices, shared out evenly over its ranks."""
    experts, seconds = has_experts(recipe.model), 0.0
    precision = "fp64" if recipe.precision.kind == "fp64" else "bf16"
    numbers = Counter(experts[number] for chunk in chunks for number in chunk.layers)
    for with_experts, layers in numbers.items():
        for shape, count in hidden_matrices(recipe.model, with_experts=with_experts).items():
            small, large = sorted(shape)
            once = sum(
                ceilings.matmul_seconds(*sizes, precision=precision, kind="forward")
                for sizes in ((small, small, large), (small, small, small), (small, large, small))
            )
            seconds += layers * count * optim.ns_steps * once
    own = recipe.parallelism
    return seconds / (own.dp_replicate * own.dp_shard * own.cp * own.tp)
