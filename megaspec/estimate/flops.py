"""Floating-point operations of training, as Megatron-LM counts them.

Counted: the matrix products of forward, input gradient and weight gradient, a multiply-add as 2. Not counted: norms,
softmax, dropout, the router, recomputation. `causal` counts half of the attention scores, which is what a causal kernel
computes and what Megatron reports; `full` counts all of them, which is what most MFU figures in papers do.
"""

from functools import lru_cache
from typing import Literal

from megaspec.estimate.parameters import padded_vocab
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.kinds import has_experts, mla_of, moe_of
from megaspec.recipe import ModelSpec

Convention = Literal["causal", "full"]
# Forward, input gradient and weight gradient, each a multiply and an add.
_PER_WEIGHT = 6


@lru_cache(maxsize=4096)
def flops_per_sequence(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> int:
    """FLOPs of one training step for one sequence of `seq_len` tokens, over all ranks. A token passes top-k experts."""
    weights = model.n_layers * _attention_weights(model) + model.d_model * padded_vocab(model, tp=tp)
    weights += sum(_expert_weights(model) if one else _mlp_weights(model) for one in has_experts(model))
    halves = {"causal": 1, "full": 2}[convention]
    scores = model.n_layers * halves * _PER_WEIGHT // 2 * _score_width(model)
    return seq_len * _PER_WEIGHT * weights + seq_len**2 * scores


def flops_per_token(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> float:
    """The mean over the tokens of a sequence."""
    return flops_per_sequence(model, seq_len=seq_len, convention=convention, tp=tp) / seq_len


def _attention_weights(model: ModelSpec) -> int:
    d, mla = model.d_model, mla_of(model)
    if mla is None:
        q, kv = model.n_heads * model.d_head, model.n_kv_heads * model.d_head
        return d * (q + 2 * kv) + q * d
    # Megatron counts one for the norm of each latent
    d_query = mla.d_nope + mla.d_rope
    queries = mla.q_rank * (d + model.n_heads * d_query + 1) if mla.q_rank else d * model.n_heads * d_query
    keys_values = mla.kv_rank * (d + model.n_heads * (mla.d_nope + mla.d_value) + 1) + d * mla.d_rope
    return queries + keys_values + model.n_heads * mla.d_value * d


def _score_width(model: ModelSpec) -> int:
    """Sizes of a query and a value, over all heads: the products of one pair of tokens."""
    mla = mla_of(model)
    if mla is None:
        return 2 * model.n_heads * model.d_head
    return model.n_heads * (mla.d_nope + mla.d_rope + mla.d_value)


def _mlp_weights(model: ModelSpec) -> int:
    return (2 if isinstance(model, GptSpec) else 3) * model.d_model * model.d_ffn


def _expert_weights(model: ModelSpec) -> int:
    moe = moe_of(model)
    return 3 * model.d_model * (moe.top_k * moe.d_expert + (moe.d_shared or 0))
