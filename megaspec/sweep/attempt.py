"""One life of a point's run: started in a process of its own, asked to stop, judged by how it ended. Torch-free."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megaspec.checkpoint.lock import RunLock
from megaspec.core.errors import DataError, MegaspecError, Preempted, RecipeError
from megaspec.plugins import plugin_flags
from megaspec.run_folder import is_run, write_run
from megaspec.sweep import child
from megaspec.sweep.points import Checker
from megaspec.sweep.state import Point, State, SweepFolder, recipe_of

# What a launcher may need beyond the time that its ranks have.
MARGIN_SECONDS = 10.0
TAIL_BYTES = 4000
# Of a reason.
MOST_CHARACTERS = 400
# Frames of a traceback, and what libraries say while a process ends.
_NOISE = re.compile(r"\s|\[(rank\d+\]:\s?\[)?[WI]\d{4}|Traceback \(")
_STOPPED_BY_US = (Preempted.exit_code, -signal.SIGTERM, -signal.SIGKILL)


class Attempt:
    """A point that is being run. `gpus`: those that it may see; `threads`: see child.start.

    RecipeError, DataError: it can't be run any more. WriteError.
    """

    def __init__(
        self,
        folder: SweepFolder,
        point: Point,
        checker: Checker,
        *,
        gpus: Sequence[str] = (),
        threads: int | None = None,
    ):
        self.gpus = tuple(gpus)
        self.began = time.monotonic()
        self._log = folder.log(point)
        self._asked: State | None = None
        self._deadline = float("inf")
        recipe, run = recipe_of(point), folder.run(point)
        self._run = run
        self._grace = recipe.launcher.grace_seconds + MARGIN_SECONDS
        if not is_run(run):
            spec = checker.spec(recipe, run, {})
            run.mkdir(exist_ok=True)
            write_run(run, recipe, checker.target, spec)
        words = plugin_flags() + (["memory=ignore"] if checker.memory == "ignore" else [])
        self._process = child.start(run, self._log, gpus=gpus, threads=threads, words=words)
        self.point = point.to("running", pid=self._process.pid)

    def ask_to_stop(self, *, then: State) -> None:
        """Lets the run save and end; `then` is what the point is afterwards. A second call changes nothing."""
        if self._asked is None:
            self._asked = then
            self._deadline = time.monotonic() + self._grace
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the run at once."""
        self._asked = self._asked or "interrupted"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ended(self) -> Point | None:
        """How the run ended; None while it goes on. One that does not stop in time is killed."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._deadline:
                self.kill()
            return None
        if code == 0:
            return self.point.to("done", code=0)
        if self._asked is not None and code in _STOPPED_BY_US:
            return self.point.to(self._asked, code=Preempted.exit_code)
        if code == Preempted.exit_code:
            return self.point.to("interrupted", code=code)
        # a crash ends with 1 or a signal, which tell a scheduler nothing
        known = code if code >= RecipeError.exit_code else MegaspecError.exit_code
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else _last_words(self._log, self._run)
        return self.point.to("failed", code=known, reason=reason)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def refused(point: Point, error: RecipeError | DataError) -> Point:
    """A point that could not be started."""
    return point.to("failed", code=error.exit_code, reason=str(error))


def end_orphan(point: Point, seconds: float) -> None:
    """Stops the run of a point whose sweep was killed, if it still goes on: it saves, or is killed `seconds` later."""
    try:
        process = _process_of(point)
        if process is not None:
            process.terminate()
            process.wait(seconds)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        assert point.pid is not None, f"point {point.number} has no process"
        with suppress(ProcessLookupError):
            os.killpg(point.pid, signal.SIGKILL)


def goes_on(point: Point, run: Path) -> bool:
    """Whether a point is being run, here or on another machine: somebody holds its lock, or is about to take it."""
    return _process_of(point) is not None or RunLock(run).is_held()


def _process_of(point: Point) -> psutil.Process | None:
    """The process that runs a point on this machine; a number that went to another process is none."""
    if point.pid is None:
        return None
    try:
        process = psutil.Process(point.pid)
        return process if child.is_run_of(process.cmdline(), point.folder) else None
    except psutil.NoSuchProcess:
        return None


def _last_words(log: Path, run: Path) -> str:
    """Why a run failed: its own message, and where that only names the log of a rank, what the rank wrote last."""
    lines = _tail(log)
    told = lines[-1] if lines else ""
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if line.startswith("megaspec:"):  # alone on a line where several lines follow
            told = line.removeprefix("megaspec:").strip() or after
    # a rank that was killed, and not ended, had no time to say why
    named = re.fullmatch(r"(rank \d+) ended with (exit code \d+); what it wrote: .*/([^/]+)", told)
    if named:
        rank, code, name = named.groups()
        written = _tail(run / "logs" / name)
        told = f"{written[-1].removeprefix(f'{rank}: ')} ({rank}, {code})" if written else told
    return _shortened(told)


def _tail(log: Path) -> list[str]:
    """The last lines of a log that say something; none where it can't be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and not _NOISE.match(line)]


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    end = text[-MOST_CHARACTERS // 3 :]
    return f"{text[: MOST_CHARACTERS - len(end) - 3]}...{end}"
