"""Grouped-query attention."""

from typing import Literal

from megaspec.core.frozen import Frozen, Probability
from megaspec.core.part_facts import PartFacts
from megaspec.nn.attention.facts import AttentionPlace, attention_facts


class AttentionSpec(Frozen):
    """Attention: what every kind of it says of itself."""

    def rotated(self, d_head: int) -> int:
        """Features of a head of `d_head` that rotary positions turn."""
        return d_head

    def facts(self, *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace) -> PartFacts:
        """Of the attention of one layer."""
        raise NotImplementedError


class GroupedQuerySpec(AttentionSpec):
    """Attention whose query heads share key and value heads in groups (Ainslie et al. 2023): model.n_heads query heads,
    model.n_kv_heads key and value heads of model.d_head."""

    kind: Literal["gqa"] = "gqa"
    qkv_bias: bool = False
    """Add learned vectors to queries, keys and values."""
    out_bias: bool = False
    """Add a learned vector to the output."""
    qk_norm: Literal["none", "per_head"] = "none"
    """Norm of queries and keys before the rotary positions, of the kind of model.norm. per_head: of each head, as Qwen3
    has it."""
    dropout: Probability = 0.0
    """Dropout on the attention weights, as a probability."""

    def facts(self, *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace) -> PartFacts:
        return attention_facts(self, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, place=place)
