"""Number formats of weights, activations and gradients.

Master weights, optimizer state and gradient sums are at least fp32.
"""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeInt, PositiveFloat, PositiveInt


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
    """fp8 matrix products in the blocks (Micikevicius et al. 2022); everything else is bf16."""

    kind: Literal["fp8"]
    recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """What shares a scale. tensorwise: a tensor. blockwise: 1x128 of inputs, 128x128 of weights (Hopper). mxfp8: 32
    numbers (Blackwell)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: e4m3 forward, e5m2 for gradients of outputs. e4m3: everywhere."""
    first_layers_bf16: NonNegativeInt = 0
    """Layers at the start that stay in bf16."""
    last_layers_bf16: NonNegativeInt = 0
    """Layers at the end that stay in bf16."""
    gather_fp8: bool = False
    """Sharded weights are gathered in fp8."""


PrecisionSpec = Annotated[PlainPrecision | Fp16Precision | Fp8Precision, Field(discriminator="kind")]
