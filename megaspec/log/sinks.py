"""Where events go. A sink that fails is warned about once and never stops a training."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megaspec.core.errors import printable
from megaspec.core.frozen import Frozen
from megaspec.log.console import ConsoleSink
from megaspec.log.events import Emit, Event
from megaspec.log.jsonl import JsonlSink
from megaspec.log.spec import LogSpec

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
# What disks, terminals and writers fail with.
FAILURES = (OSError, ValueError, RuntimeError)


class Sink(Protocol):
    """Takes events until it is closed."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def open_metrics(log: LogSpec, run_dir: Path, step: int) -> Sink | None:
    """metrics.jsonl, always."""
    return JsonlSink(run_dir / METRICS, step=step)


def open_console(log: LogSpec, run_dir: Path, step: int) -> Sink | None:
    """The terminal, unless log.console is quiet."""
    return None if log.console == "quiet" else ConsoleSink(every=log.every, live=log.console == "live")


def open_tensorboard(log: LogSpec, run_dir: Path, step: int) -> Sink | None:
    """TensorBoard's files, where log.tensorboard says so."""
    if not log.tensorboard:
        return None
    return import_module("megaspec.log.tensorboard").TensorboardSink(run_dir / TENSORBOARD, step=step)


# Name in warnings -> opener. Events go out in this order: what has to be kept comes before what is shown.
SINKS: dict[str, Callable[[LogSpec, Path, int], Sink | None]] = {
    METRICS: open_metrics,
    "log.console": open_console,
    "log.tensorboard": open_tensorboard,
}


SinkBuilder = Callable[[Any, Path, int], Sink]
"""(an entry of log.sinks, run folder, the step that a run goes on at) -> its sink"""


def nothing_to_check() -> None:
    """Who has the run folder to itself."""


@contextmanager
def open_sinks(
    log: LogSpec,
    run_dir: Path,
    *,
    step: int,
    check: Callable[[], None] = nothing_to_check,
    builders: Mapping[type[Frozen], SinkBuilder] = MappingProxyType({}),
) -> Iterator[Emit]:
    """A function that takes events. `step`: where the run goes on, 0 for a new one.
    `builders`: of the entries of log.sinks.

    A sink that can't be opened, written or closed gets one warning on stderr; training goes on. `check` is called
    before each of these; what it raises, because the folder is another job's now, is raised here: nothing is written.
    """
    sinks: dict[str, Sink] = {}
    warned: set[str] = set()

    def fails(name: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except FAILURES as error:
            if name not in warned:
                warned.add(name)
                print(printable(f"megaspec: {name}: {error}; training goes on"), file=sys.stderr, flush=True)
            return True
        return False

    def open_one(name: str) -> None:
        sink = SINKS[name](log, run_dir, step)
        if sink is not None:
            sinks[name] = sink

    def open_added(name: str, entry: Frozen) -> None:
        sinks[name] = builders[type(entry)](entry, run_dir, step)

    def emit(event: Event) -> None:
        check()
        for name, sink in sinks.items():
            fails(name, lambda sink=sink: sink(event))

    check()
    for name in SINKS:
        fails(name, lambda name=name: open_one(name))
    for number, entry in enumerate(log.sinks):
        name = f"log.sinks.{number}"
        fails(name, lambda name=name, entry=entry: open_added(name, entry))
    try:
        yield emit
    finally:
        check()  # a sink may write when it is closed
        for name, sink in sinks.items():
            fails(name, sink.close)
