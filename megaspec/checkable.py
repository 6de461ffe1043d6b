"""What can still be checked of a recipe in which some values are not of their type."""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import typed_problems, value_at
from megaspec.recipe import Recipe

# What stands in for a value that has no default; no rule that reads it is asked.
_STAND_INS: tuple[Any, ...] = (1, 0.5, "x", [1])
# More rounds than a section is deep: taking away what is wrong uncovers what is missing.
_ROUNDS = 12


@dataclass(frozen=True)
class Checkable:
    """A recipe without the values that are wrong."""

    recipe: Recipe
    bad: frozenset[str]
    """Dotted paths whose values, and all below them, say nothing: a default or anything else stands there."""
    origins: Mapping[str, str]


class PartlyError(RecipeError):
    """Values that are not of their type, and what can be checked without them; None: nothing."""

    def __init__(self, problems: list[Problem], checkable: Checkable | None):
        super().__init__(problems)
        self.checkable = checkable


def checkable(content: Mapping[str, Any], origins: Mapping[str, str], bad: Iterable[str]) -> Checkable | None:
    """`bad`: the keys that are known to be wrong. None: too much is."""
    left = deepcopy(dict(content))
    wrong = {_take(left, key) for key in bad}
    # key that is missing -> number of the stand-in that was tried last
    tried: dict[str, int] = {}
    for _ in range(_ROUNDS):
        try:
            return Checkable(Recipe.model_validate_json(json.dumps(left)), frozenset(wrong), origins)
        except ValidationError as error:
            problems = typed_problems(error, model=Recipe, content=left, origins={}, choices={})
        for problem in problems:
            key = problem.key
            if not key:
                continue  # it says how many more there are
            if key.endswith(".kind"):
                # without its kind nothing in a section can be read
                wrong.add(_take(left, key.removesuffix(".kind")))
            elif value_at(left, key) is not None and key not in tried:
                wrong.add(_take(left, key))
            else:
                # missing, perhaps since it was just taken away, and without a default: something has to stand there
                tried[key] = tried.get(key, -1) + 1
                if tried[key] == len(_STAND_INS) or not _put(left, key, _STAND_INS[tried[key]]):
                    return None
                wrong.add(key)
    return None


def _take(content: dict[str, Any], key: str) -> str:
    """Takes a path away, of an entry of a list the list. -> the path that is gone."""
    section, _, name = key.rpartition(".")
    where = value_at(content, section)
    if section and not isinstance(where, dict):
        return _take(content, section)
    where.pop(name, None)
    return key


def _put(content: dict[str, Any], key: str, value: Any) -> bool:
    section, _, name = key.rpartition(".")
    where = value_at(content, section)
    if not isinstance(where, dict):
        return False
    where[name] = value
    return True
