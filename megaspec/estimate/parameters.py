"""Parameters of a model and of one rank of it, exactly, by what they are for."""

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil

from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import has_experts, mla_of, moe_of
from megaspec.nn.spec import MlaSpec
from megaspec.parallelism.heads import local_kv_heads
from megaspec.parallelism.stages import stages_of
from megaspec.recipe import ModelSpec, Recipe


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of weights. The vocabulary counts unpadded, a tied output head 0."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    experts: int
    """Routed experts, all of them."""
    shared_experts: int
    router: int
    norms: int
    head: int
    active_experts: int = 0
    """Of `experts`, those that one token passes."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "active_experts")

    @property
    def active(self) -> int:
        """Those that one token passes, embedding and head included."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True)
class LayerParameters:
    """Weights of one layer that one rank holds."""

    attention: int
    mlp: int
    experts: int
    shared_experts: int
    router: int
    norms: int

    @property
    def dense(self) -> int:
        """All but the routed experts, which are shared out over other ranks than the rest."""
        return self.attention + self.mlp + self.shared_experts + self.router + self.norms


@dataclass(frozen=True)
class RankParameters:
    """Weights that one rank of a pipeline stage holds, padding of the vocabulary included."""

    dense: int
    expert: int
    """Of routed experts."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class PartialGradients:
    """Weights whose gradients tensor-parallel ranks add up: each has seen only a part of the tokens or heads."""

    over_tp: int
    """Of weights that all ranks hold whole."""
    over_copies: int
    """Of key and value heads that several ranks hold."""


@lru_cache(maxsize=256)
def count_parameters(model: ModelSpec) -> ParameterCount:
    """From a model without open fields."""
    layers = [layer_parameters(model, with_experts=one) for one in has_experts(model)]
    experts, moe = sum(one.experts for one in layers), moe_of(model)
    return ParameterCount(
        embedding=model.vocab_size * model.d_model,
        positions=model.max_seq_len * model.d_model if isinstance(model, GptSpec) else 0,
        attention=sum(one.attention for one in layers),
        mlp=sum(one.mlp for one in layers),
        experts=experts,
        shared_experts=sum(one.shared_experts for one in layers),
        router=sum(one.router for one in layers),
        norms=sum(one.norms for one in layers) + _norm(model),
        head=0 if model.tied_embeddings else model.vocab_size * model.d_model,
        active_experts=experts // moe.n_experts * min(moe.top_k, moe.n_experts) if moe else 0,
    )


@lru_cache(maxsize=8192)
def layer_parameters(
    model: ModelSpec, *, with_experts: bool, tp: int = 1, ep: int = 1, etp: int = 1
) -> LayerParameters:
    """A layer on one rank: matrices split over tp, experts over ep and etp, norms and router on every rank."""
    d, moe = model.d_model, moe_of(model)
    norms = 2 * _norm(model) + _inner_norms(model)
    attention = _attention(model, tp)
    if not with_experts or moe is None:
        return LayerParameters(attention, _mlp(model, tp), 0, 0, 0, norms)
    return LayerParameters(
        attention,
        mlp=0,
        experts=ceil(moe.n_experts / ep) * 3 * d * ceil(moe.d_expert / etp),
        shared_experts=3 * d * ceil(moe.d_shared / tp) + (d if moe.shared_gate else 0) if moe.d_shared else 0,
        router=d * moe.n_experts + (moe.n_experts if moe.router.bias_rate else 0),
        norms=norms,
    )


def padded_vocab(model: ModelSpec, *, tp: int) -> int:
    """Rows of the output head over all tensor-parallel ranks, padding included."""
    multiple = model.vocab_pad_to * tp
    return -(-model.vocab_size // multiple) * multiple


def rank_parameters(recipe: Recipe, stage: int) -> RankParameters:
    """The weights on one rank of pipeline rank `stage`; a tied head on another rank than the embedding is a copy."""
    model, own = recipe.model, recipe.parallelism
    dense = expert = 0
    holds_table = False
    experts = has_experts(model)
    for chunk in stages_of(model.n_layers, own)[stage]:
        routed = sum(experts[number] for number in chunk.layers)
        for with_experts, layers in ((True, routed), (False, len(chunk.layers) - routed)):
            if layers:
                layer = layer_parameters(model, with_experts=with_experts, tp=own.tp, ep=own.ep, etp=own.etp)
                dense += layers * layer.dense
                expert += layers * layer.experts
        dense += _norm(model) if chunk.head else 0
        dense += model.max_seq_len * model.d_model if chunk.embedding and isinstance(model, GptSpec) else 0
        for wanted in (chunk.embedding, chunk.head):
            if wanted and not (holds_table and model.tied_embeddings):
                dense += table_parameters(model, tp=own.tp)
                holds_table = True
    return RankParameters(dense, expert)


def partial_gradients(recipe: Recipe, stage: int) -> PartialGradients:
    """Of one rank of pipeline rank `stage`."""
    model, own = recipe.model, recipe.parallelism
    if own.tp == 1:
        return PartialGradients(0, 0)
    experts, chunks = has_experts(model), stages_of(model.n_layers, own)[stage]
    layers = [number for chunk in chunks for number in chunk.layers]
    routed = sum(experts[number] for number in layers)
    # tensor-parallel ranks split heads whatever they do with tokens
    over_tp = len(layers) * (2 * model.d_head if getattr(model, "qk_norm", False) else 0)
    if own.sequence_parallel:
        over_tp += len(layers) * _whole_on_each_rank(model) + routed * _routing(model)
        over_tp += sum(_norm(model) for chunk in chunks if chunk.head)
        if isinstance(model, GptSpec):
            over_tp += sum(model.max_seq_len * model.d_model for chunk in chunks if chunk.embedding)
    copied = 0
    if own.tp > model.n_kv_heads and mla_of(model) is None:
        copied = len(layers) * 2 * model.d_head * (model.d_model + isinstance(model, GptSpec))
    return PartialGradients(over_tp, copied)


def _whole_on_each_rank(model: ModelSpec) -> int:
    """Of a layer, experts left out: norms, biases of what sums over ranks, and what makes the latents."""
    mla, d = mla_of(model), model.d_model
    biases = 2 * d if isinstance(model, GptSpec) else 0
    latents = (d + 1) * (mla.kv_rank + (mla.q_rank or 0)) + d * mla.d_rope if mla else 0
    return 2 * _norm(model) + biases + latents


def _routing(model: ModelSpec) -> int:
    """The router, without the bias that no gradient trains, and the gate of the shared experts."""
    moe = moe_of(model)
    return model.d_model * (moe.n_experts + (moe.shared_gate and moe.d_shared is not None)) if moe else 0


def table_parameters(model: ModelSpec, *, tp: int) -> int:
    """A rank's rows of the embedding, or of the output head."""
    return padded_vocab(model, tp=tp) // tp * model.d_model


def _norm(model: ModelSpec) -> int:
    return 2 * model.d_model if isinstance(model, GptSpec) else model.d_model


def _inner_norms(model: ModelSpec) -> int:
    mla = mla_of(model)
    latents = mla.kv_rank + (mla.q_rank or 0) if mla else 0
    return latents + (2 * model.d_head if getattr(model, "qk_norm", False) else 0)


def _attention(model: ModelSpec, tp: int) -> int:
    d, heads, mla = model.d_model, ceil(model.n_heads / tp), mla_of(model)
    if mla is not None:
        return _latent_attention(d, heads, mla)
    q, kv = heads * model.d_head, local_kv_heads(model.n_kv_heads, tp=tp) * model.d_head
    biases = q + 2 * kv + d if isinstance(model, GptSpec) else 0
    return d * (q + 2 * kv) + q * d + biases


def _latent_attention(d: int, heads: int, mla: MlaSpec) -> int:
    """What makes the latents is whole on every rank, heads are split."""
    d_query = mla.d_nope + mla.d_rope
    queries = mla.q_rank * (d + heads * d_query) if mla.q_rank else d * heads * d_query
    keys_values = d * (mla.kv_rank + mla.d_rope) + mla.kv_rank * heads * (mla.d_nope + mla.d_value)
    return queries + keys_values + heads * mla.d_value * d


def _mlp(model: ModelSpec, tp: int) -> int:
    d, ffn = model.d_model, ceil(model.d_ffn / tp)
    return 2 * d * ffn + ffn + d if isinstance(model, GptSpec) else 3 * d * ffn
