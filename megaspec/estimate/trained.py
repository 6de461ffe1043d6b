"""A recipe's model as it is trained: what everything that is counted of a training step is counted from."""

from functools import lru_cache

from megaspec.nn.model_facts import ModelFacts
from megaspec.nn.trained_facts import with_frozen
from megaspec.recipe import ModelSpec, Recipe
from megaspec.train.trainable import trained_names


def facts_of(recipe: Recipe) -> ModelFacts:
    """The model's facts, with what `train.trainable` freezes."""
    return trained_facts(recipe.model, recipe.train.trainable)


def trained_facts(model: ModelSpec, patterns: tuple[str, ...] | None) -> ModelFacts:
    """The facts of a model of which the patterns of `train.trainable` say what is trained."""
    if patterns is None:
        return model.facts
    return _frozen(model, patterns)


@lru_cache(maxsize=256)
def _frozen(model: ModelSpec, patterns: tuple[str, ...]) -> ModelFacts:
    return with_frozen(model.facts, trained_names(model.facts, patterns))
