"""What attention takes longer where gradients are added in one order, train.deterministic=true. Torch-free.

By the GPU's table, which has what every implementation takes in any order and in one (megaspec bench throughput). sdpa
takes cuDNN on Hopper, through which torch has no backward pass that adds in one order, and FlashAttention-2 in its
place, forward and backward; flex computes itself what hides nothing; the other kernels stay, and some wait for each
other to add. Rates are of both passes together, so both, and a forward pass that is computed again, take as many times
as long.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megaspec.estimate.attention_rates import against_any_order
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_run import takes_all_layers
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.estimate.trained import facts_of
from megaspec.estimate.work import AttentionWork, layer_parts, precision_outside_fp8
from megaspec.recipe import Recipe

# Of what attention takes longer, measured alone, the share that shows in a step of a GPU whose power is limited: a
# slower kernel draws less, and the rest of the step runs at a higher clock. Set on steps of 8B at half depth and of 1B
# through sdpa and flex on H200 (tests/benchmarks/results/attention_in_one_order_one_h200.jsonl and
# one_order_one_h200.jsonl); each by itself asks for 0.60 to 0.75. A profile shows all of it.
SHOWN = 0.6
_CUDNN_SM = 90
"""From here on sdpa takes cuDNN in any order."""


class OneOrderCost(NamedTuple):
    """Seconds in one order over those in any, of both passes together."""

    measured: float
    """Of attention alone."""
    in_step: float
    """What of that shows in a step."""
    kernels: str
    """What computes in one order."""
    compared: str
    """Whose seconds in any order they are divided by."""


def one_order_cost(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, attention: AttentionWork
) -> OneOrderCost | None:
    """Of a filled recipe's attention; None: it was not measured, see why_not_measured."""
    if why_not_measured(recipe, hardware, throughput, attention) is not None:
        return None
    name = recipe.kernels.attention
    measured = _against_any_order(recipe, throughput, attention)
    assert measured is not None, f"no rates of {name} in one order, and no reason for it"
    # no kernel gains by an order: what is below is noise
    measured = max(1.0, measured)
    in_step = measured
    if hardware.throttles:
        in_step = 1 + SHOWN * (measured - 1)
    kernels, compared = _kernels(recipe, hardware, attention)
    return OneOrderCost(measured, in_step, kernels, compared)


def _kernels(recipe: Recipe, hardware: Hardware, attention: AttentionWork) -> tuple[str, str]:
    """What computes in one order, and what in any: in words."""
    name = recipe.kernels.attention
    if attention.hides_keys or hardware.sm < _CUDNN_SM:
        return name, "in any order"
    if name == "sdpa":
        return "FlashAttention-2", "cuDNN"
    if takes_all_layers(recipe):
        return f"{name}'s own kernel", "cuDNN"
    return name, "in any order"


def _against_any_order(recipe: Recipe, throughput: MeasuredThroughput, attention: AttentionWork) -> float | None:
    kind = attention.kind
    if kind is None:
        return None
    return against_any_order(
        throughput.attention_rates,
        recipe.kernels.attention,
        kind=kind,
        head_size=attention.head_size,
        seen=attention.seen,
    )


def attention_kinds(recipe: Recipe) -> Iterator[AttentionWork]:
    """Attention of a filled recipe's layers, each kind once."""
    for layer in dict.fromkeys(facts_of(recipe).layers):
        for part in layer_parts(recipe, layer, in_fp8=False):
            if part.attention is not None:
                yield part.attention


def why_not_measured(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, attention: AttentionWork
) -> str | None:
    """Where a filled recipe's attention was not measured in one order, `with heads of 192`; None: it was."""
    in_one_order = [rate for rate in throughput.attention_rates if rate.deterministic]
    if not in_one_order:
        return f"on {hardware.name}"
    precision = precision_outside_fp8(recipe)
    if precision not in ("bf16", "fp16"):
        return f"in {precision}"
    if attention.kind is None:
        return "with chunks, capped scores, windows inside documents, or windows or documents that ranks share"
    if attention.head_size not in {rate.head_size for rate in in_one_order}:
        return f"with heads of {attention.head_size}"
    if _against_any_order(recipe, throughput, attention) is None:
        beside = {"causal": "", "window": "windows and ", "documents": "documents and "}[attention.kind]
        return f"with {beside}kernels.attention={recipe.kernels.attention}"
    return None
