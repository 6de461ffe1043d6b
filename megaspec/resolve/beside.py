"""The rules, asked of a recipe in which some values are not of their type: all that does not hang on these."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megaspec.checkable import Checkable, PartlyError
from megaspec.core.errors import Problem, RecipeError, chosen_in
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.fill import FILLS, PLAIN, ResolverDraft
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import located
from megaspec.resolve.trials import trials
from megaspec.rules.case import Case
from megaspec.rules.reads import fields_read
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import RULES, broken_rules
from megaspec.rules.unbuilt import unbuilt_problems


def with_rules(
    error: RecipeError,
    target_of: Callable[[Recipe], Target],
    *,
    searched: Iterable[str] = (),
    is_for_training: bool = False,
    has_begun: bool = False,
) -> RecipeError:
    """The error with all else that is wrong with the recipe: one report, what is not of its type first.

    `searched`: keys that will be decided anew. A run is also told what can be planned only, and data that is not there.
    `has_begun`: see `settle`.
    """
    if not isinstance(error, PartlyError) or error.checkable is None:
        return error
    found = error.checkable
    try:
        target = target_of(found.recipe)
    except RecipeError as other:
        return RecipeError([*error.problems, *other.problems])
    unknown = found.bad | frozenset(searched)
    if "data" in found.bad or _reads(found.bad, ("data.kind", "data.blend")):
        facts = Facts(run_dir="runs/unknown")
    else:
        facts = gather_facts(found.recipe)
    if not is_for_training:
        facts = replace(facts, problems=())
    chosen = frozenset() if has_begun else chosen_in(found.origins)
    others = _problems(found, target, facts, unknown, chosen, is_for_training=is_for_training)
    return RecipeError([*error.problems, *others])


def broken_by_all(
    recipe: Recipe,
    origins: Mapping[str, str],
    target: Target,
    facts: Facts,
    *,
    searched: Iterable[str],
    is_for_training: bool,
) -> list[Problem]:
    """What is wrong with a recipe whatever the keys that are `searched` are decided to be."""
    checkable = Checkable(recipe, frozenset(), origins)
    chosen = chosen_in(origins)
    return _problems(checkable, target, facts, frozenset(searched), chosen, is_for_training=is_for_training)


class _WatchedDraft(ResolverDraft):
    """Notes which decisions follow from what is not known."""

    def __init__(self, recipe: Recipe, target: Target, facts: Facts, unknown: frozenset[str]):
        super().__init__(recipe, target, facts)
        self.unknown = set(unknown)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def fill(self, key: str, value: Any, reason: str) -> None:
        if self.is_open(key) and _reads(self.read, self.unknown):
            self.unknown.add(key)
        super().fill(key, value, reason)


def _problems(
    found: Checkable,
    target: Target,
    facts: Facts,
    unknown: frozenset[str],
    chosen: frozenset[str],
    *,
    is_for_training: bool,
) -> list[Problem]:
    draft = _WatchedDraft(found.recipe, target, facts, unknown)
    for key, plain in PLAIN.items():
        if draft.is_open(key):
            draft.unknown.add(key)  # only a search of the whole recipe could tell
            draft.fill(key, plain, "")
    for fill in FILLS:
        draft.read.clear()
        fill(draft)
    try:
        filled = Recipe.model_validate_json(json.dumps(draft.content))
    except ValidationError:
        return []
    decisions = tuple(draft.decisions)
    origins = found.origins
    decided = frozenset(decision.key for decision in decisions)
    case = Case(filled, target, facts, decided, chosen)
    asked = {}
    for code, rule in RULES.items():
        if not _reads(fields_read(rule, case), draft.unknown):
            asked[code] = rule
    case = replace(case, trial=trials(found.recipe, case))
    problems = broken_rules(case, decisions=decisions, origins=origins, rules=asked)
    if is_for_training:
        for problem in unbuilt_problems(filled, origins):
            if not _reads([problem.key], draft.unknown):
                problems.append(problem)
    of_data = []
    for problem in facts.problems:
        # what stands in for a value that is missing is no file that a user named
        if not _reads([problem.key], found.bad):
            of_data.append(problem)
    return problems + located([*of_data, *draft.problems], origins)


def _reads(read: Iterable[str], unknown: Iterable[str]) -> bool:
    """Whether some path that is read is unknown, or lies below one that is."""
    return any(one == other or one.startswith(f"{other}.") for other in unknown for one in read)
