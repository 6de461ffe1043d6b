"""The layouts that a run may take when devices or nodes are lost, a line for each: what it needs and costs."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megaspec.core.axes import DENSE_AXES
from megaspec.core.frozen import Frozen
from megaspec.core.terminal import escape
from megaspec.core.units import bytes_in_words, seconds_in_words
from megaspec.plan.plan import Plan

SUPERVISED = ("Layouts of --supervise", "the first that fits the devices that are left")
"""Heading of a table, and what of it is taken."""
ON_FEWER = ("Layouts of launcher.min_nodes", "the first for which a start of the job is given nodes enough")


class PlannedLayout(Frozen):
    """A layout of launcher.layouts, planned for as many GPUs as it takes."""

    words: str
    """Its words, or that it is the recipe's own; for fewer nodes of a job, how many."""
    ranks: int
    """GPUs that it takes; on the CPU, ranks."""
    axes: dict[str, int]
    """Degrees above 1."""
    micro_batch: int
    accumulation: int
    """Micro batches that a rank adds up in a step: the global batch stays."""
    memory: int
    """Bytes of the fullest rank."""
    fits: bool | None
    """None where that is not known."""
    seconds: float | None
    """Of a step, as predicted; None where no speeds are known."""


def planned_layout(words: str, plan: Plan) -> PlannedLayout:
    """The line of a layout."""
    axes = {}
    for axis in (*DENSE_AXES, "ep", "etp"):
        if plan.mesh[axis] > 1:
            axes[axis] = plan.mesh[axis]
    seconds = None
    if plan.step_time is not None:
        seconds = plan.step_time.seconds
    return PlannedLayout(
        words=words,
        ranks=plan.mesh["world"],
        axes=axes,
        micro_batch=plan.batch["micro_batch"],
        accumulation=plan.batch["accumulation"],
        memory=plan.memory.total,
        fits=plan.memory.fits,
        seconds=seconds,
    )


def print_layouts(
    layouts: Sequence[PlannedLayout], console: Console, *, device: str, heading: tuple[str, str] = SUPERVISED
) -> None:
    """A table of them, in the order in which they are tried."""
    console.print(f"\n[bold]{heading[0]}[/]: {heading[1]}")
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(justify="right")
    table.add_column()
    table.add_column(overflow="fold")
    unit = "GPUs" if device == "cuda" else "ranks"
    headings = (unit, "micro", "accumulation", "memory", "a step", "layout")
    table.add_row(*(f"[bold]{heading}" for heading in headings))
    for layout in layouts:
        memory = bytes_in_words(layout.memory)
        if layout.fits is False:
            memory += ", too much"
        seconds = ""
        if layout.seconds is not None:
            seconds = seconds_in_words(layout.seconds)
        degrees = " · ".join(f"{axis} {size}" for axis, size in layout.axes.items()) or "one rank"
        numbers = (f"{layout.ranks:,}", f"{layout.micro_batch:,}", f"{layout.accumulation:,}")
        table.add_row(*numbers, escape(memory), escape(seconds), escape(f"{degrees}: {layout.words}"))
    console.print(table)
