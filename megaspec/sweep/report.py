"""The table of results that the terminal shows."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table as Printed

from megaspec.core.errors import printable
from megaspec.core.terminal import escape, terminal
from megaspec.sweep.driver import Table
from megaspec.sweep.metric import Shown, shown_metric
from megaspec.sweep.page import values_of
from megaspec.sweep.results import Result, is_better
from megaspec.sweep.state import PAGE, Point

# Points that a table on the terminal shows; the page has all.
_MOST_ROWS = 60
# Failed points whose reason it tells.
MOST_REASONS = 10


def print_results(table: Table) -> None:
    """The table of results, the best point first."""
    head, console = table.head, terminal()
    results = results_of(table)
    printed = Printed(box=None, pad_edge=False, header_style="bold")
    keys = [axis.key for axis in head.axes]
    for title in ("#", *keys, "loss", "valid loss", "tokens/s", "steps", "state"):
        printed.add_column(escape(title), justify="left" if title == "state" else "right", overflow="fold")
    shown = shown_metric(head, table.points.values(), results)
    best = _best(table, results, shown)
    for number, point in list(table.points.items())[:_MOST_ROWS]:
        result, values = results[number], values_of(point)
        state = f"{point.state} ({point.code})" if point.state == "failed" else point.state
        cells = [str(number), *(values.get(key, "") for key in keys)]
        cells += [_number(result.metric(name)) for name in ("loss", "valid_loss", "tokens_per_second")]
        steps = f"{result.step}/{result.steps}" if result.steps else ""
        shown_cells = [escape(printable(cell)) for cell in (*cells, steps, state)]
        printed.add_row(*shown_cells, style="bold" if point is best else None)
    console.print(printed)
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


def _best(table: Table, results: Mapping[int, Result], shown: Shown) -> Point | None:
    best: Point | None = None
    for number, point in table.points.items():
        value = results[number].metric(shown.metric)
        if point.state == "done" and value is not None:
            other = results[best.number].metric(shown.metric) if best is not None else None
            if other is None or is_better(value, other, shown.direction):
                best = point
    return best


def _print_failed(table: Table, console: Console) -> None:
    failed = [point for point in table.points.values() if point.state == "failed"]
    for point in failed[:MOST_REASONS]:
        text = f"point {point.number} failed: {point.reason}; its log: {table.folder.log(point)}"
        console.print(escape(text), soft_wrap=True)
    if len(failed) > MOST_REASONS:
        console.print(f"... and {len(failed) - MOST_REASONS} more that failed")


def _print_passed_over(results: Mapping[int, Result], console: Console) -> None:
    """Lines of metrics.jsonl files that were no events of a run."""
    passed_over = [(number, result) for number, result in results.items() if result.passed_over]
    for number, result in passed_over[:MOST_REASONS]:
        count = "1 line" if result.passed_over == 1 else f"{result.passed_over:,} lines"
        text = f"point {number}: {count} passed over, the first {result.first_passed_over}"
        console.print(printable(text), soft_wrap=True, markup=False)
    if len(passed_over) > MOST_REASONS:
        console.print(f"... and in {len(passed_over) - MOST_REASONS} points more")


def results_of(table: Table) -> dict[int, Result]:
    """What every point has come to."""
    return {number: table.follower(point).read() for number, point in table.points.items()}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
