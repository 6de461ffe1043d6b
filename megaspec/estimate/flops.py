"""Floating-point operations of training, as Megatron-LM counts them.

Counted: the matrix products of forward, input gradient and weight gradient, a multiply-add as 2. Not counted: norms,
softmax, dropout, the router, recomputation. `causal` counts the pairs of a query and a key that the mask leaves, those
on its edges as half. Of causal attention that is half of the scores, which is what a causal kernel computes and what
Megatron reports; of a window or of chunks it is what lies inside, as in Megatron-Bridge; Megatron-LM takes every layer
for a causal one. `full` counts twice as many: of causal attention all scores, which is what most MFU figures in papers
do (PaLM's). Documents are not looked at. So FLOPs depend on the model and the length of its sequences alone: what a
kernel computes beside the pairs that are seen is not among them, and lowers the MFU.

Where parameters are frozen (train.trainable) only the products are counted that are made: no weight gradient of a
frozen matrix, and no input gradient where nothing before is trained.
"""

from functools import lru_cache
from typing import Literal

from megaspec.estimate.trained import trained_facts
from megaspec.nn.layer.facts import LayerFacts
from megaspec.recipe import ModelSpec

Convention = Literal["causal", "full"]
# A multiply and an add.
_PER_PRODUCT = 2


@lru_cache(maxsize=4096)
def flops_per_sequence(
    model: ModelSpec,
    *,
    seq_len: int,
    convention: Convention = "causal",
    tp: int = 1,
    trainable: tuple[str, ...] | None = None,
) -> int:
    """FLOPs of one training step for one sequence of `seq_len` tokens, over all ranks. A token passes top-k experts.
    `trainable`: see TrainSpec."""
    facts = trained_facts(model, trainable)
    # multiplications of a token with a weight, in all passes: with the output head's [D, padded vocabulary]
    head = model.d_model * facts.padded_vocab(tp=tp)
    weights = head * (1 + facts.head_makes_input_gradient + (not facts.head_table.is_frozen))
    weights += sum(_weights_passed(layer) for layer in facts.layers)
    # of q kᵀ and of the scores times v; each has two gradients
    times = {"causal": 1, "full": 2}[convention]
    scores = 0
    for layer in facts.layers:
        scores += (1 + 2 * layer.attends_backward) * _score_products(layer, seq_len)
    return seq_len * _PER_PRODUCT * weights + times * scores


def flops_per_token(
    model: ModelSpec,
    *,
    seq_len: int,
    convention: Convention = "causal",
    tp: int = 1,
    trainable: tuple[str, ...] | None = None,
) -> float:
    """The mean over the tokens of a sequence."""
    flops = flops_per_sequence(model, seq_len=seq_len, convention=convention, tp=tp, trainable=trainable)
    return flops / seq_len


def _weights_passed(layer: LayerFacts) -> int:
    """Weights that a token is multiplied with in a layer, once for each pass that does."""
    weights = 0
    for linear in layer.linears:
        if linear.in_flops:
            passes = 1 + linear.makes_input_gradient + (not linear.is_frozen)
            weights += passes * linear.active_experts * linear.inputs.whole * linear.columns
    for vector in layer.vectors:
        if vector.in_flops:
            weights += (1 + layer.runs_backward + (not vector.is_frozen)) * vector.size
    return weights


def _score_products(layer: LayerFacts, seq_len: int) -> int:
    """Twice the multiplications of one sequence's queries with keys, and of its weights with values, over all heads."""
    attention = layer.attention
    if attention is None:
        return 0
    width = attention.n_heads * (attention.d_key + attention.d_value)
    return width * attention.sight.twice_the_pairs(seq_len)
