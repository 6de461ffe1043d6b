"""Traces in tables that are readable on 80 columns, and as plain data."""

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megaspec.core.terminal import escape
from megaspec.core.units import bytes_in_words
from megaspec.spec import Spec
from megaspec.verify.trace import Trace
from megaspec.verify.trace_compare import Row, compared


def print_traces(spec: Spec, traces: Sequence[Trace], console: Console) -> bool:
    """Each rank's parameters, memory and collectives, and where `plan` says something else. -> False if it does."""
    agree = [_print_trace(spec, trace, console) for trace in traces]
    return all(agree)


def trace_as_json(spec: Spec, trace: Trace) -> dict[str, Any]:
    """Everything, in the order of `print_traces`."""
    collectives = []
    for call, times in trace.calls.items():
        collectives.append({"kind": call.kind, "ranks": list(call.ranks), "bytes": call.bytes, "times": times})
    rows = []
    for row in compared(spec, trace):
        rows.append(
            {"what": row.what, "unit": row.unit, "plan": row.planned, "trace": row.traced, "agrees": row.agrees}
        )
    return {
        "rank": trace.rank,
        "stage": trace.stage,
        "micro_batches_traced": trace.micro_batches,
        "seconds": round(trace.seconds, 1),
        "parameters": {name: list(shape) for name, shape in trace.parameters.items()},
        "memory": {**trace.memory, "total": sum(trace.memory.values()), "at": trace.peak_at},
        "collectives": collectives,
        "compared": rows,
    }


def _print_trace(spec: Spec, trace: Trace, console: Console) -> bool:
    rank = f"Rank {trace.rank}"
    if spec.parallelism.pp > 1:
        rank += f" (pp {trace.stage})"
    took = f"{trace.micro_batches} micro batches traced in {trace.seconds:.0f} s"
    console.print(f"\n[bold]{rank}, traced[/]: {took}")
    console.print(f"most memory at {trace.peak_at}", highlight=False)
    rows = compared(spec, trace)
    _print_rows(rows, console)
    _print_calls(trace, console)
    _print_shapes(trace, console)
    return all(row.agrees for row in rows)


def _print_rows(rows: Sequence[Row], console: Console) -> None:
    table = _table()
    table.add_column("", overflow="fold")
    for heading in ("plan", "trace", "difference"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        if row.planned or row.traced:
            table.add_row(escape(row.what), _number(row.planned, row), _number(row.traced, row), _difference(row))
    console.print(table)
    different = [escape(row.what) for row in rows if not row.agrees]
    if different:
        console.print(f"DIFFERENT: {', '.join(different)}", highlight=False)
    else:
        console.print("plan and trace agree", highlight=False)


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="bold")


def _difference(row: Row) -> str:
    """`+1.23%` of the plan; "" where there is none."""
    if row.traced == row.planned:
        return ""
    if not row.planned:
        return "not planned"
    return f"{(row.traced - row.planned) / row.planned:+.2%}"


def _number(number: int, row: Row) -> str:
    """Bytes in words but where they have to be equal."""
    if row.unit == "bytes" and row.tolerance != 0.0:
        return bytes_in_words(number)
    return f"{number:,}"


def _print_calls(trace: Trace, console: Console) -> None:
    """Those that send most come first."""
    table = _table()
    table.add_column("collective", overflow="fold")
    table.add_column("ranks", overflow="fold")
    table.add_column("bytes", justify="right", overflow="fold")
    table.add_column("times", justify="right", overflow="fold")
    for call, times in sorted(trace.calls.items(), key=lambda counted: -counted[0].bytes * counted[1]):
        first = ", ".join(map(str, call.ranks[:3]))
        if len(call.ranks) > 3:
            first += " ..."
        table.add_row(call.kind, f"{len(call.ranks)}: {first}", f"{call.bytes:,}", f"{times:,}")
    if trace.calls:
        console.print(table)


def _print_shapes(trace: Trace, console: Console) -> None:
    """Layers that are alike in one line."""
    table = _table()
    table.add_column("parameter")
    table.add_column("shape here")
    alike: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in trace.parameters.items():
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)  # numbers between dots: of layers, of experts
        alike[kind, shape] = alike.get((kind, shape), 0) + 1
    for (kind, shape), count in alike.items():
        words = escape(kind)
        if count > 1:
            words += f" ({count})"
        table.add_row(words, " x ".join(map(str, shape)))
    console.print(table)
