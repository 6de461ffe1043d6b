"""Llama: RoPE, RMSNorm, SwiGLU, grouped-query or latent attention, no biases, experts or not."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import PositiveFloat
from megaspec.model.spec import TransformerSpec
from megaspec.nn.spec import Llama3RopeScaling, MlaSpec, MoeSpec, NoRopeScaling


class LlamaSpec(TransformerSpec):
    """A Llama-style decoder (Touvron et al. 2023; Llama 3, 2024), with experts that of Mixtral, Qwen3 and DeepSeek."""

    kind: Literal["llama"]
    rope_base: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[NoRopeScaling | Llama3RopeScaling, Field(discriminator="kind")] = NoRopeScaling()
    """How the rotary frequencies are stretched for longer sequences."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotary positions."""
    mla: MlaSpec | None = None
    """Latent attention in place of grouped-query attention. None: grouped-query attention."""
    moe: MoeSpec | None = None
    """Experts in place of the feed-forward layer. None: none."""
