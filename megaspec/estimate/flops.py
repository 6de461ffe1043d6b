"""Floating-point operations of training, as Megatron-LM counts them.

Counted: the matrix products of forward, input gradient and weight gradient, a multiply-add as 2. Not counted: norms,
softmax, dropout, the router, recomputation. `causal` counts the pairs of a query and a key that the mask leaves, those
on its edges as half. Of causal attention that is half of the scores, which is what a causal kernel computes and what
Megatron reports; of a window or of chunks it is what lies inside, as in Megatron-Bridge; Megatron-LM takes every layer
for a causal one. `full` counts twice as many: of causal attention all scores, which is what most MFU figures in papers
do (PaLM's). Documents are not looked at. So FLOPs depend on the model and the length of its sequences alone: what a
kernel computes beside the pairs that are seen is not among them, and lowers the MFU.
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
    # of q kᵀ and of the scores times v
    times = {"causal": 1, "full": 2}[convention]
    scores = sum(_score_products(layer, seq_len) for layer in facts.layers)
    return seq_len * _PER_WEIGHT * weights + times * _PER_WEIGHT // 2 * scores


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


def _score_products(layer: LayerFacts, seq_len: int) -> int:
    """Twice the multiplications of one sequence's queries with keys, and of its weights with values, over all heads."""
    attention = layer.attention
    if attention is None:
        return 0
    width = attention.n_heads * (attention.d_key + attention.d_value)
    return width * attention.sight.twice_the_pairs(seq_len)
