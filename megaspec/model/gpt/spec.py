"""GPT-2: learned positions, LayerNorm, GELU, biases."""

from typing import Literal

from megaspec.model.spec import TransformerSpec


class GptSpec(TransformerSpec):
    """A GPT-2-style decoder (Radford et al. 2019)."""

    kind: Literal["gpt"]
    tied_embeddings: bool = True
    """Use the input embedding as the output head."""
