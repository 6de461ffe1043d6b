"""Multi-head latent attention."""

from typing import Literal

from megaspec.core.frozen import PositiveInt, Probability
from megaspec.core.part_facts import PartFacts
from megaspec.nn.attention.facts import AttentionPlace
from megaspec.nn.attention.spec import AttentionSpec
from megaspec.nn.mla.facts import latent_facts


class LatentSpec(AttentionSpec):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made from a small latent."""

    kind: Literal["mla"]
    q_rank: PositiveInt | None = None
    """Width of the latent that queries are made from. None: straight from the model's width."""
    kv_rank: PositiveInt
    """Width of the latent that keys and values are made from."""
    d_nope: PositiveInt
    """Size of the part of a query or key head that carries no position."""
    d_rope: PositiveInt
    """Size of the rotary part, whose key is shared by all heads."""
    d_value: PositiveInt
    """Size of a value head."""
    dropout: Probability = 0.0
    """Dropout on the attention weights, as a probability."""

    def rotated(self, d_head: int) -> int:
        return self.d_rope

    def facts(self, *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace) -> PartFacts:
        return latent_facts(self, n_heads=n_heads, place=place)
