"""The number that points are compared by: which one, whether a point comes to have it, what stands in for it. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.recipe import Recipe
from megaspec.sweep.points import CheckedPoint
from megaspec.sweep.results import RunResult
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import Point, SweepHead

Metric = Literal["loss", "valid_loss", "tokens_per_second"]
METRICS: tuple[Metric, ...] = ("loss", "valid_loss", "tokens_per_second")
# Reasons that a refusal names.
_SHOWN = 5


def never_has(metric: str, recipe: Recipe) -> str:
    """Why a run of this recipe never comes to have a metric, and the way out; "" where it does.

    The last step is evaluated whatever train.eval_every is, unless it is 0.
    """
    if metric != "valid_loss" or recipe.train.eval_every > 0:
        return ""
    what = "train.eval_every=0 never evaluates"
    return f"sweep.metric={metric}: {what}; set train.eval_every={recipe.train.steps}, or sweep.metric=loss"


def choose_metric(spec: SweepSpec, checked: Sequence[CheckedPoint]) -> Metric:
    """What points are compared by. RecipeError: some of them never have what was asked for."""
    asked: Metric = "valid_loss" if spec.metric == AUTO else spec.metric
    points_by_reason: dict[str, list[CheckedPoint]] = {}
    for point in checked:
        if point.recipe is None:
            continue
        reason = never_has(asked, point.recipe)
        if reason:
            points_by_reason.setdefault(reason, []).append(point)
    if not points_by_reason:
        return asked
    # every run has a training loss
    if spec.metric == AUTO:
        return "loss"
    problems = []
    for reason, points in points_by_reason.items():
        text = reason
        if len(points) < len(checked):
            text = f"{len(points)} points, such as ({' '.join(points[0].overrides)}): {reason}"
        problems.append(Problem("sweep.metric", text, COMMAND_LINE, "sweep.metric"))
    raise RecipeError(problems[:_SHOWN])


def choose_direction(spec: SweepSpec, metric: Metric) -> Literal["minimize", "maximize"]:
    """What is better."""
    if spec.direction == AUTO:
        return natural_direction(metric)
    return spec.direction


def natural_direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """Less loss, more tokens per second."""
    if metric == "tokens_per_second":
        return "maximize"
    return "minimize"


@dataclass(frozen=True)
class Shown:
    """What a table and a page compare points by."""

    metric: Metric
    direction: Literal["minimize", "maximize"]
    note: str = ""
    """Why that is not the metric of the sweep."""


def shown_metric(head: SweepHead, points: Iterable[Point], results: Mapping[int, RunResult]) -> Shown:
    """The metric of a sweep; where none of the points that are done has it, another one that they have."""
    done = [results[point.number] for point in points if point.state == "done"]
    if any(has_value(result, head.metric) for result in done):
        return Shown(head.metric, head.direction)
    for metric in METRICS:
        if any(has_value(result, metric) for result in done):
            note = f"no point has a value of sweep.metric={head.metric}: compared by {metric} instead"
            return Shown(metric, natural_direction(metric), note)
    return Shown(head.metric, head.direction)


def has_value(result: RunResult, metric: str) -> bool:
    """Whether a run has come to a finite value."""
    value = result.metric(metric)
    return value is not None and math.isfinite(value)
