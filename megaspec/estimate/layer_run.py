"""How one rank runs a layer for one micro batch: from a model's facts to this rank's sizes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

from megaspec.core.part_facts import Degrees, Element, Execution, Kept, Routing, Tokens, Width
from megaspec.nn.fp8_facts import NUMBERS_OF_A_SCALE, VALUE_BYTES
from megaspec.nn.layer.facts import LayerFacts
from megaspec.parallelism.spec import ContextSpec, RecomputeSpec
from megaspec.precision.spec import fp8_recipe, model_format
from megaspec.recipe import Recipe
from megaspec_kernels.catalog import CATALOG, Requirement
from megaspec_kernels.fp8_cast.padding import padded_rows

BYTES = {"fp64": 8, "fp32": 4}
"""Of a number in a precision; every other computes in 2."""
_FEED_FORWARD = {"mlp", "moe", "shared_experts"}


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of a micro batch that one rank has."""

    sequences: int
    seq_len: int
    """Tokens of a whole sequence."""
    cp: int
    """Ranks that share each sequence."""
    stream_ranks: int
    """Tensor-parallel ranks that share the tokens between matrix products."""

    @property
    def whole(self) -> int:
        """Tokens on all ranks that share its sequences."""
        return self.sequences * self.seq_len

    @property
    def all(self) -> int:
        """Tokens in a matrix product."""
        return max(1, self.whole // self.cp)

    @property
    def stream(self) -> int:
        """Tokens between matrix products."""
        return max(1, self.all // self.stream_ranks)


@dataclass(frozen=True)
class LayerRun:
    """One rank, one layer, one micro batch."""

    tokens: MicroBatch
    degrees: Degrees
    execution: Execution
    width: int
    """Bytes of an activation in the model's format."""
    fp8_recipe: str | None = None
    """What shares a scale in fp8; None: no products take it."""
    gathers_tokens: bool = False
    """Every rank gets all tokens to look for those of its experts; otherwise those alone that chose them."""

    @property
    def wide(self) -> int:
        """Bytes of what is computed in at least fp32."""
        return max(4, self.width)

    def count(self, tokens: Tokens, routing: Routing | None) -> int:
        """How many tokens, or rows of experts, an activation is of."""
        if tokens == "all":
            return self.tokens.all
        if tokens == "stream":
            return self.tokens.stream
        assert routing is not None, "rows of experts in a layer without them"
        return self.expert_rows(routing)

    def expert_rows(self, routing: Routing) -> int:
        """Rows that the experts of this rank take when tokens are spread evenly."""
        return routing.rows(self.tokens.stream, self.tokens.whole) * self.degrees.etp

    def on_rank(self, widths: Iterable[Width]) -> int:
        """Features of a token that this rank has."""
        return sum(width.on(self.degrees) for width in widths)

    def bytes_of(self, element: Element, *, in_fp8: bool = False) -> float:
        """Of one number: a product's factor in fp8 where products take it, without its share of a scale; statistics in
        fp32, indices in int64."""
        if element == "product" and in_fp8:
            return VALUE_BYTES.get(self.fp8_recipe, 1)
        sizes = {"wide": self.wide, "product": self.width, "statistic": 4, "byte": 1, "index": 8}
        return sizes.get(element, self.width)

    def kept_bytes(self, kept: Kept, layer: LayerFacts) -> int:
        """Of one kept tensor."""
        rows = self.count(kept.tokens, layer.routing)
        in_fp8 = kept.what in layer.fp8_inputs
        if in_fp8 and kept.tokens == "routed":
            # in columns, with the padding of each expert's rows
            rows = padded_rows(rows, layer.routing.n_experts // self.degrees.ep)
        each = self.bytes_of(kept.element, in_fp8=in_fp8)
        if in_fp8 and not self.execution.recomputed & set(kept.freed_by):
            each = self._bytes_of_input(kept, layer)
        features = kept.times * self.on_rank(kept.features)
        scales = 0
        if in_fp8 and kept.element == "product":
            # of all tokens: blocks may go across the borders of what ranks keep
            scales = self.scale_bytes(self.tokens.all * features)
        return ceil(rows * features * each) + scales

    def scale_bytes(self, numbers: int) -> int:
        """Of the scales of so many numbers in one layout of fp8, where they count."""
        block = NUMBERS_OF_A_SCALE.get(self.fp8_recipe)
        return 0 if block is None else ceil(numbers / block)

    def fp8_bytes(self, numbers: int) -> int:
        """Of so many numbers in one layout, and of their scales."""
        return ceil(numbers * VALUE_BYTES.get(self.fp8_recipe, 1)) + self.scale_bytes(numbers)

    def _bytes_of_input(self, kept: Kept, layer: LayerFacts) -> float:
        """Of one number that products in fp8 take: as they have quantised it, and as a part takes it that is computed
        again from it."""
        takers = [linear for linear in layer.linears if linear.input_kept == kept.what and linear.takes_fp8]
        again = [linear for linear in takers if linear.recomputed_with in self.execution.recomputed]
        size = 0
        if again:
            size += self.bytes_of(kept.element)
        if len(again) < len(takers):
            size += self.bytes_of(kept.element, in_fp8=True)
        return size

    @cached_property
    def stream_bytes_per_feature(self) -> int:
        """Of one feature of the residual stream, over this rank's tokens."""
        return self.tokens.stream * self.width


def recomputed_parts(recompute: RecomputeSpec) -> frozenset[str]:
    """Parts that the backward pass of every layer computes again: those that `selective` names. The activation stands
    inside each feed-forward layer."""
    parts = recompute.alone
    if parts & _FEED_FORWARD:
        return parts | {"activation"}
    return parts


def fused_operations(recipe: Recipe) -> frozenset[str]:
    """Operations that a filled recipe gives kernels of their own; see Execution."""
    return frozenset(name for name in ("norm", "gated", "rope") if getattr(recipe.kernels, name) != "reference")


class ContextSplit(NamedTuple):
    """How many of cp ranks swap heads for tokens, and among how many keys and values go round; `heads · ring` is cp,
    but for all_gather, which does neither."""

    heads: int
    ring: int


def context_split(context: ContextSpec, cp: int) -> ContextSplit:
    """What a kind of context parallelism makes of its ranks."""
    if context.kind == "ring":
        return ContextSplit(heads=1, ring=cp)
    if context.kind == "all_to_all":
        return ContextSplit(heads=cp, ring=1)
    if context.kind == "hierarchical" and context.factors:
        return ContextSplit(*context.factors)
    return ContextSplit(heads=1, ring=1)


def tokens_of(recipe: Recipe) -> MicroBatch:
    """What a rank of a filled recipe has of a micro batch."""
    parallelism = recipe.parallelism
    stream_ranks = 1
    if parallelism.sequence_parallel:
        stream_ranks = parallelism.tp
    return MicroBatch(
        sequences=recipe.train.micro_batch,
        seq_len=recipe.data.seq_len,
        cp=parallelism.cp,
        stream_ranks=stream_ranks,
    )


def degrees_of(recipe: Recipe) -> Degrees:
    """Ranks that divide a layer's matrices."""
    parallelism = recipe.parallelism
    return Degrees(tp=parallelism.tp, ep=parallelism.ep, etp=parallelism.etp)


def _copies_values(recipe: Recipe) -> Literal["never", "hidden", "always"]:
    """See Execution. Ranks of a sequence put keys and values, or heads, into a tensor that they send."""
    if recipe.parallelism.cp > 1:
        return "always"
    return _in_layers(recipe, _attention(recipe).copies_values)


def _attention(recipe: Recipe) -> Requirement:
    return CATALOG["attention"].implementations[recipe.kernels.attention]


def _in_layers(recipe: Recipe, layers: Literal["never", "hidden", "always"]) -> Literal["never", "hidden", "always"]:
    """Documents hide keys in all layers; what computes all of them itself keeps of all what it keeps of those."""
    if layers == "hidden" and (recipe.data.document_mask or takes_all_layers(recipe)):
        return "always"
    return layers


def takes_all_layers(recipe: Recipe) -> bool:
    """Whether a filled recipe's attention computes itself, too, what hides and caps nothing and goes through sdpa in
    any order."""
    return _attention(recipe).takes_all_layers(deterministic=recipe.train.deterministic)


def layer_run(recipe: Recipe) -> LayerRun:
    """Of a rank of a filled recipe."""
    parallelism = recipe.parallelism
    return LayerRun(
        tokens=tokens_of(recipe),
        degrees=degrees_of(recipe),
        execution=Execution(
            is_compiled=recipe.kernels.compile == "block",
            keeps_scores=recipe.kernels.attention == "reference",
            recomputed=recomputed_parts(parallelism.recompute),
            fused=fused_operations(recipe),
            copies_values=_copies_values(recipe),
            keeps_without_sinks=_in_layers(recipe, _attention(recipe).keeps_without_sinks),
            swaps_heads=context_split(parallelism.context, parallelism.cp).heads > 1,
            seq_len=recipe.data.seq_len,
        ),
        width=BYTES.get(model_format(recipe.precision), 2),
        fp8_recipe=fp8_recipe(recipe.precision),
        gathers_tokens=parallelism.dispatch == "all_gather",
    )
