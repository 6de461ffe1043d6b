"""Llama: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import PositiveFloat
from megaspec.model.spec import TransformerSpec
from megaspec.nn.spec import Llama3RopeScaling, NoRopeScaling


class LlamaSpec(TransformerSpec):
    """A Llama-style decoder (Touvron et al. 2023; Llama 3, 2024)."""

    kind: Literal["llama"]
    rope_base: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[NoRopeScaling | Llama3RopeScaling, Field(discriminator="kind")] = NoRopeScaling()
    """How the rotary frequencies are stretched for longer sequences."""
