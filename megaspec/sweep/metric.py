"""The number that points are compared by: which one, whether a point comes to have it, what stands in for it. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.recipe import Recipe
from megaspec.sweep.points import Draft
from megaspec.sweep.results import Result
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import Point, SweepHead

Metric = Literal["loss", "valid_loss", "tokens_per_second"]
METRICS: tuple[Metric, ...] = ("loss", "valid_loss", "tokens_per_second")
# Reasons that a refusal names.
_SHOWN = 5


def never_has(metric: str, recipe: Recipe) -> str:
    """Why a run of this recipe never comes to have a metric, and the way out; "" where it does.

    The loop evaluates after every train.eval_every-th step, and never for the sake of the end.
    """
    every, steps = recipe.train.eval_every, recipe.train.steps
    if metric != "valid_loss" or 0 < every <= steps:
        return ""
    what = f"train.eval_every={every} with train.steps={steps} never evaluates"
    return f"sweep.metric={metric}: {what}; set train.eval_every from 1 to {steps}, or sweep.metric=loss"


def choose_metric(spec: SweepSpec, drafts: Sequence[Draft]) -> Metric:
    """What points are compared by. RecipeError: some of them never have what was asked for."""
    made = [(one, one.recipe) for one in drafts if one.recipe is not None]
    if spec.metric == AUTO:
        return "loss" if any(never_has("valid_loss", recipe) for _, recipe in made) else "valid_loss"
    without: dict[str, list[Draft]] = {}
    for one, recipe in made:
        if why := never_has(spec.metric, recipe):
            without.setdefault(why, []).append(one)
    lines = [
        why if len(ones) == len(drafts) else f"{len(ones)} points, such as ({' '.join(ones[0].overrides)}): {why}"
        for why, ones in without.items()
    ]
    if lines:
        raise RecipeError([Problem("sweep.metric", line, COMMAND_LINE, "sweep.metric") for line in lines[:_SHOWN]])
    return spec.metric


def choose_direction(spec: SweepSpec, metric: Metric) -> Literal["minimize", "maximize"]:
    """What is better."""
    return natural_direction(metric) if spec.direction == AUTO else spec.direction


def natural_direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """Less loss, more tokens per second."""
    return "maximize" if metric == "tokens_per_second" else "minimize"


@dataclass(frozen=True)
class Shown:
    """What a table and a page compare points by."""

    metric: Metric
    direction: Literal["minimize", "maximize"]
    note: str = ""
    """Why that is not the metric of the sweep."""


def shown_metric(head: SweepHead, points: Iterable[Point], results: Mapping[int, Result]) -> Shown:
    """The metric of a sweep; where none of the points that are done has it, another one that they have."""
    done = [results[point.number] for point in points if point.state == "done"]
    found = [m for m in (head.metric, *METRICS) if any(has_value(result, m) for result in done)]
    if not found or found[0] == head.metric:
        return Shown(head.metric, head.direction)
    note = f"no point has a value of sweep.metric={head.metric}: compared by {found[0]} instead"
    return Shown(found[0], natural_direction(found[0]), note)


def has_value(result: Result, metric: str) -> bool:
    """Whether a run has come to a finite value."""
    value = result.metric(metric)
    return value is not None and math.isfinite(value)
