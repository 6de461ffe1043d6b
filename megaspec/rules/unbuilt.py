"""What the language can say and no runtime code reads yet: it can be planned, and is refused by name before a run.

The list only ever shrinks. A test holds it equal to the fields that a run leaves unread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspec.core.errors import Problem
from megaspec.core.problems import origin_of, show, value_at
from megaspec.recipe import Recipe


@dataclass(frozen=True)
class Unbuilt:
    """A feature that can be planned only."""

    feature: str
    switch: str
    """The dotted path that turns it on, with any other value than `off`."""
    off: Any
    fields: tuple[str, ...]
    """Every path that belongs to it, with what lies below."""


_LATENT = tuple(f"model.attention.{name}" for name in ("q_rank", "kv_rank", "d_nope", "d_rope", "d_value"))
UNBUILT: tuple[Unbuilt, ...] = (Unbuilt("latent attention", "model.attention.kind", "gqa", _LATENT),)


def feature_of(switch: str) -> str:
    """What a path that UNBUILT lists turns on, in words."""
    return next(one.feature for one in UNBUILT if one.switch == switch)


def unbuilt_problems(recipe: Recipe, origins: Mapping[str, str] | None = None) -> list[Problem]:
    """What a filled recipe asks for that can be planned but not trained."""
    content = recipe.model_dump(mode="json")
    problems = []
    for one in UNBUILT:
        value = value_at(content, one.switch)
        if value is None or value == one.off:
            continue
        shown = show(value)
        if isinstance(value, dict):
            shown = "{...}"
        text = f"{one.switch}={shown}: {one.feature} can be planned, not trained; set {one.switch}={show(one.off)}"
        problems.append(Problem(one.switch, text, origin_of(origins or {}, one.switch), "unbuilt"))
    return problems
