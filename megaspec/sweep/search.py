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
from megaspec.sweep.points import CheckedPoint, Checker
from megaspec.sweep.results import RunResult
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
        self._head = head
        self._folder = folder
        self._checker = checker
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
        """Optuna's trial of each point, by the point's number."""
        self._reported: dict[int, int] = {}
        """The last step of a point that Optuna knows."""
        self._values: dict[str, float] = {}
        """What came of a recipe, by its fingerprint; nan: nothing yet, or no value."""

    def remember(self, points: Sequence[Point], results: Mapping[int, RunResult]) -> None:
        """Tells Optuna about points of an earlier life, in the order of their numbers."""
        for point in points:
            # ask() then gives back the params that were queued, as if it had drawn them
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
        head = self._head
        number = len(self._trials) + 1
        if number > head.spec.trials:
            return None
        trial = self._study.ask(self._space)
        self._trials[number] = trial
        overrides = tuple(_word(axis, trial.params[axis.key]) for axis in head.axes)
        checked = self._checker.check(head.plain, overrides)
        point = checked.point(number, count=head.spec.trials, name=head.name, folder=self._folder)
        point = point.model_copy(update={"params": dict(trial.params)})
        reasons = checked.problem_texts
        if checked.recipe is not None:
            reason = never_has(head.metric, checked.recipe)
            if reason:
                reasons.append(reason)
        if reasons:
            point = point.to("invalid", reason="; ".join(reasons))
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif checked.fingerprint in self._values:
            point = point.to("repeated", reason="an earlier point is the same")
            self._tell_value(trial, self._values[checked.fingerprint])
        else:
            self._values[checked.fingerprint] = math.nan
        return point

    def tell(self, point: Point, result: RunResult) -> None:
        """How a point ended: with a number, stopped early, or without one."""
        trial = self._trials[point.number]
        # Optuna takes the numbers of steps only until a trial is told
        self._report(point, result)
        if point.state == "pruned":
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        if point.state == "repeated":
            self._tell_value(trial, self._values.get(point.fingerprint, math.nan))
            return
        value = math.nan
        if point.state == "done":
            found = result.metric(self._head.metric)
            if found is not None:
                value = found
        if point.state != "invalid":
            self._values[point.fingerprint] = value
        self._tell_value(trial, value)

    def is_hopeless(self, point: Point, result: RunResult) -> bool:
        """Whether a point is worse at its last step than the median of those that are done."""
        return self._report(point, result) and self._trials[point.number].should_prune()

    def _report(self, point: Point, result: RunResult) -> bool:
        """Tells the steps that Optuna doesn't know. -> whether there was any."""
        curve = result.curve(self._head.metric)
        known = self._reported.get(point.number, 0)
        for step in sorted(curve):
            if step > known and math.isfinite(curve[step]):
                self._trials[point.number].report(curve[step], step)
                self._reported[point.number] = step
        return self._reported.get(point.number, 0) > known

    def _tell_value(self, trial: Any, value: float) -> None:
        if math.isfinite(value):
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)


def probe(axes: Sequence[Axis], plain: Sequence[str], checker: Checker) -> list[CheckedPoint]:
    """Points at the ends and the middle of the space. RecipeError: none can be run, or Optuna is not installed."""
    _require_optuna()
    checked = []
    for share in _PROBES:
        overrides = tuple(_word(axis, _value_at(axis, share)) for axis in axes)
        checked.append(checker.check(plain, overrides))
    valid = [point for point in checked if not point.problems]
    if not valid:
        _, middle, _ = checked
        raise RecipeError(middle.problems)
    return valid


def _require_optuna() -> None:
    if optuna is None:
        text = "sweep.kind=optuna needs Optuna: pip install 'megaspec[sweep]', or set sweep.kind=grid"
        raise RecipeError([Problem("sweep.kind", text, code="sweep.optuna")])


def _refuse_empty(axes: Sequence[Axis], folder: Path) -> None:
    """RecipeError: there is nothing to draw from. The command line can't say so, a file can."""
    for axis in axes:
        has_values = bool(axis.words) or axis.bounds is not None
        is_drawable = axis.bounds is None or _is_interval(axis.bounds, is_log=axis.is_log)
        if not has_values or not is_drawable:
            raise _damaged(folder / HEAD, f"{axis.key} has neither words nor an interval to draw from")


def _is_interval(bounds: tuple[float, float], *, is_log: bool) -> bool:
    """Whether a number can be drawn from between two bounds."""
    low, high = bounds
    if is_log and low <= 0:
        return False
    return -_MOST < low < high < _MOST


def _damaged(path: Path, what: str) -> RecipeError:
    return RecipeError([Problem("", f"{path} is damaged: {what}", code="sweep-damaged")])


def _value_at(axis: Axis, share: float) -> Any:
    """What Optuna would draw at a share, from 0 to 1, of the way through an axis."""
    if axis.bounds is None:
        index = round(share * (len(axis.words) - 1))
        if axis.is_range:
            return index
        return axis.words[index]
    low, high = axis.bounds
    value = low + (high - low) * share
    if axis.is_log:
        value = low * (high / low) ** share
    if isinstance(low, int):
        return round(value)
    return value


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
    if axis.bounds is None:
        # of a range its index is drawn, of words one of them
        if axis.is_range:
            return axis.words[value]
        return str(value)
    if isinstance(value, float):
        return f"{axis.key}={value:.6g}"
    return f"{axis.key}={value}"
