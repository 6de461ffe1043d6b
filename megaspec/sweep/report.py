"""The table of results that the terminal shows."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from megaspec.core.errors import printable
from megaspec.core.terminal import escape, terminal
from megaspec.sweep.driver import SweepTable
from megaspec.sweep.metric import METRICS, Metric, Shown, shown_metric
from megaspec.sweep.page import values_of
from megaspec.sweep.results import RunResult, is_better
from megaspec.sweep.state import PAGE, Point

# Points that a table on the terminal shows; the page has all.
_MOST_ROWS = 60
# Failed points whose reason it tells.
MOST_REASONS = 10


def print_results(table: SweepTable) -> None:
    """The table of results, the best point first."""
    head = table.head
    console = terminal()
    results = table.results()
    shown = shown_metric(head, table.points.values(), results)
    best = _best(table, results, shown)
    console.print(_printed(table, results, best))
    if len(table.points) > _MOST_ROWS:
        console.print(f"... and {len(table.points) - _MOST_ROWS} points more")
    _print_failed(table, console)
    _print_passed_over(results, console)
    if shown.note:
        console.print(escape(shown.note), soft_wrap=True)
    if best is not None:
        run = escape(str(table.folder.run(best)))
        console.print(f"best {shown.metric}: point {best.number}, {run}", soft_wrap=True)
    console.print(f"page: {escape(str(table.folder.path / PAGE))}", soft_wrap=True)
    if head.state == "interrupted":
        console.print(f"goes on with: megaspec sweep resume {escape(str(table.folder.path))}", soft_wrap=True)


def _printed(table: SweepTable, results: Mapping[int, RunResult], best: Point | None) -> Table:
    """A row for each point, with the values that only it has, its numbers and its state; the best in bold."""
    printed = Table(box=None, pad_edge=False, header_style="bold")
    keys = [axis.key for axis in table.head.axes]
    for title in ("#", *keys, "loss", "valid loss", "tokens/s", "steps"):
        printed.add_column(escape(title), justify="right", overflow="fold")
    printed.add_column("state", justify="left", overflow="fold")
    for number, point in list(table.points.items())[:_MOST_ROWS]:
        result = results[number]
        values = values_of(point)
        cells = [str(number)]
        cells += [values.get(key, "") for key in keys]
        cells += [_metric(result, metric) for metric in METRICS]
        cells += [_steps(result), _state(point)]
        style = "bold" if point is best else None
        printed.add_row(*[escape(printable(cell)) for cell in cells], style=style)
    return printed


def _metric(result: RunResult, metric: Metric) -> str:
    """A number of a run. A run that ended without evaluating says so, since an empty cell would look like a loss that
    is still to come."""
    value = result.metric(metric)
    if value is None and metric == "valid_loss" and result.is_done:
        return "not evaluated"
    return _number(value)


def _steps(result: RunResult) -> str:
    """Steps that are done, of how many; "" for a run that has not started."""
    if not result.steps:
        return ""
    return f"{result.step}/{result.steps}"


def _state(point: Point) -> str:
    if point.state == "failed":
        return f"{point.state} ({point.code})"
    return point.state


def _best(table: SweepTable, results: Mapping[int, RunResult], shown: Shown) -> Point | None:
    """The first point with the best value among those that are done; None: none of them has a value."""
    best: Point | None = None
    best_value: float | None = None
    for number, point in table.points.items():
        value = results[number].metric(shown.metric)
        if point.state != "done" or value is None:
            continue
        if best_value is None or is_better(value, best_value, shown.direction):
            best = point
            best_value = value
    return best


def _print_failed(table: SweepTable, console: Console) -> None:
    failed = [point for point in table.points.values() if point.state == "failed"]
    for point in failed[:MOST_REASONS]:
        text = f"point {point.number} failed: {point.reason}; its log: {table.folder.log(point)}"
        console.print(escape(text), soft_wrap=True)
    if len(failed) > MOST_REASONS:
        console.print(f"... and {len(failed) - MOST_REASONS} more that failed")


def _print_passed_over(results: Mapping[int, RunResult], console: Console) -> None:
    """Lines of metrics.jsonl files that were no events of a run."""
    numbers = [number for number, result in results.items() if result.passed_over]
    for number in numbers[:MOST_REASONS]:
        result = results[number]
        count = "1 line"
        if result.passed_over > 1:
            count = f"{result.passed_over:,} lines"
        text = f"point {number}: {count} passed over, the first {result.first_passed_over}"
        console.print(printable(text), soft_wrap=True, markup=False)
    if len(numbers) > MOST_REASONS:
        console.print(f"... and in {len(numbers) - MOST_REASONS} points more")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.5g}"
