"""What Megatron-LM's own memory report says of a recipe, to compare memory.py with.

Its formulas (megatron/training/theoretical_memory_usage.py) leave out, among others, the context-parallel split of
activations and optimizer state, tokens of experts, grouped keys in activations, gathered weights and buffers.
"""

from fractions import Fraction

from megaspec.core.axes import expert_degrees
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.nn.mla.spec import LatentSpec
from megaspec.nn.mlp.spec import PlainMlpSpec
from megaspec.nn.norm.spec import LayerNormSpec
from megaspec.recipe import ModelSpec, Recipe

_PLAIN, _KEPT, _SHARED_OUT = 18, 6, 12
"""Bytes of a weight: with everything on each rank; with the optimizer shared out, what stays and what is divided."""


def weight_and_optimizer_bytes(recipe: Recipe) -> float:
    """Weights, gradients and optimizer state of the fullest rank. Sharded weights count like a sharded optimizer."""
    model, own = recipe.model, recipe.parallelism
    d, norm = model.d_model, _norm(model)
    layers, n_moe = model.n_layers, sum(layer.has_experts for layer in model.facts.layers)
    gates = 2 if isinstance(model.mlp, PlainMlpSpec) else 3
    split = layers * _attention(model) + (layers - n_moe) * gates * d * model.d_ffn
    whole = layers * 2 * norm + norm
    experts, moe = 0, model.moe
    if moe is not None:
        split += n_moe * gates * d * (moe.d_shared or 0)
        whole += n_moe * d * moe.n_experts + (n_moe * moe.n_experts if moe.router.expert_bias else 0)
        whole += n_moe * d if moe.shared_gate else 0
        experts = n_moe * gates * d * moe.d_expert * moe.n_experts
    table = d * model.facts.padded_vocab(tp=own.tp)
    tables = 2 if not model.tied_embeddings and own.pp == 1 else 1
    dense = (Fraction(split, own.pp) + tables * table) / own.tp + Fraction(whole, own.pp)
    expert = Fraction(experts, own.pp * own.etp * own.ep)
    edp = expert_degrees(own.degrees, ep=own.ep, etp=own.etp)["edp"]
    return float(dense * _bytes(recipe, data_parallel(own)) + expert * _bytes(recipe, edp))


def activation_bytes(recipe: Recipe, *, micro_batches: int | None = None) -> float:
    """Of the first stage; `micro_batches` of a step, None for as many as there are stages. One formula holds with
    sequence parallelism and selective recomputation, the other for everything else."""
    model, own, b = recipe.model, recipe.parallelism, recipe.train.micro_batch
    tokens, d, pp, tp = recipe.data.seq_len * b, model.d_model, own.pp, own.tp
    vocab = model.facts.padded_vocab(tp=tp)
    is_short = own.sequence_parallel and own.recompute.kind == "selective"
    if is_short:
        total = tokens * d * (18 + 4 * Fraction(model.d_ffn, d)) * model.n_layers
    else:
        total = tokens * d * (10 + Fraction(24, tp)) * model.n_layers
    total += 8 * tokens * pp + tokens * d * pp
    chunks = own.pipeline.virtual_stages
    if chunks > 1:
        total *= 1 + Fraction(pp - 1, pp * chunks)
    elif pp > 1 and micro_batches is not None:
        total *= min(1, Fraction(micro_batches, pp))
    if is_short:
        total += 4 * tokens * (d + vocab) if pp == 1 else 0
        return float(total / tp)
    total += 2 * (Fraction(tokens * vocab, tp) + tokens * d) if pp == 1 else 0
    return float(total) * 1.05


def _bytes(recipe: Recipe, ranks: int) -> Fraction:
    if recipe.parallelism.dp_strategy == "replicate":
        return Fraction(_PLAIN)
    return _KEPT + Fraction(_SHARED_OUT, ranks)


def _norm(model: ModelSpec) -> int:
    return (2 if isinstance(model.norm, LayerNormSpec) else 1) * model.d_model


def _attention(model: ModelSpec) -> int:
    d = model.d_model
    if isinstance(model.attention, LatentSpec):
        return _latent_attention(d, model.n_heads, model.attention)
    return 2 * d * model.d_head * (model.n_heads + model.n_kv_heads)


def _latent_attention(d: int, heads: int, mla: LatentSpec) -> int:
    d_query = mla.d_nope + mla.d_rope
    queries = mla.q_rank * (d + heads * d_query + 1) if mla.q_rank else d * heads * d_query
    keys_values = mla.kv_rank * (d + heads * (mla.d_nope + mla.d_value) + 1) + d * mla.d_rope
    return queries + keys_values + heads * mla.d_value * d
