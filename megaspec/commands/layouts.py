"""The layouts that a supervised run may take: the recipe's own, then those of launcher.layouts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megaspec.commands.planned import fewest_ranks
from megaspec.compose.compose import Composed, recompose
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.units import counted
from megaspec.estimate.target import Target
from megaspec.launcher.spec import SEARCH
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec

T = TypeVar("T")

# What `search` leaves to the resolver, whatever the recipe says: all that it can decide.
_OPEN = (
    "parallelism.tp",
    "parallelism.pp",
    "parallelism.cp",
    "parallelism.ep",
    "parallelism.dp_replicate",
    "parallelism.dp_shard",
    "parallelism.dp_strategy",
    "parallelism.sequence_parallel",
    "parallelism.recompute.kind",
    "parallelism.pipeline.schedule",
    "parallelism.pipeline.virtual_stages",
    "parallelism.pipeline.micro_batch_group",
    "parallelism.pipeline.layout",
    "train.micro_batch",
)

KEY = "launcher.layouts"
RECIPES_OWN = "as the recipe says"
NO_LAYOUT = "layouts-none"
# How the codes of rules about initial weights begin.
_OF_WEIGHTS = "init-"
# Rules that say that a layout needs more devices, or larger ones, than there are: another one may do.
_NO_ROOM = {"ranks-gpus", "ranks-places", "memory"}
# Where torchrun has started the ranks, that there are more or fewer of them than a layout has.
_OTHER_WORLD = {"ranks-torchrun", "ranks-degrees"}


@dataclass(frozen=True)
class LayoutOption:
    """A layout that a run may take."""

    name: str
    """Its words, `search`, or that it is the recipe's own."""
    composed: Composed
    """The recipe with its words."""

    @property
    def least_ranks(self) -> int:
        """Ranks that it needs at least."""
        recipe = self.composed.recipe
        if recipe.launcher.ranks != AUTO:
            return recipe.launcher.ranks
        return fewest_ranks(recipe)


def layout_options(composed: Composed, config_dirs: Sequence[str] = ()) -> list[LayoutOption]:
    """The recipe's own layout first, then those of its list. RecipeError: words of the list that make no recipe."""
    options = [LayoutOption(RECIPES_OWN, composed)]
    layouts = composed.recipe.launcher.layouts
    if layouts == SEARCH:
        return [*options, LayoutOption(SEARCH, replace(composed, recipe=all_open(composed.recipe)))]
    problems: list[Problem] = []
    content = composed.recipe.model_dump(mode="json")
    # those of the recipe go with its own degrees; without a word for them, a layout takes what its degrees make, or
    # what is left
    content["launcher"]["ranks"] = AUTO
    for number, words in enumerate(layouts):
        try:
            made = recompose(content, "recipe", list(words), config_dirs)
        except RecipeError as error:
            problems += _of_layout(number, error.problems)
            continue
        origins = dict(composed.origins)
        origins.pop("launcher.ranks", None)
        for key, origin in made.origins.items():
            if origin != "recipe":
                # what the words set, and files of the choices that they name
                origins[key] = f"{KEY}.{number}" if origin == COMMAND_LINE else origin
        options.append(LayoutOption(" ".join(words) or RECIPES_OWN, Composed(made.recipe, origins)))
    if problems:
        raise RecipeError(problems)
    return options


def all_open(recipe: Recipe) -> Recipe:
    """The recipe with all that a search decides left open."""
    content = recipe.model_dump(mode="json")
    content["launcher"]["ranks"] = AUTO
    for key in _OPEN:
        *sections, name = key.split(".")
        section = content
        for one in sections:
            section = section[one]
        section[name] = AUTO
    return Recipe.model_validate_json(json.dumps(content))


def _of_layout(number: int, problems: Sequence[Problem]) -> list[Problem]:
    """Problems of a layout of the list, as those of the key that holds it."""
    return [Problem(f"{KEY}.{number}", f"{KEY}.{number}: {p.message}", p.origin, p.code) for p in problems]


def room(target: Target) -> int | None:
    """Ranks that a machine has devices for, or that torchrun has started; None where nothing limits them."""
    if target.world_size is not None:
        return target.world_size
    if target.device == "cuda":
        return target.gpus
    return target.places


@dataclass(frozen=True)
class Taken:
    """The layout that was taken, and what came of it."""

    index: int
    option: LayoutOption


def first_that_fits(
    options: Sequence[LayoutOption], target: Target, prepare: Callable[[LayoutOption], T]
) -> tuple[Taken, T]:
    """The first layout that fits the devices of `target`, and what `prepare` makes of it.

    RecipeError: none fits (code `layouts-none`), or what `prepare` raises for another reason than devices.
    """
    refused: list[Problem] = []
    available = room(target)
    no_room = _NO_ROOM
    if target.world_size is not None:
        no_room = _NO_ROOM | _OTHER_WORLD
        if len(options) == 1:
            # torchrun's number of ranks is no lost device: the problem is told as it is
            return Taken(0, options[0]), prepare(options[0])
    for index, option in enumerate(options):
        if available is not None and option.least_ranks > available:
            text = f"{option.name} needs {counted(option.least_ranks, 'rank')}, there is room for {available}"
            refused.append(Problem(KEY, text, code=NO_LAYOUT))
            continue
        try:
            return Taken(index, option), prepare(option)
        except RecipeError as error:
            if not {problem.code for problem in error.problems} <= no_room:
                raise
            for problem in error.problems:
                refused.append(Problem(KEY, f"{option.name}: {problem.message}", problem.origin, NO_LAYOUT))
    way = f"no layout fits the ranks that there is room for ({available}); give more, or add one for fewer to {KEY}"
    raise RecipeError([Problem(KEY, way, code=NO_LAYOUT), *refused])


def specs_of_list(options: Sequence[LayoutOption], target: Target, facts: Facts) -> list[Spec]:
    """What each layout of the list resolves to on a machine like `target` with devices enough. RecipeError: all that is
    wrong with them, at once."""
    problems: list[Problem] = []
    specs = []
    for number, option in enumerate(options[1:]):
        machine = _with_room(target, option.least_ranks)
        try:
            specs.append(resolve_layout(option, machine, facts))
        except RecipeError as error:
            problems += _of_layout(number, [problem for problem in error.problems if not _is_told(problem)])
    if problems:
        raise RecipeError(problems)
    return specs


def _is_told(problem: Problem) -> bool:
    """Whether the recipe itself has the problem, and is told of it where it is resolved."""
    return problem.code.startswith(_OF_WEIGHTS) or problem.key.startswith(KEY)


def resolve_layout(option: LayoutOption, target: Target, facts: Facts) -> Spec:
    """What a layout comes to. RecipeError: as `resolve`, without what is wrong with the data: that is told where the
    recipe itself is resolved."""
    return resolve(option.composed.recipe, target, replace(facts, problems=()), option.composed.origins)


def _with_room(target: Target, ranks: int) -> Target:
    if target.device == "cuda":
        return target.model_copy(update={"gpus": max(target.gpus, ranks)})
    if target.places is None:
        return target
    return target.model_copy(update={"places": max(target.places, ranks)})
