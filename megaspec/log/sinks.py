"""Where events go. A sink that fails is warned about once and never stops a training.

metrics.jsonl, the console and TensorBoard write files of this machine, and do it at once. What a recipe lists under
log.sinks may be a service: each runs in a thread of its own.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megaspec.core.errors import printable
from megaspec.core.frozen import Frozen
from megaspec.log.background import CLOSE_SECONDS, BackgroundSink
from megaspec.log.console import ConsoleSink
from megaspec.log.events import Emit, Event
from megaspec.log.jsonl import METRICS, MOST_WAITING, JsonlSink
from megaspec.log.remote import logged_run
from megaspec.log.spec import LogSpec, MlflowSpec, ReportSpec, TrackioSpec, WandbSpec, WebhookSpec

TENSORBOARD = "tensorboard"
# What disks, terminals and writers fail with.
FAILURES = (OSError, ValueError, RuntimeError)


class Sink(Protocol):
    """Takes events until it is closed."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def open_metrics(log: LogSpec, run_dir: Path, step: int, elsewhere: Path | None) -> Sink | None:
    """metrics.jsonl, always."""
    return JsonlSink(run_dir / METRICS, step=step, elsewhere=elsewhere)


class LateMetrics:
    """metrics.jsonl where it could not be opened when the run began, as on a disk that fails for a moment: each event
    tries again, and brings with it those that have waited. OSError: it can't be opened still."""

    def __init__(self, build: Callable[[], Sink]):
        self._build = build
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._sink: Sink | None = None

    def __call__(self, event: Event) -> None:
        self._waiting.append(event)
        if self._sink is None:
            self._sink = self._build()
        failure = None
        while self._waiting:
            try:
                self._sink(self._waiting.popleft())
            except OSError as error:
                # the sink keeps the line: the order is its own from here on
                failure = error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """OSError: the file was never opened, or as the sink."""
        if self._sink is not None:
            self._sink.close()
        elif self._waiting:
            raise OSError(f"it could not be opened, and {len(self._waiting):,} lines are lost")


def open_console(log: LogSpec, run_dir: Path, step: int, elsewhere: Path | None) -> Sink | None:
    """The terminal, unless log.console is quiet."""
    return None if log.console == "quiet" else ConsoleSink(every=log.every, live=log.console == "live")


def open_tensorboard(log: LogSpec, run_dir: Path, step: int, elsewhere: Path | None) -> Sink | None:
    """TensorBoard's files, where log.tensorboard says so."""
    if not log.tensorboard:
        return None
    return import_module("megaspec.log.tensorboard").TensorboardSink(run_dir / TENSORBOARD, step=step)


# Name in warnings -> opener. Events go out in this order: what has to be kept comes before what is shown.
SINKS: dict[str, Callable[[LogSpec, Path, int, Path | None], Sink | None]] = {
    METRICS: open_metrics,
    "log.console": open_console,
    "log.tensorboard": open_tensorboard,
}


SinkBuilder = Callable[[Any, Path, int], Sink]
"""(an entry of log.sinks, run folder, the step that a run goes on at) -> its sink"""


def open_wandb(spec: WandbSpec, run_dir: Path, step: int) -> Sink:
    """Weights & Biases."""
    return import_module("megaspec.log.wandb").WandbSink(spec, run_dir, step)


def open_mlflow(spec: MlflowSpec, run_dir: Path, step: int) -> Sink:
    """MLflow."""
    return import_module("megaspec.log.mlflow").MlflowSink(spec, run_dir, step)


def open_trackio(spec: TrackioSpec, run_dir: Path, step: int) -> Sink:
    """Trackio."""
    return import_module("megaspec.log.trackio").TrackioSink(spec, run_dir, step)


# By the class of an entry of log.sinks; each imports a package that is optional.
SERVICES: dict[type[Frozen], SinkBuilder] = {
    WandbSpec: open_wandb,
    MlflowSpec: open_mlflow,
    TrackioSpec: open_trackio,
}


def webhook_opener(webhook: WebhookSpec, run_dir: Path) -> Callable[[], Sink]:
    """Opens it later, in its thread. RecipeError: its address is not in the environment."""
    module = import_module("megaspec.log.webhook")
    address = module.address_of(webhook, os.environ)
    return lambda: module.WebhookSink(webhook, run_dir, name=logged_run(run_dir).name, address=address)


def nothing_to_check() -> None:
    """Who has the run folder to itself."""


def usual_patience() -> float:
    """Who was not asked to stop."""
    return CLOSE_SECONDS


@contextmanager
def open_sinks(
    log: LogSpec,
    run_dir: Path,
    *,
    step: int,
    elsewhere: Path | None = None,
    check: Callable[[], None] = nothing_to_check,
    builders: Mapping[type[Frozen], SinkBuilder] = MappingProxyType(SERVICES),
    close_seconds: Callable[[], float] = usual_patience,
) -> Iterator[Emit]:
    """A function that takes events. `step`: where the run goes on, 0 for a new one. `elsewhere`: a file on another
    disk for lines of metrics.jsonl that the run folder's has no room for.
    `builders`: of the entries of log.sinks, and of log.report. `close_seconds`: how long, at the end, each of these may
    still send.

    A sink that can't be opened or written gets one warning on stderr, and another one if what it lost at the end is
    something else; training goes on. `check` is called before each of these; what it raises, because the folder is
    another job's now, is raised here: nothing is written.
    """
    sinks: dict[str, Sink] = {}
    warned: dict[str, str] = {}

    def tell(name: str, text: str) -> None:
        print(printable(f"megaspec: {name}: {text}"), file=sys.stderr, flush=True)

    def tries(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except FAILURES as error:
            if name not in warned:
                warned[name] = str(error)
                tell(name, f"{error}; training goes on")

    def closes(name: str, sink: Sink) -> None:
        try:
            sink.close()
        except FAILURES as error:
            if warned.get(name) != str(error):
                tell(name, str(error))

    def open_one(name: str) -> None:
        try:
            sink = SINKS[name](log, run_dir, step, elsewhere)
        except OSError:
            if name == METRICS:
                sinks[name] = LateMetrics(partial(JsonlSink, run_dir / METRICS, step=step, elsewhere=elsewhere))
            raise
        if sink is not None:
            sinks[name] = sink

    def open_listed(name: str, entry: Frozen) -> None:
        build = partial(builders[type(entry)], entry, run_dir, step)
        sinks[name] = BackgroundSink(build, close_seconds=close_seconds)

    def emit(event: Event) -> None:
        check()
        for name, sink in sinks.items():
            tries(name, lambda sink=sink: sink(event))

    check()
    for name in SINKS:
        tries(name, lambda name=name: open_one(name))
    for number, entry in enumerate(log.sinks):
        open_listed(f"log.sinks.{number}", entry)
    if log.report is not None:
        open_report = partial(builders[ReportSpec], log.report, run_dir, step)
        sinks["log.report"] = BackgroundSink(open_report, close_seconds=close_seconds)
    if log.webhook is not None:
        sinks["log.webhook"] = BackgroundSink(webhook_opener(log.webhook, run_dir), close_seconds=close_seconds)
    try:
        yield emit
    finally:
        check()  # a sink may write when it is closed
        for name, sink in sinks.items():
            closes(name, sink)
