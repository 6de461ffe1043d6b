"""Number formats of weights, activations and gradients.

Master weights, optimizer state and gradient sums are at least fp32.
"""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Auto, Frozen, NonNegativeInt, PositiveFloat, PositiveInt

# e4m3 ends at 448, and its normal numbers begin at 2^-6: with more room not even the largest element has all its bits.
_MOST_MARGIN = 13


BLACKWELL_SM = {"mxfp8": (100, 119), "nvfp4": (100, 119)}
"""Recipes of fp8 whose products Blackwell's tensor cores alone have, and the compute capabilities of GPUs that have all
three: from the first to the last. Transformer Engine 2.20 has them up to there."""


class PlainPrecision(Frozen):
    """One format for weights and activations, no loss scale."""

    kind: Literal["fp64", "fp32", "bf16"]
    """Format of weights and activations in forward and backward. fp64 is for proofs."""


class Fp16Precision(Frozen):
    """fp16 with a dynamic loss scale (Micikevicius et al. 2018)."""

    kind: Literal["fp16"]
    initial_scale: PositiveFloat = 65536.0
    """Loss scale at the first step."""
    min_scale: PositiveFloat = 1.0
    """The scale is not lowered past this."""
    growth_interval: PositiveInt = 1000
    """Finite steps in a row after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """How many non-finite steps there are until the scale is halved; each one after that halves it again, until the
    scale has doubled. 1 halves it at the first."""


class Fp8Precision(Frozen):
    """fp8 matrix products in the layers (Micikevicius et al. 2022); everything else is bf16.

    Head, embedding, router, norms and the core of attention stay as they are.
    """

    kind: Literal["fp8"]
    recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"] = "tensorwise"
    """What shares a scale. tensorwise: a tensor, by its own largest element. delayed: a tensor, by the largest elements
    of the steps before. rowwise: a token or an output channel; for the weight gradient a feature over all tokens. What
    an expert takes is a tensor of its own; delayed, the tokens of all experts of a layer are one. Grouped products have
    no scales of blocks.
    blockwise: 1x128 of inputs, 128x128 of weights (Hopper). mxfp8: 32 numbers along which a product sums (OCP
    Microscaling Formats 1.0), by Transformer Engine (Blackwell). nvfp4: 16 numbers in e2m1, 16x16 of weights, and a
    tensor; what weight gradients sum over is rotated (arXiv 2509.25149), by Transformer Engine (Blackwell)."""
    format: Auto[Literal["hybrid", "e4m3"]] = "auto"
    """hybrid: e4m3 forward, e5m2 for gradients of outputs; those of experts' outputs are e4m3, which grouped products
    take alone; not with blockwise. e4m3: everywhere. auto: hybrid with scales of tensors, which need its range, else
    e4m3."""
    gradient_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of gradients of outputs, of nvfp4 alone. stochastic, as its recipe has it: at random to one of both neighbours,
    so that what is lost is zero in the mean. Ranks draw numbers of their own, so that in another layout other
    gradients are rounded up. nearest: for proofs."""
    amax_history: Annotated[PositiveInt, Field(le=2**16)] = 1024
    """Steps that delayed scales look back: they fit the largest element of all of them."""
    margin: Annotated[NonNegativeInt, Field(le=_MOST_MARGIN)] = 0
    """Delayed scales leave room for elements 2^margin times as large."""
    first_layers_bf16: NonNegativeInt = 2
    """Layers at the start that stay in bf16. With random weights their noise goes forward into all layers
    behind them, and with the gradients back into themselves."""
    last_layers_bf16: NonNegativeInt = 1
    """Layers at the end that stay in bf16."""
    outside: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Format of weights, activations and gradients outside of these products, and of what they return. fp32 and fp64
    are for proofs."""
    gather_fp8: bool = False
    """Weights that fsdp and hsdp share out are gathered in fp8 where products take it, in half of bf16's bytes. Nothing
    is lost where a tensor has one scale: tensorwise and delayed."""

    def layers(self, n_layers: int) -> range:
        """The numbers of the layers that compute in fp8, of so many."""
        return range(self.first_layers_bf16, n_layers - self.last_layers_bf16)


PrecisionSpec = Annotated[PlainPrecision | Fp16Precision | Fp8Precision, Field(discriminator="kind")]


def fp8_recipe(precision: PrecisionSpec) -> str | None:
    """Which elements share a scale; None: no products take fp8."""
    if isinstance(precision, Fp8Precision):
        return precision.recipe
    return None


def may_write_fp8(precision: PrecisionSpec, *, recomputed: frozenset[str], linear: str) -> frozenset[str]:
    """Operations of kernels/ that may write what layers beside them multiply in fp8, where an implementation can.

    Scales are known before the elements; what is computed again by itself is no part of another operation; and
    linear=te quantises everything itself.
    `recomputed`: the parts that are computed again by themselves; `linear`: kernels.linear.
    """
    if fp8_recipe(precision) != "delayed" or linear == "te":
        return frozenset()
    writers = {"rope"}
    if "norm" not in recomputed:
        writers.add("norm")
    if not recomputed & {"mlp", "activation"}:
        writers.add("gated")
    return frozenset(writers)


def model_format(precision: PrecisionSpec) -> str:
    """Of weights and activations: fp64, fp32, bf16 or fp16."""
    if isinstance(precision, Fp8Precision):
        return precision.outside
    return precision.kind
