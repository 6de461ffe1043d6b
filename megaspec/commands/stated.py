"""Recipes as `check`, `recipes`, `explain` and `diff` take them: by name or file, on the GPUs that they state."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megaspec.checkable import PartlyError
from megaspec.commands.planned import DEFAULT, planned_target, stated_gpus
from megaspec.compose.compose import Composed, compose
from megaspec.core.errors import Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.estimate.hardware import Hardware, hardware_named
from megaspec.estimate.target import Target, detect_target
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.spec import Spec


@dataclass(frozen=True)
class Stated:
    """A recipe on the machine that it is for."""

    composed: Composed
    hardware: Hardware
    target: Target

    @property
    def recipe(self) -> Recipe:
        return self.composed.recipe

    @property
    def gpus(self) -> str:
        """`64 x H100`; `any` where the recipe states no number."""
        if self.recipe.launcher.ranks == AUTO:
            return "any"
        return f"{self.target.gpus} x {self.hardware.name}"

    def spec(self) -> Spec:
        """What it resolves to, whether its data is there or not. Raises what `resolve` does."""
        facts = replace(gather_facts(self.recipe), problems=())
        return resolve(self.recipe, self.target, facts, self.composed.origins)


def stated(word: str, overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()) -> Stated:
    """The recipe of a name, or of a YAML file. The GPUs: launcher.ranks of those that its source names, else a node of
    H100. RecipeError: there is no such recipe, or what `compose` raises."""
    name, folders = recipe_named(word, config_dirs)
    try:
        composed = compose(name, overrides, folders)
    except PartlyError as error:
        raise with_rules(error, lambda recipe: _target(recipe, _hardware(recipe))) from None
    hardware = _hardware(composed.recipe)
    return Stated(composed, hardware, _target(composed.recipe, hardware))


def _hardware(recipe: Recipe) -> Hardware:
    return hardware_named(recipe.about.hardware or DEFAULT)


def _target(recipe: Recipe, hardware: Hardware) -> Target:
    return planned_target(hardware, stated_gpus(recipe, hardware), _here(), recipe)


def recipe_named(word: str, config_dirs: Sequence[str | Path] = ()) -> tuple[str, tuple[str | Path, ...]]:
    """The name of a recipe, and where to look for it: for a file also its own folder."""
    if not word.endswith((".yaml", ".yml")):
        return word, tuple(config_dirs)
    path = Path(word)
    if not path.is_file():
        what = "no such file; give its path, or a name"
        raise RecipeError([Problem("recipe", f"{word}: {what}", code="choice.unknown")])
    if path.suffix == ".yml":
        raise RecipeError([Problem("recipe", f"{word}: a recipe ends in .yaml; rename it", code="choice.unknown")])
    return path.stem, (*config_dirs, path)


@cache
def _here() -> Target:
    return detect_target()
