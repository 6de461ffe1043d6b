"""How rotary positions turn queries and keys."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen, PositiveFloat, PositiveInt
from megaspec.core.part_facts import PartFacts
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.rope.facts import rope_facts


class NoRopeScaling(Frozen):
    """Rotary frequencies as they are."""

    kind: Literal["none"] = "none"


class Llama3RopeScaling(Frozen):
    """Llama 3.1's stretching of the low rotary frequencies (Meta, llama-models, `apply_scaling`)."""

    kind: Literal["llama3"]
    factor: PositiveFloat = 8.0
    """How far the long wavelengths are stretched."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched in full."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are left alone."""
    original_max_seq_len: PositiveInt = 8192
    """Sequence length in tokens that the unscaled frequencies were trained for."""


RopeScaling = Annotated[NoRopeScaling | Llama3RopeScaling, Field(discriminator="kind")]


class RotarySpec(PositionsSpec):
    """Rotary positions: queries and keys are turned by angles that grow with their places (Su et al. 2021)."""

    kind: Literal["rotary"] = "rotary"
    base: PositiveFloat = 10_000.0
    """Base of the frequencies."""
    scaling: RopeScaling = NoRopeScaling()
    """How the frequencies are stretched for longer sequences."""

    is_rotary: ClassVar[bool] = True

    def rotation_facts(self, d_rotary: int, *, n_heads: int, n_kv_heads: int, name: str) -> PartFacts:
        return rope_facts(self, d_rotary, n_heads=n_heads, n_kv_heads=n_kv_heads, name=name)
