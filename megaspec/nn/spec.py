"""Settings of single modules that several families use."""

from typing import Literal

from megaspec.core.frozen import Frozen, PositiveFloat, PositiveInt


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


class NoRopeScaling(Frozen):
    """Rotary frequencies as they are."""

    kind: Literal["none"] = "none"
