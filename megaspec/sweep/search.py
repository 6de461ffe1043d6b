"""A search over points with Optuna; a study is made anew from points.jsonl. Torch-free.

The study lives in memory only: points.jsonl is the one record of what was tried, so a killed sweep can't leave two that
disagree. A sweep that goes on draws on with another stream of the same seed.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import optuna  # the extra `sweep`
except ImportError:
    optuna = None

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import show
from megaspec.sweep.metric import never_has
from megaspec.sweep.points import Checker, Draft
from megaspec.sweep.results import Result
from megaspec.sweep.state import ENDED, HEAD, POINTS, Axis, Point, SweepHead

# Where in the space probes lie that tell whether any point can be run at all.
_PROBES = (0.0, 0.5, 1.0)
# Of the ends of an interval, so that a number between them is a float.
_MOST = 1e300


class OptunaSearch:
    """Asks Optuna for points, and tells it what came of them. RecipeError: Optuna is not installed."""

    def __init__(self, head: SweepHead, folder: Path, checker: Checker, points: Mapping[int, Point]):
        _require_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._head, self._folder, self._checker = head, folder, checker
        _refuse_empty(head.axes, folder)
        self._space = {axis.key: _distribution(axis) for axis in head.axes}
        spec = head.spec
        pruner = optuna.pruners.NopPruner()
        if spec.pruner == "median":
            pruner = optuna.pruners.MedianPruner(n_startup_trials=spec.pruner_points, n_warmup_steps=spec.pruner_steps)
        self._study = optuna.create_study(
            direction=head.direction,
            sampler=optuna.samplers.TPESampler(seed=spec.seed + len(points)),
            pruner=pruner,
        )
        self._trials: dict[int, Any] = {}
        self._reported: dict[int, int] = {}
        self._values: dict[str, float] = {}

    def remember(self, points: Sequence[Point], results: Mapping[int, Result]) -> None:
        """Tells Optuna about points of an earlier life, in the order of their numbers."""
        for point in points:
            self._study.enqueue_trial(self._params(point))
            self._trials[point.number] = self._study.ask(self._space)
            self._values.setdefault(point.fingerprint, math.nan)
            if point.state in ENDED:
                self.tell(point, results[point.number])

    def _params(self, point: Point) -> dict[str, Any]:
        """What was asked for at a point. RecipeError: points.jsonl says what the space of sweep.json has not."""
        params = point.params or {}
        for key, distribution in self._space.items():
            value = params.get(key)
            if isinstance(distribution, optuna.distributions.CategoricalDistribution):
                is_drawn = value in distribution.choices
            else:
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_drawn = is_number and distribution.low <= value <= distribution.high
            if not is_drawn:
                raise _damaged(self._folder / POINTS, f"point {point.number} has {key}={show(value)}")
        return {key: params[key] for key in self._space}

    def next(self) -> Point | None:
        """Another point: to run, or one that is settled since no rule allows it or an earlier one is the same."""
        number = len(self._trials) + 1
        if number > self._head.spec.trials:
            return None
        trial = self._trials[number] = self._study.ask(self._space)
        overrides = tuple(_word(axis, trial.params[axis.key]) for axis in self._head.axes)
        made = self._checker.draft(self._head.plain, overrides)
        count = self._head.spec.trials
        point = made.point(number, count=count, name=self._head.name, folder=self._folder)
        point = point.model_copy(update={"params": dict(trial.params)})
        reasons = [str(problem) for problem in made.problems]
        if made.recipe is not None and (why := never_has(self._head.metric, made.recipe)):
            reasons.append(why)
        if reasons:
            point = point.to("invalid", reason="; ".join(reasons))
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif made.fingerprint in self._values:
            point = point.to("repeated", reason="an earlier point is the same")
            self._tell_value(trial, self._values[made.fingerprint])
        else:
            self._values[made.fingerprint] = math.nan
        return point

    def tell(self, point: Point, result: Result) -> None:
        """How a point ended: with a number, stopped early, or without one."""
        trial, value = self._trials[point.number], result.metric(self._head.metric)
        self._report(point, result)
        if point.state == "pruned":
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif point.state == "repeated":
            self._tell_value(trial, self._values.get(point.fingerprint, math.nan))
        else:
            done = value if point.state == "done" and value is not None else math.nan
            if point.state != "invalid":
                self._values[point.fingerprint] = done
            self._tell_value(trial, done)

    def is_hopeless(self, point: Point, result: Result) -> bool:
        """Whether a point is worse at its last step than the median of those that are done."""
        return self._report(point, result) and self._trials[point.number].should_prune()

    def _report(self, point: Point, result: Result) -> bool:
        """Tells the steps that Optuna doesn't know. -> whether there was any."""
        curve, known = result.curve(self._head.metric), self._reported.get(point.number, 0)
        new = [step for step in sorted(curve) if step > known and math.isfinite(curve[step])]
        for step in new:
            self._trials[point.number].report(curve[step], step)
            self._reported[point.number] = step
        return bool(new)

    def _tell_value(self, trial: Any, value: float) -> None:
        if math.isfinite(value):
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)


def probe(axes: Sequence[Axis], plain: Sequence[str], checker: Checker) -> list[Draft]:
    """Drafts from the ends and the middle of the space. RecipeError: none can be run, or Optuna is not installed."""
    _require_optuna()
    drafts = []
    for share in _PROBES:
        overrides = tuple(_word(axis, _value_at(axis, share)) for axis in axes)
        drafts.append(checker.draft(plain, overrides))
    if all(one.problems for one in drafts):
        raise RecipeError(drafts[1].problems)
    return [one for one in drafts if not one.problems]


def _require_optuna() -> None:
    if optuna is None:
        text = "sweep.kind=optuna needs Optuna: pip install 'megaspec[sweep]', or set sweep.kind=grid"
        raise RecipeError([Problem("sweep.kind", text, code="sweep.optuna")])


def _refuse_empty(axes: Sequence[Axis], folder: Path) -> None:
    """RecipeError: there is nothing to draw from. The command line can't say so, a file can."""
    for axis in axes:
        low, high = axis.bounds or (0, 1)
        has_values = axis.words or axis.bounds
        if not has_values or not -_MOST < low < high < _MOST or (axis.bounds and axis.is_log and low <= 0):
            raise _damaged(folder / HEAD, f"{axis.key} has neither words nor an interval to draw from")


def _damaged(path: Path, what: str) -> RecipeError:
    return RecipeError([Problem("", f"{path} is damaged: {what}", code="sweep-damaged")])


def _value_at(axis: Axis, share: float) -> Any:
    if axis.bounds is None:
        index = round(share * (len(axis.words) - 1))
        return index if axis.is_range else axis.words[index]
    low, high = axis.bounds
    value = low * (high / low) ** share if axis.is_log else low + (high - low) * share
    return round(value) if isinstance(low, int) else value


def _distribution(axis: Axis) -> Any:
    """How Optuna draws a key: a number of an interval, the index of a range, or one of the words."""
    if axis.bounds is None:
        if axis.is_range:
            return optuna.distributions.IntDistribution(0, len(axis.words) - 1)
        return optuna.distributions.CategoricalDistribution(axis.words)
    low, high = axis.bounds
    if isinstance(low, int) and isinstance(high, int):
        return optuna.distributions.IntDistribution(low, high, log=axis.is_log)
    return optuna.distributions.FloatDistribution(low, high, log=axis.is_log)


def _word(axis: Axis, value: Any) -> str:
    """The override of a drawn value."""
    if axis.bounds is not None:
        return f"{axis.key}={value:.6g}" if isinstance(value, float) else f"{axis.key}={value}"
    return axis.words[value] if axis.is_range else str(value)
