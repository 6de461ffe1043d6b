"""Floating-point operations of training, as Megatron-LM counts them.

Counted: the matrix products of forward, input gradient and weight gradient, a multiply-add as 2. Not counted: norms,
softmax, dropout, the router, recomputation. `causal` counts half of the attention scores, which is what a causal kernel
computes and what Megatron reports; `full` counts all of them, which is what most MFU figures in papers do.
"""

from functools import lru_cache
from typing import Literal

from megaspec.nn.layer.facts import LayerFacts
from megaspec.recipe import ModelSpec

Convention = Literal["causal", "full"]
# Forward, input gradient and weight gradient, each a multiply and an add.
_PER_WEIGHT = 6


@lru_cache(maxsize=4096)
def flops_per_sequence(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> int:
    """FLOPs of one training step for one sequence of `seq_len` tokens, over all ranks. A token passes top-k experts."""
    facts = model.facts
    # weights that a token is multiplied with: the output head's [D, padded vocabulary] and those of the layers
    weights = model.d_model * facts.padded_vocab(tp=tp)
    weights += sum(_weights_passed(layer) for layer in facts.layers)
    # of q kᵀ and of the scores times v, for each pair of tokens
    halves = {"causal": 1, "full": 2}[convention]
    scores = halves * _PER_WEIGHT // 2 * sum(_score_width(layer) for layer in facts.layers)
    return seq_len * _PER_WEIGHT * weights + seq_len**2 * scores


def flops_per_token(model: ModelSpec, *, seq_len: int, convention: Convention = "causal", tp: int = 1) -> float:
    """The mean over the tokens of a sequence."""
    return flops_per_sequence(model, seq_len=seq_len, convention=convention, tp=tp) / seq_len


def _weights_passed(layer: LayerFacts) -> int:
    """Weights that a token is multiplied with in a layer."""
    weights = 0
    for linear in layer.linears:
        if linear.in_flops:
            weights += linear.active_experts * linear.inputs.whole * linear.columns
    return weights + sum(vector.size for vector in layer.vectors if vector.in_flops)


def _score_width(layer: LayerFacts) -> int:
    """Sizes of a query and a value, over all heads: the products of one pair of tokens."""
    attention = layer.attention
    if attention is None:
        return 0
    return attention.n_heads * (attention.d_key + attention.d_value)
