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
from megaspec.core.regular_files import make_folder_inside, open_inside
from megaspec.data.files import write_error
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
        recipe = recipe_of(point)
        run = folder.run(point)
        self._run = run
        self._grace = recipe.launcher.grace_seconds + MARGIN_SECONDS
        # before anything of the folder is read or written: it may be from somebody else
        folder.refuse_links(run.name)
        if not is_run(run):
            spec = checker.spec(recipe, run, {})
            try:
                make_folder_inside(folder.path, run.name)
            except OSError as error:
                raise write_error(run, error) from None
            write_run(run, recipe, checker.target, spec)
        words = plugin_flags()
        if checker.memory == "ignore":
            words = [*words, "memory=ignore"]
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
        if code < 0:
            return self.point.to(
                "failed", code=MegaspecError.exit_code, reason=f"killed by {signal.Signals(-code).name}"
            )
        # a crash ends with 1, which tells a scheduler nothing
        if code < RecipeError.exit_code:
            code = MegaspecError.exit_code
        return self.point.to("failed", code=code, reason=_last_words(self._log, self._run))

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def refused(point: Point, error: RecipeError | DataError) -> Point:
    """A point that could not be started."""
    return point.to("failed", code=error.exit_code, reason=str(error))


def end_orphan(point: Point, run: Path, seconds: float) -> None:
    """Stops the run of a point whose sweep was killed, if it still goes on: it saves, or is killed `seconds` later."""
    process = _process_of(point, run)
    if process is None:
        return
    try:
        process.terminate()
        process.wait(seconds)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            # its ranks too, which a process that was started as `child` does has in a group of its own
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def goes_on(point: Point, run: Path) -> bool:
    """Whether a point is being run, here or on another machine: somebody holds its lock, or is about to take it."""
    return _process_of(point, run) is not None or RunLock(run).is_held()


def _process_of(point: Point, run: Path) -> psutil.Process | None:
    """The process that runs a point on this machine; a number that went to another process is none.

    points.jsonl may say any number, so a process counts only where it is this user's and runs this very folder.
    """
    if point.pid is None:
        return None
    try:
        process = psutil.Process(point.pid)
        if process.uids().real != os.getuid():
            return None
        if not child.is_run_of(process.cmdline(), Path(process.cwd()), run):
            return None
        return process
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _last_words(log: Path, run: Path) -> str:
    """Why a run failed: its own message, and where that only names the log of a rank, what the rank wrote last."""
    lines = _tail(log.parent, log.name)
    if not lines:
        return ""
    # the last message of the launcher, or where it wrote none the last line
    told = lines[-1]
    for index, line in enumerate(lines):
        if not line.startswith("megaspec:"):
            continue
        told = line.removeprefix("megaspec:").strip()
        # alone on a line where several lines follow
        if not told and index + 1 < len(lines):
            told = lines[index + 1]
    # a rank that was killed, and not ended, had no time to say why
    named = re.fullmatch(r"(rank \d+) ended with (exit code \d+); what it wrote: .*/([^/]+)", told)
    if named:
        rank, code, name = named.groups()
        written = _tail(run, f"logs/{name}")
        if written:
            told = f"{written[-1].removeprefix(f'{rank}: ')} ({rank}, {code})"
    return _shortened(told)


def _tail(folder: Path, log: str) -> list[str]:
    """The last lines of a log in a folder that say something; none where it can't be read as a file."""
    try:
        with open(open_inside(folder, log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read(2 * TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and not _NOISE.match(line)]


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    end = text[-MOST_CHARACTERS // 3 :]
    return f"{text[: MOST_CHARACTERS - len(end) - 3]}...{end}"
