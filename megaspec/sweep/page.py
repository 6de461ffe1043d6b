"""index.html of a sweep: one file that needs no network. page.html draws what is put into it here. Torch-free."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaspec.data.files import write_atomically
from megaspec.report.html import LOOK
from megaspec.sweep.metric import METRICS, shown_metric
from megaspec.sweep.results import RunResult
from megaspec.sweep.state import PAGE, Point, SweepHead

_TEMPLATE = Path(__file__).with_name("page.html")
_MARK = "{{data}}"
_LOOK_MARK = "{{look}}"
# Points of a curve that are drawn, and of all curves together, so that a page of many stays small.
MOST_DRAWN, MOST_DRAWN_IN_ALL = 160, 60_000


def write_page(
    folder: Path, head: SweepHead, points: Sequence[Point], results: Mapping[int, RunResult], *, running: bool
) -> None:
    """Writes the page, whole or not at all; one of a sweep that runs loads itself again. WriteError."""
    most = max(8, min(MOST_DRAWN, MOST_DRAWN_IN_ALL // max(1, len(points))))
    shown = shown_metric(head, points, results)
    state = "running" if running else head.state
    n_trials = len(points)
    if head.spec.kind == "optuna":
        n_trials = head.spec.trials
    data = {
        "name": head.name,
        "state": state,
        "metric": shown.metric,
        "direction": shown.direction,
        "note": shown.note,
        "keys": [axis.key for axis in head.axes],
        "plain": list(head.plain),
        "trials": n_trials,
        "updated": time.strftime("%Y-%m-%d %H:%M:%S"),
        "points": [_drawn(point, results[point.number], most) for point in points],
    }
    # a value that holds "</script>" must not end the element that it stands in
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    # the data last, since it may hold any text
    page = _TEMPLATE.read_text(encoding="utf-8").replace(_LOOK_MARK, LOOK).replace(_MARK, text)
    write_atomically(folder / PAGE, [page.encode(errors="replace")])


def values_of(point: Point) -> dict[str, str]:
    """Key -> value of the words that only this point has."""
    values = {}
    for word in point.overrides:
        key, _, value = word.partition("=")
        values[key.lstrip("+")] = value
    return values


def _drawn(point: Point, result: RunResult, most: int) -> dict[str, Any]:
    """What page.html reads of a point."""
    return {
        "n": point.number,
        "folder": point.folder,
        "state": point.state,
        "code": point.code,
        "reason": point.reason,
        "values": values_of(point),
        "metrics": {metric: _finite(result.metric(metric)) for metric in METRICS},
        "step": result.step,
        "steps": result.steps,
        "loss": _curve(result.loss, most),
        "valid_loss": _curve(result.valid_loss, most),
    }


def _curve(values: Mapping[int, float], most: int) -> list[tuple[int, float | None]]:
    """At most so many of the steps, the last among them."""
    if not values:
        return []
    steps = sorted(values)
    stride = math.ceil(len(steps) / most)
    # every stride-th, counted from the last step back, in rising order again
    drawn = steps[::-stride][::-1]
    return [(step, _finite(values[step])) for step in drawn]


def _finite(value: float | None) -> float | None:
    """JSON has no number for nan and inf."""
    if value is None or not math.isfinite(value):
        return None
    return value
