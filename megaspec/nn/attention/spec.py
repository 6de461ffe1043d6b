"""Grouped-query attention."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Frozen, PositiveFloat, PositiveInt, Probability
from megaspec.core.part_facts import ALL_OF_THE_PAST, PartFacts, Sight
from megaspec.nn.attention.facts import AttentionPlace, attention_facts


class CausalMask(Frozen):
    """A query sees every key at and before it."""

    kind: Literal["causal"] = "causal"

    @property
    def sight(self) -> Sight:
        return Sight()


class WindowMask(Frozen):
    """A query sees the last keys (Beltagy et al. 2020, Mistral 7B). With documents, those that are in its own."""

    kind: Literal["window"]
    size: PositiveInt
    """How many, in tokens, the query's own included: keys with 0 <= q - k < size."""

    @property
    def sight(self) -> Sight:
        return Sight(window=self.size)


class ChunkMask(Frozen):
    """A query sees the keys at and before it in its own chunk (Llama 4). Chunks are counted from the start of the
    sequence, with documents from the start of each document."""

    kind: Literal["chunk"]
    size: PositiveInt
    """Tokens of a chunk: keys with q // size = k // size."""

    @property
    def sight(self) -> Sight:
        return Sight(chunk=self.size)


MaskSpec = Annotated[CausalMask | WindowMask | ChunkMask, Field(discriminator="kind")]


class NoTemperature(Frozen):
    """Queries are as they are, however long the sequence is."""

    kind: Literal["none"] = "none"


class LogTemperature(Frozen):
    """Late queries are multiplied by 1 + scale · log(1 + floor((position + 1) / floor_scale)), in layers without rotary
    positions (Llama 4; Nakanishi 2025). The position is that in the document where documents are masked."""

    kind: Literal["log"]
    scale: PositiveFloat = 0.1
    """Factor on the logarithm."""
    floor_scale: PositiveFloat = 8192.0
    """Tokens of a step of the staircase."""


TemperatureSpec = Annotated[NoTemperature | LogTemperature, Field(discriminator="kind")]


class AttentionSpec(Frozen):
    """Attention: what every kind of it says of itself."""

    def rotated(self, d_head: int) -> int:
        """Features of a head of `d_head` that rotary positions turn."""
        return d_head

    @property
    def sight(self) -> Sight:
        """Which keys a query sees."""
        return ALL_OF_THE_PAST

    @property
    def caps_scores(self) -> bool:
        """It needs a kernel that caps attention scores."""
        return False

    @property
    def turns_product(self) -> bool:
        """Nothing stands between rotary positions and the one product that makes queries, keys and values."""
        return False

    @property
    def writes_gradient(self) -> bool:
        """The rotation's backward pass makes all that the gradients of that product are made of."""
        return False

    def facts(self, *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace) -> PartFacts:
        """Of the attention of one layer."""
        raise NotImplementedError


class GroupedQuerySpec(AttentionSpec):
    """Attention whose query heads share key and value heads in groups (Ainslie et al. 2023): model.n_heads query heads,
    model.n_kv_heads key and value heads of model.d_head."""

    kind: Literal["gqa"] = "gqa"
    mask: MaskSpec = CausalMask()
    """Which keys a query sees."""
    qkv_bias: bool = False
    """Add learned vectors to queries, keys and values."""
    out_bias: bool = False
    """Add a learned vector to the output."""
    qk_norm: Literal["none", "per_head", "whole", "l2"] = "none"
    """Norm of queries and keys, with model.norm.eps. per_head: of each head before the rotary positions, of the kind of
    model.norm, as Qwen3 has it. whole: the same over all heads of a token at once, as OLMo 2 has it. l2: of each head
    behind the rotary positions, divided by its root mean square and without a weight, in layers that have such
    positions, as Llama 4 has it."""
    clip_qkv: PositiveFloat | None = None
    """Queries, keys and values are clamped to this size behind the norm and before the rotary positions, as in OLMo.
    None: they are not."""
    score_scale: PositiveFloat | None = None
    """Factor on the product of a query and a key: Gemma's query_pre_attn_scalar^-0.5, Granite's attention_multiplier.
    None: d_head^-0.5."""
    score_cap: PositiveFloat | None = None
    """Scores s become cap · tanh(s / cap) before the mask, as in Gemma 2 with 50. None: they don't."""
    sinks: bool = False
    """A learned logit a query head stands in the softmax's denominator beside its scores (gpt-oss): a head may look at
    nothing."""
    output_gate: bool = False
    """The output is multiplied by the sigmoid of a fourth product of the input, number by number, as in Qwen3-Next."""
    temperature: TemperatureSpec = NoTemperature()
    """How queries grow with their position."""
    dropout: Probability = 0.0
    """Dropout on the attention weights, as a probability."""

    @property
    def sight(self) -> Sight:
        return self.mask.sight

    @property
    def caps_scores(self) -> bool:
        return self.score_cap is not None

    @property
    def turns_product(self) -> bool:
        return self.qk_norm in ("none", "l2") and self.clip_qkv is None and not self.output_gate

    @property
    def writes_gradient(self) -> bool:
        # a bias's gradient sums what the layer must not have but in fp8
        return self.turns_product and not self.qkv_bias

    def facts(self, *, n_heads: int, n_kv_heads: int, d_head: int, place: AttentionPlace) -> PartFacts:
        return attention_facts(self, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, place=place)
