"""Parameters of a model and of one rank of it, exactly, by what they are for."""

from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache

from megaspec.core.part_facts import Degrees
from megaspec.estimate.layer_run import degrees_of
from megaspec.estimate.trained import facts_of
from megaspec.nn.layer.facts import LayerFacts, WeightCount
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.recipe import ModelSpec, Recipe


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of weights. The vocabulary counts unpadded, a tied output head 0."""

    embedding: int
    positions: int
    attention: int
    mlp: int
    experts: int
    """Routed experts, all of them."""
    shared_experts: int
    router: int
    norms: int
    head: int
    active_experts: int = 0
    """Of `experts`, those that one token passes."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "active_experts")

    @property
    def active(self) -> int:
        """Those that one token passes, embedding and head included."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True)
class PartialGradients:
    """Weights whose gradients tensor-parallel ranks add up: each has seen only a part of the tokens or heads."""

    over_tp: int
    """Of weights that all ranks hold whole."""
    over_copies: int
    """Of key and value heads that several ranks hold."""


@lru_cache(maxsize=256)
def count_parameters(model: ModelSpec) -> ParameterCount:
    """From a model without open fields."""
    facts = model.facts
    # of all ranks together
    whole = Degrees()
    found: Counter[str] = Counter()
    active = 0
    for table in facts.tables():
        found[table.purpose] += table.size
    if facts.is_tied:
        # the embedding's, but for its bias
        found["head"] -= facts.head_table.rows * facts.head_table.width
    for _, vector in facts.vectors():
        found[vector.purpose] += vector.size
    for _, linear in facts.linears():
        size = linear.weights_on(whole) + linear.biases_on(whole)
        found[linear.purpose] += size
        if linear.tokens == "routed":
            active += size // linear.n_experts * min(linear.active_experts, linear.n_experts)
    names = [f.name for f in fields(ParameterCount) if f.name != "active_experts"]
    return ParameterCount(**{name: found[name] for name in names}, active_experts=active)


@lru_cache(maxsize=8192)
def layer_weights(layer: LayerFacts, degrees: Degrees) -> WeightCount:
    """A layer on one rank: matrices split over tp, experts over ep and etp, norms and router on every rank."""
    return layer.weights_on(degrees)


@lru_cache(maxsize=8192)
def trained_weights(layer: LayerFacts, degrees: Degrees) -> WeightCount:
    """Of `layer_weights`, what is trained."""
    return layer.trained_on(degrees)


def holds_embedding(chunks: tuple[Chunk, ...]) -> bool:
    """Whether a rank with these chunks does."""
    return any(chunk.embedding for chunk in chunks)


def holds_head(chunks: tuple[Chunk, ...]) -> bool:
    """Whether a rank with these chunks does."""
    return any(chunk.head for chunk in chunks)


def rank_parameters(recipe: Recipe, stage: int) -> WeightCount:
    """The weights on one rank of pipeline rank `stage`; a tied head on another rank than the embedding is a copy."""
    facts = facts_of(recipe)
    degrees = degrees_of(recipe)
    dense = 0
    expert = 0
    holds_table = False
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[stage]:
        for kind, layers in facts.kinds_of(chunk.layers).items():
            weights = layer_weights(kind, degrees)
            dense += layers * weights.dense
            expert += layers * weights.expert
        if chunk.head:
            dense += facts.norm_weights + facts.head_bias_on(tp=degrees.tp)
        if chunk.embedding:
            dense += facts.position_weights
        # a tied table is one weight where both ends are on one rank
        for is_there in (chunk.embedding, chunk.head):
            if is_there and not (holds_table and facts.is_tied):
                dense += facts.table_on(tp=degrees.tp)
                holds_table = True
    return WeightCount(dense, expert)


def trained_parameters(recipe: Recipe, stage: int) -> WeightCount:
    """Of `rank_parameters`, what is trained: it has gradients, master weights and moments."""
    if recipe.train.trainable is None:
        return rank_parameters(recipe, stage)
    facts = facts_of(recipe)
    degrees = degrees_of(recipe)
    dense = 0
    expert = 0
    holds_table = False
    for chunk in stages_of(recipe.model.n_layers, recipe.parallelism)[stage]:
        for kind, layers in facts.kinds_of(chunk.layers).items():
            weights = trained_weights(kind, degrees)
            dense += layers * weights.dense
            expert += layers * weights.expert
        if chunk.head:
            dense += facts.trained_norm_weights
            if not facts.head_table.is_bias_frozen:
                dense += facts.head_bias_on(tp=degrees.tp)
        if chunk.embedding:
            dense += facts.trained_position_weights
        # a tied table is one weight where both ends are on one rank
        for is_there, table in ((chunk.embedding, facts.embedding_table), (chunk.head, facts.head_table)):
            if is_there and not table.is_frozen and not (holds_table and facts.is_tied):
                dense += facts.table_on(tp=degrees.tp)
                holds_table = True
    return WeightCount(dense, expert)


def partial_gradients(recipe: Recipe, stage: int) -> PartialGradients:
    """Of one rank of pipeline rank `stage`."""
    facts = facts_of(recipe)
    parallelism = recipe.parallelism
    if parallelism.tp == 1:
        return PartialGradients(0, 0)
    degrees = degrees_of(recipe)
    splits_tokens = bool(parallelism.sequence_parallel)
    over_tp = 0
    over_copies = 0
    for chunk in stages_of(recipe.model.n_layers, parallelism)[stage]:
        for number in chunk.layers:
            layer = facts.layers[number]
            over_tp += _seen_in_part(layer, splits_tokens=splits_tokens)
            over_copies += _copied(layer, degrees)
        if splits_tokens and chunk.head:
            over_tp += facts.trained_norm_weights
        if splits_tokens and chunk.embedding:
            over_tp += facts.trained_position_weights
    return PartialGradients(over_tp, over_copies)


def _seen_in_part(layer: LayerFacts, *, splits_tokens: bool) -> int:
    """Of a layer, weights that every tensor-parallel rank holds whole and whose gradient is a sum over the ranks: they
    split heads whatever they do with tokens, tokens only under sequence parallelism."""
    size = 0
    for vector in layer.vectors:
        if vector.by_heads is not None:
            # each rank sees all tokens of its own heads
            continue
        if vector.is_trained and not vector.is_frozen and (splits_tokens or vector.acts_on == "heads"):
            size += vector.size
    if not splits_tokens:
        return size
    for linear in layer.linears:
        if linear.split == "sequence" and not linear.is_frozen:
            size += linear.inputs.whole * linear.columns
        if linear.split in ("sequence", "rows") and linear.bias and not linear.is_bias_frozen:
            # what is added behind a sum over ranks is on all of them
            size += linear.columns
    return size


def _copied(layer: LayerFacts, degrees: Degrees) -> int:
    """Of a layer, numbers of key and value heads that other ranks hold as well."""
    size = 0
    for linear in layer.linears:
        for width in linear.outputs:
            # heads that are fewer than ranks
            if linear.split == "columns" and width.size > 1 and degrees.tp > width.count:
                inputs = 0 if linear.is_frozen else linear.inputs.whole
                size += width.on(degrees) * (inputs + (linear.bias and not linear.is_bias_frozen))
    for vector in layer.vectors:
        if vector.by_heads is not None and not vector.is_frozen and degrees.tp > vector.by_heads.count:
            size += vector.on(degrees)
    return size
