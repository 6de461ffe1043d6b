"""What attention takes longer where gradients are added in one order, train.deterministic=true. Torch-free.

sdpa takes cuDNN on Hopper, which has no backward pass that adds in one order; with train.deterministic=true it takes
FlashAttention-2, forward and backward. Only steps were measured, with and without: what they take longer, but for the
forward pass, is set down to the backward pass. With documents cuDNN is refused, and steps with FlashAttention-4 and
flex, which adds in one order without being asked, take no longer.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megaspec.estimate.hardware import Hardware
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import FLASH_FORWARD_COST, AttentionWork, layer_parts, precision_outside_fp8
from megaspec.recipe import Recipe

MEASURED_ON = "one H200"
_MEASURED_SM = 90
# Those that give torch's sdpa what hides no keys.
_THROUGH_SDPA = ("sdpa", "flex")
# Seconds of FlashAttention-2's backward pass in one order over cuDNN's in any, by size of heads: Llama-3.2-1B, and
# Llama-3-8B at half depth (tests/benchmarks/results/one_order_one_h200.jsonl), steps of 355.0 ms over 288.2 and of
# 1,886.3 over 1,554.8.
_BACKWARD_COST = {64: 1.81, 128: 2.45}
# With documents, at heads of 128: the same 8B with documents of 1,024 tokens, steps of 1,361.7 ms over 1,359.8 and of
# 1,401.1 over 1,401.2.
_DOCUMENTS_HEAD_SIZE = 128
_AS_FAST_WITH_DOCUMENTS = ("flash_attn", "flex")


class OneOrderCost(NamedTuple):
    """Seconds in one order over those in any, of each pass."""

    forward: float
    backward: float
    kernels: str
    """What computes in one order."""
    compared: str
    """Whose seconds in any order they are divided by."""


def one_order_cost(recipe: Recipe, hardware: Hardware, attention: AttentionWork) -> OneOrderCost | None:
    """Of a filled recipe's attention; None: it was not measured, see why_not_measured."""
    if why_not_measured(recipe, hardware, attention) is not None:
        return None
    if attention.hides_keys:
        name = recipe.kernels.attention
        return OneOrderCost(1.0, 1.0, name, "in any order")
    smallest = min(_BACKWARD_COST)
    largest = max(_BACKWARD_COST)
    # linear between the two sizes
    share = (max(attention.head_size, smallest) - smallest) / (largest - smallest)
    backward = (1 - share) * _BACKWARD_COST[smallest] + share * _BACKWARD_COST[largest]
    return OneOrderCost(FLASH_FORWARD_COST, backward, "FlashAttention-2", "cuDNN")


def attention_kinds(recipe: Recipe) -> Iterator[AttentionWork]:
    """Attention of a filled recipe's layers, each kind once."""
    for layer in dict.fromkeys(facts_of(recipe).layers):
        for part in layer_parts(recipe, layer, in_fp8=False):
            if part.attention is not None:
                yield part.attention


def why_not_measured(recipe: Recipe, hardware: Hardware, attention: AttentionWork) -> str | None:
    """Where a filled recipe's attention was not measured in one order, `with heads of 192`; None: it was."""
    if hardware.sm != _MEASURED_SM:
        return f"on {hardware.name}"
    precision = precision_outside_fp8(recipe)
    if precision not in ("bf16", "fp16"):
        return f"in {precision}"
    name = recipe.kernels.attention
    if attention.hides_keys:
        if not attention.hides_by_documents:
            return "with windows, chunks, capped scores or documents that ranks share"
        if name not in _AS_FAST_WITH_DOCUMENTS:
            return f"with documents and kernels.attention={name}"
        if attention.head_size != _DOCUMENTS_HEAD_SIZE:
            return f"with documents and heads of {attention.head_size}"
        return None
    if name not in _THROUGH_SDPA:
        return f"with kernels.attention={name}"
    if attention.head_size > max(_BACKWARD_COST):
        return f"with heads of {attention.head_size}"
    return None
