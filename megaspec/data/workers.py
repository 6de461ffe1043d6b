"""Worker processes that take parts of a job: started, fed, listened to, and never waited for in vain."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, MegaspecError, WriteError
from megaspec.data.inputs import InputPart
from megaspec.data.prepare_worker import PrepareSettings
from megaspec.data.scan_worker import ScanSettings

Settings = PrepareSettings | ScanSettings
_ROOT = Path(__file__).resolve().parents[2]


class WorkerDied(MegaspecError):
    """A worker process ended before its work did."""


def start_worker(module: str) -> subprocess.Popen:
    """A process that runs a module of ours, with pipes to its standard input and output; it ends with this one."""
    path = str(_ROOT)
    given = os.environ.get("PYTHONPATH")
    if given:
        path = f"{path}{os.pathsep}{given}"
    # One process per worker: the tokenizer's own threads would only compete with the other workers.
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # What the tokenizer's library fails on becomes an error of ours; its own stack says nothing to a user.
    environment["RUST_BACKTRACE"] = "0"
    command = [sys.executable, "-P", "-m", module, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


class _Worker:
    """A process of a module such as prepare_worker.py, and the part that it works on."""

    def __init__(self, module: str, settings: Settings, part: InputPart):
        self.process = start_worker(module)
        self.part = part
        self._rest = b""
        self.send(asdict(settings))
        self.send(part.as_json())

    def send(self, value: dict[str, Any]) -> None:
        """Write a line. A worker that is gone is noticed when its output ends."""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value).encode() + b"\n")
            self.process.stdin.flush()

    def events(self) -> list[dict[str, Any]] | None:
        """What has arrived; None at the end of the output."""
        data = os.read(self.process.stdout.fileno(), 2**16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        self.process.kill()
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def run_workers(
    module: str, parts: Iterable[InputPart], settings: Settings, n_workers: int
) -> Iterator[tuple[InputPart, dict[str, Any]]]:
    """Have every part made by processes of a module; yields (part, event) as events come in, {"done": number} last.

    Raises DataError and WriteError of the workers, and WorkerDied when one ends on its own. No worker is left behind.
    """
    waiting = deque(parts)
    workers: list[_Worker] = []
    selector = selectors.DefaultSelector()
    try:
        while waiting and len(workers) < n_workers:
            worker = _Worker(module, settings, waiting.popleft())
            workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select():
                worker = key.data
                events = worker.events()
                if events is None:
                    raise _death_of(worker, settings)
                for event in events:
                    _raise_error(event)
                    # read before the worker gets its next part: the event is of this one
                    part = worker.part
                    if "done" in event:
                        if waiting:
                            worker.part = waiting.popleft()
                            worker.send(worker.part.as_json())
                        else:
                            selector.unregister(worker.process.stdout)
                    yield part, event
    finally:
        selector.close()
        for worker in workers:
            worker.stop()


def _raise_error(event: dict[str, Any]) -> None:
    if "data_error" in event:
        raise DataError(event["data_error"])
    if "write_error" in event:
        raise WriteError(event["write_error"])


def _death_of(worker: _Worker, settings: Settings) -> MegaspecError:
    code = worker.process.wait()
    first = worker.part.slices[0].path
    if code == -signal.SIGPROF and isinstance(settings, PrepareSettings):
        return DataError(
            f"{settings.tokenizer_where}: this tokenizer takes more than {settings.cpu_seconds:g} s of CPU time, and "
            f"one more for each 10,000 characters, for a text of part {worker.part.number} ({first}): a regular "
            "expression in it backtracks, mend it or take another tokenizer"
        )
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    hint = ""
    if code == -signal.SIGKILL:
        hint = "; when memory is short, use fewer --workers"
    return WorkerDied(
        f"the worker with pid {worker.process.pid} {how} at part {worker.part.number} ({first}){hint}; "
        "the finished parts are kept, start the same command again"
    )
