"""Recipes as they are composed, each once: a rule's example is asked for by several tests."""

from functools import cache

from megaspec.compose.compose import Composed, compose


@cache
def composed(recipe: str, overrides: tuple[str, ...]) -> Composed:
    """A recipe that ships. RecipeError where it can't be composed."""
    return compose(recipe, overrides)
