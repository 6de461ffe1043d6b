"""Whether a change of a recipe mends it: the changed recipe is filled, and every rule asked."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from megaspec.core.problems import value_at
from megaspec.recipe import Recipe
from megaspec.resolve.fill import PLAIN, plainly_drafted
from megaspec.rules.case import Case
from megaspec.rules.table import broken_codes

# Of one report, so that a recipe in which everything is wrong is answered as quickly as others.
MOST = 300


def trials(recipe: Recipe, case: Case) -> Callable[[str, Mapping[str, Any]], bool]:
    """A function of a code and changes: True when they keep its rule, and break none that was kept. `recipe`: as it was
    asked for.

    What a search decided stays as it was found.
    """
    asked = recipe.model_dump(mode="json")
    filled = case.recipe.model_dump(mode="json")
    found = frozenset(key for key in PLAIN if key in case.decided)
    _put(asked, {key: value_at(filled, key) for key in found})
    text = json.dumps(asked)
    broken_before = broken_codes(case)
    n_tried = 0

    def mends(code: str, changes: Mapping[str, Any]) -> bool:
        nonlocal n_tried
        n_tried += 1
        if n_tried > MOST:
            return False
        # text once more: a changed copy for each trial
        content = json.loads(text)
        _put(content, changes)
        changed = _filled(content, case, found)
        return changed is not None and broken_codes(changed) <= broken_before - {code}

    return mends


def _put(content: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        where = value_at(content, section)
        if isinstance(where, dict):
            where[name] = value


def _filled(content: dict[str, Any], before: Case, found: frozenset[str]) -> Case | None:
    """None where the values are out of the bounds of their keys. `before`: the case without the changes."""
    try:
        draft = plainly_drafted(Recipe.model_validate_json(json.dumps(content)), before.target, before.facts)
        recipe = Recipe.model_validate_json(json.dumps(draft.content))
    except ValidationError:
        return None
    decided = frozenset(decision.key for decision in draft.decisions)
    return Case(recipe, before.target, before.facts, decided | found, before.chosen)
