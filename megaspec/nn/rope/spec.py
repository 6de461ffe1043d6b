"""How rotary positions turn queries and keys."""

from math import log, sqrt
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megaspec.core.frozen import MOST, Count, Fraction, Frozen, PositiveFloat, PositiveInt
from megaspec.core.part_facts import PartFacts
from megaspec.nn.embedding.spec import PositionsSpec
from megaspec.nn.rope.facts import rope_facts


class RopeScalingSpec(Frozen):
    """How rotary frequencies are stretched: what every way of it says of itself."""

    def effective_length(self, length: int) -> int:
        """Which frequencies sequences of `length` tokens have: lengths of which this is equal have the same ones."""
        return 0

    def angle_factor(self) -> float:
        """The attention factor: cosine and sine of every angle are multiplied by it."""
        return 1.0


class NoRopeScaling(RopeScalingSpec):
    """Rotary frequencies as they are."""

    kind: Literal["none"] = "none"


class LinearRopeScaling(RopeScalingSpec):
    """Every frequency is divided by a factor (Chen et al. 2023, position interpolation)."""

    kind: Literal["linear"]
    factor: PositiveFloat
    """How far all wavelengths are stretched."""


class DynamicRopeScaling(RopeScalingSpec):
    """The base grows with the length of the sequence, once that is longer than original_max_seq_len (dynamic NTK).
    Shorter sequences are turned as without scaling."""

    kind: Literal["dynamic"]
    factor: PositiveFloat
    """How fast the base grows."""
    original_max_seq_len: PositiveInt
    """Sequence length in tokens up to which nothing is stretched."""

    def effective_length(self, length: int) -> int:
        return max(length, self.original_max_seq_len)


class Llama3RopeScaling(RopeScalingSpec):
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


class YarnRopeScaling(RopeScalingSpec):
    """YaRN (Peng et al. 2023): high frequencies stay, low ones are divided by the factor, with a ramp between them."""

    kind: Literal["yarn"]
    factor: PositiveFloat
    """How far the long wavelengths are stretched."""
    original_max_seq_len: PositiveInt
    """Sequence length in tokens that the unscaled frequencies were trained for."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies that turn more often than this in original_max_seq_len are left alone."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies that turn less often than this in original_max_seq_len are stretched in full."""
    truncate: bool = True
    """Round the ends of the ramp to whole frequencies, outwards."""
    attention_factor: PositiveFloat | None = None
    """Factor on cosine and sine. None: 0.1 ln(factor) + 1, or what mscale and mscale_all_dim say."""
    mscale: PositiveFloat | None = None
    """With mscale_all_dim, the factor on cosine and sine is (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
    ln(factor) + 1), as DeepSeek has it."""
    mscale_all_dim: PositiveFloat | None = None
    """See mscale."""

    def angle_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._stretch(self.mscale) / self._stretch(self.mscale_all_dim)
        return self._stretch(1.0)

    def _stretch(self, mscale: float) -> float:
        if self.factor <= 1:
            return 1.0
        return 0.1 * mscale * log(self.factor) + 1.0


class LongRopeScaling(RopeScalingSpec):
    """LongRoPE (Ding et al. 2024): each frequency is divided by a factor of its own, another one in long sequences."""

    kind: Literal["longrope"]
    short_factor: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """One for each frequency, in sequences of up to original_max_seq_len tokens."""
    long_factor: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    """One for each frequency, in longer sequences. The whole sequence decides, documents in it do not."""
    original_max_seq_len: Annotated[Count, Field(ge=2, le=MOST)]
    """Tokens of the longest sequence that takes short_factor."""
    factor: PositiveFloat | None = None
    """How much longer than that sequences may be; cosine and sine are multiplied by sqrt(1 + ln(factor) /
    ln(original_max_seq_len)). None: attention_factor says what with."""
    attention_factor: PositiveFloat | None = None
    """Factor on cosine and sine. None: it follows from `factor`."""

    def effective_length(self, length: int) -> int:
        # all long sequences are alike
        return self.original_max_seq_len + 1 if length > self.original_max_seq_len else self.original_max_seq_len

    def angle_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return sqrt(1 + log(self.factor) / log(self.original_max_seq_len))


class ProportionalRopeScaling(RopeScalingSpec):
    """Some of the frequencies of the whole head turn, the lower ones stand still, as in Gemma 4."""

    kind: Literal["proportional"]
    fraction: Annotated[Fraction, Field(gt=0)]
    """Of all frequencies, how many turn, the highest ones."""
    factor: PositiveFloat = 1.0
    """How far all wavelengths are stretched."""


RopeScaling = Annotated[
    NoRopeScaling
    | LinearRopeScaling
    | DynamicRopeScaling
    | Llama3RopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling,
    Field(discriminator="kind"),
]


class RotarySpec(PositionsSpec):
    """Rotary positions: queries and keys are turned by angles that grow with their places (Su et al. 2021)."""

    kind: Literal["rotary"] = "rotary"
    base: PositiveFloat = 10_000.0
    """Base of the frequencies."""
    fraction: Annotated[Fraction, Field(gt=0)] = 1.0
    """Of the features of a head, how many turn: the first ones. The others stay as they are."""
    scaling: RopeScaling = NoRopeScaling()
    """How the frequencies are stretched for longer sequences."""

    is_rotary: ClassVar[bool] = True

    def turned(self, width: int) -> int:
        return int(self.fraction * width)

    def rotation_facts(self, d_rotary: int, *, n_heads: int, n_kv_heads: int, name: str) -> PartFacts:
        return rope_facts(self, d_rotary, n_heads=n_heads, n_kv_heads=n_kv_heads, name=name)
