"""Traces in tables that are readable on 80 columns, and as plain data."""

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
    return {
        "rank": trace.rank,
        "stage": trace.stage,
        "micro_batches_traced": trace.micro_batches,
        "seconds": round(trace.seconds, 1),
        "parameters": {name: list(shape) for name, shape in trace.parameters.items()},
        "memory": {**trace.memory, "total": sum(trace.memory.values()), "at": trace.peak_at},
        "collectives": [
            {"kind": call.kind, "ranks": list(call.ranks), "bytes": call.bytes, "times": times}
            for call, times in trace.calls.items()
        ],
        "compared": [
            {"what": row.what, "unit": row.unit, "plan": row.planned, "trace": row.traced, "agrees": row.agrees}
            for row in compared(spec, trace)
        ],
    }


def _print_trace(spec: Spec, trace: Trace, console: Console) -> bool:
    stage = f" (pp {trace.stage})" if spec.parallelism.pp > 1 else ""
    took = f"{trace.micro_batches} micro batches traced in {trace.seconds:.0f} s"
    console.print(f"\n[bold]Rank {trace.rank}{stage}, traced[/]: {took}")
    console.print(f"most memory at {trace.peak_at}", highlight=False)
    rows = compared(spec, trace)
    _print_rows(rows, console)
    _print_calls(trace, console)
    _print_shapes(trace, console)
    return all(row.agrees for row in rows)


def _print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "plan", "trace", "difference"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in rows:
        if row.planned or row.traced:
            difference = f"{(row.traced - row.planned) / row.planned:+.2%}" if row.planned else "not planned"
            words = difference if row.traced != row.planned else ""
            table.add_row(escape(row.what), _number(row.planned, row), _number(row.traced, row), words)
    console.print(table)
    wrong = [row.what for row in rows if not row.agrees]
    console.print(f"DIFFERENT: {', '.join(map(escape, wrong))}" if wrong else "plan and trace agree", highlight=False)


def _number(number: int, row: Row) -> str:
    return bytes_in_words(number) if row.unit == "bytes" and row.tolerance != 0.0 else f"{number:,}"


def _print_calls(trace: Trace, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("collective", "ranks", "bytes", "times"):
        table.add_column(heading, justify="right" if heading in ("bytes", "times") else "left", overflow="fold")
    for call, times in sorted(trace.calls.items(), key=lambda one: -one[0].bytes * one[1]):
        first = ", ".join(map(str, call.ranks[:3])) + (" ..." if len(call.ranks) > 3 else "")
        table.add_row(call.kind, f"{len(call.ranks)}: {first}", f"{call.bytes:,}", f"{times:,}")
    if trace.calls:
        console.print(table)


def _print_shapes(trace: Trace, console: Console) -> None:
    """Layers that are alike in one line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameter")
    table.add_column("shape here")
    alike: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in trace.parameters.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        alike[kind, shape] = alike.get((kind, shape), 0) + 1
    for (kind, shape), count in alike.items():
        table.add_row(escape(kind) + (f" ({count})" if count > 1 else ""), " x ".join(map(str, shape)))
    console.print(table)
