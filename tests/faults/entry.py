"""A rank's entry that arms faults before it runs the project's own."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from megaspec.checkpoint.lock import process_start
from megaspec.checkpoint.writer_process import WriterProcess
from megaspec.core import faults
from megaspec.launcher import stop
from megaspec.log.events import Event
from megaspec.log.sinks import SERVICES
from megaspec.log.spec import WandbSpec
from megaspec.runtime import rank as runtime

# Behind the step of the first save, before that of the second; see "every writer at".
FROM_STEP = 12
NEW_HOLDER = '{"event": "step", "step": 1, "by": "the new holder"}\n'


def main(run_dir: str, *, rank: int, fault: dict[str, Any] | None = None, **keywords: Any) -> int:
    """`fault`: {"rank", "kind", ...}, on that rank alone.

    after   kill -9 after `seconds`
    point   kill -9 at the `count`-th time at `point`
    mark    at that time (or at once, for the point "warm-up") make the file `mark` and wait for the request to stop
            that its appearance triggers, so that it comes while the rank is there
    raise   at that time an error that nobody expects
    stop    at that time it is asked to stop
    full    from that time on there is no space left on the disk
    halt    at that time it stops where it is, alive (SIGSTOP)
    halt all  at that time it stops every rank, itself last
    environment  the variable `point` is `mark` in its environment
    slow    from that time on it takes `seconds` longer each time
    sleep   at that time it goes on with nothing, alive
    writer  kill -9 of this rank's writer of checkpoints after `seconds`; then make the file `mark`
    writer at     the writer kills itself at the `count`-th time at `point`, the first one that is started alone
    every writer at  each of them does; with `seconds`, steps from FROM_STEP on wait so long for it to be gone
    stop    at that time it is asked to stop (SIGTERM)
    lose    at that time another job takes the run over, as it may when this one has stood still for long
    move    at that time the run folder is renamed

    With "service" its wandb sink is a `Service` that needs so many seconds for an event.
    """
    if fault is not None and fault["rank"] == rank and "service" in fault:
        seconds = fault["service"]
        SERVICES[WandbSpec] = lambda spec, run_dir, step: Service(run_dir, seconds)
        fault = {name: value for name, value in fault.items() if name != "service"}
    if fault is not None and fault["rank"] == rank:
        _arm(run_dir, **{k: v for k, v in fault.items() if k != "rank"})
    return runtime.main(run_dir, rank=rank, **keywords)


def _arm(run_dir: str, *, kind: str, point: str = "", count: int = 1, seconds: float = 0.0, mark: str = "") -> None:
    match kind:
        case "after":
            killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()
        case "point":
            faults.arm(point, count=count)
        case "mark" if point == "warm-up":
            _mark(mark)
        case "mark":
            faults.arm(point, lambda: _mark(mark), count=count)
        case "raise":
            faults.arm(point, _raise, count=count)
        case "stop":
            faults.arm(point, lambda: os.kill(os.getpid(), signal.SIGTERM), count=count)
        case "full":
            faults.arm(point, _disk_is_full, count=count)
        case "environment":
            os.environ[point] = mark
        case "slow":
            faults.arm(point, lambda: _compute(seconds), count=count)
        case "halt":
            faults.arm(point, lambda: _halt(mark), count=count)
        case "halt all":
            faults.arm(point, lambda: _halt_all(mark), count=count)
        case "sleep":
            faults.arm(point, lambda: _sleep(mark), count=count)
        case "writer":
            killer = threading.Timer(seconds, _kill_writer, (mark,))
            killer.daemon = True
            killer.start()
        case "writer at":
            os.environ[faults.ENVIRONMENT] = f"{point}:{count}"
            start = WriterProcess.start

            def start_without_fault(process: WriterProcess) -> None:
                start(process)
                os.environ.pop(faults.ENVIRONMENT, None)

            WriterProcess.start = start_without_fault
        case "every writer at":
            os.environ[faults.ENVIRONMENT] = f"{point}:{count}"
            if seconds:
                faults.arm("step", lambda: _wait_for_writer(seconds), count=FROM_STEP)
        case "stop":
            faults.arm(point, lambda: os.kill(os.getpid(), signal.SIGTERM), count=count)
        case "lose":
            faults.arm(point, lambda: _take_over(Path(run_dir)), count=count)
        case "move":
            faults.arm(point, lambda: _move(Path(run_dir)), count=count)


class Service:
    """Writes the step of each event that it has taken to service.txt, and how the run ended."""

    def __init__(self, run_dir: Path, seconds: float):
        self._path = run_dir / "service.txt"
        self._seconds = seconds

    def __call__(self, event: Event) -> None:
        time.sleep(self._seconds)
        with self._path.open("a") as file:
            file.write(f"{type(event).__name__} {event.step}\n")

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


def _compute(seconds: float) -> None:
    """What a rank does that has a slow processor: work, not sleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _halt(mark: str) -> None:
    if mark:
        Path(mark).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def _halt_all(mark: str) -> None:
    Path(mark).touch()
    # ranks are the children of one process
    for sibling in psutil.Process().parent().children():
        if sibling.pid != os.getpid():
            sibling.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep(mark: str) -> None:
    Path(mark).touch()
    time.sleep(600)


def _mark(mark: str) -> None:
    if not os.path.exists(mark):
        Path(mark).touch()
        while not stop.stop_requested():
            time.sleep(0.005)


def _take_over(run: Path) -> None:
    """What a new holder leaves: its record under the next token, and none of those before it. It goes on with the run:
    metrics.jsonl ends with its line."""
    (record,) = (run / "lock").glob("*.json")
    token = int(record.stem)
    (run / "lock" / f"{token + 1:08d}.json").write_text("{}")
    record.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(NEW_HOLDER)
    faults.disarm()


def _wait_for_writer(seconds: float) -> None:
    """Until this rank's writer of checkpoints is gone. How it ended is left for the rank to ask."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if all(process_start(child.pid) is None for child in psutil.Process().children()):
            return
        time.sleep(0.01)


def _kill_writer(mark: str) -> None:
    for child in psutil.Process().children():
        child.kill()
        Path(mark).touch()


def _move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))
    faults.disarm()


def _raise() -> None:
    raise ZeroDivisionError("planted")


def _disk_is_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
