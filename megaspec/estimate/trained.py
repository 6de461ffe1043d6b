"""A recipe's model as it is trained: what everything that is counted of a training step is counted from."""

from dataclasses import replace
from functools import lru_cache

from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.trained_facts import with_frozen
from megaspec.precision.spec import Fp8Precision
from megaspec.recipe import ModelSpec, Recipe
from megaspec.train.trainable import trained_names


def facts_of(recipe: Recipe) -> ModelFacts:
    """The model's facts, with what `train.trainable` freezes, and which layers compute in fp8."""
    facts = trained_facts(recipe.model, recipe.train.trainable)
    if not isinstance(recipe.precision, Fp8Precision):
        return facts
    return _in_fp8(recipe.model, recipe.train.trainable, recipe.precision.layers(recipe.model.n_layers))


def gathers_fp8(recipe: Recipe) -> bool:
    """Sharded weights whose products take fp8 are gathered in fp8."""
    return isinstance(recipe.precision, Fp8Precision) and recipe.precision.gather_fp8


def trained_facts(model: ModelSpec, patterns: tuple[str, ...] | None) -> ModelFacts:
    """The facts of a model of which the patterns of `train.trainable` say what is trained."""
    if patterns is None:
        return model.facts
    return _frozen(model, patterns)


@lru_cache(maxsize=256)
def _in_fp8(model: ModelSpec, patterns: tuple[str, ...] | None, numbers: range) -> ModelFacts:
    facts = trained_facts(model, patterns)
    # layers that are alike go on sharing one object
    narrow = {kind: replace(kind, in_fp8=True) for kind in facts.kinds}
    layers = tuple(narrow[one] if number in numbers else one for number, one in enumerate(facts.layers))
    return replace(facts, layers=layers)


@lru_cache(maxsize=256)
def _frozen(model: ModelSpec, patterns: tuple[str, ...]) -> ModelFacts:
    return with_frozen(model.facts, trained_names(model.facts, patterns))
