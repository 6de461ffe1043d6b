"""The page of several runs beside each other. Torch-free."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from megaspec.core.units import GIB
from megaspec.report.chart import Chart, Curve
from megaspec.report.folder import RunFolder
from megaspec.report.html import Child, Html, card, element, page, table
from megaspec.report.run_page import evaluation_curves, note, state_of
from megaspec.report.words import UNKNOWN, beside_plan, in_bytes, in_figures, in_percent, in_seconds, in_words

MOST_DIFFERENCES = 300
# They differ between any two runs and say nothing about them.
_OWN = ("name", "run_dir", "data_fingerprint")


def comparison_page(runs: Sequence[RunFolder]) -> str:
    """The page of runs that have been read."""
    names = names_of(runs)
    titles = ", ".join(names)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    about = element("div", f"{len(runs)} runs · written {written} UTC", class_="soft")
    troubles = []
    for name, run in zip(names, runs, strict=True):
        troubles += [f"{name}: {trouble}" for trouble in run.troubles]
    return page(
        f"{titles} · runs",
        element("h1", titles),
        about,
        note(troubles),
        _table(names, runs),
        element("div", *_charts(names, runs), class_="charts"),
        _differences(names, runs),
    )


def names_of(runs: Sequence[RunFolder]) -> list[str]:
    """What runs are called on the page: those that share a name by their folders, too."""
    names = [run.name for run in runs]
    found = []
    for run, name in zip(runs, names, strict=True):
        if names.count(name) > 1:
            name = f"{name} ({run.path})"
        found.append(name)
    return found


def _table(names: Sequence[str], runs: Sequence[RunFolder]) -> Html:
    rows: list[list[Child]] = []
    for name, run in zip(names, runs, strict=True):
        history = run.history
        steps = history.steps
        state, css = state_of(run)
        last = steps.steps[-1] if steps.steps else 0
        evaluated = evaluation_curves(run).get("evaluation", [])
        speed = steps.usual("tokens_per_second")
        rows.append(
            [
                name,
                element("span", state, class_=f"state {css}"),
                f"{last:,} / {history.n_steps:,}",
                in_figures(steps.last("loss")),
                in_figures(evaluated[-1][1] if evaluated else None),
                in_figures(min((value for _, value in evaluated), default=None)),
                in_figures(speed),
                beside_plan(speed, run.planned_tokens_per_second),
                in_percent(steps.usual("mfu_causal")),
                in_seconds(steps.usual("seconds")),
                in_bytes(steps.most("memory_bytes")),
                run.n_restarts,
                history.count["slow"] + history.count["alert"] + history.count["hardware"],
                history.count["skip"] + history.count["rollback"],
            ]
        )
    titles = ["run:", "state:", "steps", "loss", "evaluation", "best evaluation", "tokens/s", "beside plan", "MFU"]
    titles += ["step", "memory", "started again", "stragglers, alerts", "skips, roll backs"]
    return card("Runs", table(titles, rows))


def _charts(names: Sequence[str], runs: Sequence[RunFolder]) -> list[Html]:
    evaluated = [evaluation_curves(run).get("evaluation", []) for run in runs]
    charts = [_of_steps("Training loss, nats", "loss", names, runs, in_figures)]
    if any(evaluated):
        curves = [Curve(name, points, has_dots=True) for name, points in zip(names, evaluated, strict=True)]
        charts.append(card("Evaluation loss, nats", Chart(curves, in_figures).drawn()))
    charts.append(_of_steps("Gradient norm", "grad_norm", names, runs, in_figures))
    speeds = "Tokens per second, all ranks"
    charts.append(_of_steps(speeds, "tokens_per_second", names, runs, in_figures, from_zero=True))
    if any(run.history.steps.usual("mfu_causal") is not None for run in runs):
        charts.append(_of_steps("Model FLOPs utilisation", "mfu_causal", names, runs, in_percent, from_zero=True))
    charts.append(_of_steps("Memory of rank 0", "memory_bytes", names, runs, in_bytes, from_zero=True, unit=GIB))
    return charts


def _of_steps(
    title: str, key: str, names: Sequence[str], runs: Sequence[RunFolder], show: Callable[[float], str], **axis: Any
) -> Html:
    """A number of steps, a curve for each run."""
    curves = [Curve(name, run.history.steps.curve(key)) for name, run in zip(names, runs, strict=True)]
    return card(title, Chart(curves, show, **axis).drawn())


def _differences(names: Sequence[str], runs: Sequence[RunFolder]) -> Html:
    """Settings that are not the same in all runs."""
    settings = [run.settings() for run in runs]
    keys: dict[str, None] = {}
    for one in settings:
        keys |= dict.fromkeys(one)
    rows: list[list[Child]] = []
    for key in keys:
        if key in _OWN:
            continue
        values = [in_words(one[key]) if key in one else "" for one in settings]
        if len(set(values)) > 1:
            rows.append([key, *[value or UNKNOWN for value in values]])
    if not rows:
        return card("Settings that differ", element("p", "none", class_="soft"))
    told = None
    if len(rows) > MOST_DIFFERENCES:
        told = element("p", f"and {len(rows) - MOST_DIFFERENCES:,} more", class_="soft")
    whole = table(["setting", *names], rows[:MOST_DIFFERENCES], words=1 + len(names))
    return card("Settings that differ", whole, told)
