"""A rank's page: a file in memory that says whether the rank is alive and whether it gets on.

Two writers. A side thread counts beats, so a rank that was stopped (SIGSTOP, a debugger, a machine that swaps) is told
from one that is alive and stuck. The training thread's progress stands beside it: a number that rises whenever the rank
gets on. And the collective that the training thread is in, or came from, is one word, written where it begins and ends:
it can be read from a rank that answers nothing any more.

Who watches is another process, see megaspec_launchers/watch.py. It may ask for a report; the side thread writes that
beside the page, since the training thread is what hangs. Every number is a machine word that is written at once: no
lock, and no reader can keep a writer waiting. Torch-free.
"""

import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from traceback import FrameSummary
from typing import Any, Self

TICK_SECONDS = 0.2
"""Between two beats of the side thread."""
LOOKED_AT_SECONDS = 5.0
"""Who watches looks more often than this; one who did not is dead or frozen."""
_MAGIC = 0x6D65676162656174
_SIZE = 8192
_WHERE_AT = 256
_GROUPS_AT = 1024
_MOST_STACK = 64


class Word(IntEnum):
    """Places in the page, in words of eight bytes."""

    MAGIC = 0
    PID = 1
    BEATS = 2
    """Of the side thread."""
    PROGRESS = 3
    """Of the work; on a GPU what the device has passed."""
    COLLECTIVE = 4
    """As megaspec.core.counted packs it."""
    STATE = 5
    STEP = 6
    STEPS = 7
    LOSS = 8
    """The bits of a float64; not a number: not known."""
    LOOKS = 9
    """Of who watches."""
    WANTED = 10
    """Number of the report that is asked for; 0: none yet."""
    TOLD = 11
    """Number of the report that who watches has told: nobody has to wait for it any more."""


class PageState(IntEnum):
    """What is expected of a rank."""

    UNKNOWN = 0
    """Nothing: its entry says nothing of its progress."""
    STARTING = 1
    WATCHED = 2
    """It gets on, or it hangs."""
    FAILED = 3
    """A collective failed: the others' reports are wanted before it ends."""
    LEFT = 4
    """Its work is done."""


class Page:
    """The file; `open` it, or `make` a new one."""

    def __init__(self, fd: int):
        try:
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self.words = memoryview(self._map)[:_WHERE_AT].cast("Q")

    @classmethod
    def make(cls, path: str) -> Self:
        """A new page. FileExistsError: there is one."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _SIZE)
        page = cls(fd)
        page.words[Word.PID] = os.getpid()
        page.write_loss(float("nan"))
        # last: a page that has it is whole
        page.words[Word.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: str) -> Self | None:
        """The page of a rank; None where it has not made one yet."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(fd).st_size < _SIZE:
            os.close(fd)
            return None
        page = cls(fd)
        if page.words[Word.MAGIC] != _MAGIC:
            return None
        return page

    def write_step(self, step: int, steps: int, loss: float) -> None:
        """The newest step whose loss was read, and of how many."""
        self.words[Word.STEP] = step
        self.words[Word.STEPS] = steps
        self.write_loss(loss)

    def write_loss(self, loss: float) -> None:
        """The newest step's."""
        (self.words[Word.LOSS],) = struct.unpack("<Q", struct.pack("<d", loss))

    def read_loss(self) -> float:
        """Not a number where it is not known."""
        (loss,) = struct.unpack("<d", struct.pack("<Q", self.words[Word.LOSS]))
        return loss

    def write_where(self, where: str) -> None:
        """What the training thread is at; too long a text is cut."""
        data = where.encode()[: _GROUPS_AT - _WHERE_AT - 1] + b"\0"
        self._map[_WHERE_AT : _WHERE_AT + len(data)] = data

    def read_where(self) -> str:
        """Empty before the first."""
        data, _, _ = self._map[_WHERE_AT:_GROUPS_AT].partition(b"\0")
        return data.decode(errors="replace")

    def write_groups(self, names: Sequence[str]) -> None:
        """Of the groups that a collective's word counts, a line each; those that have no room are told by number."""
        data = "\n".join(names).encode()[: _SIZE - _GROUPS_AT - 1] + b"\0"
        self._map[_GROUPS_AT : _GROUPS_AT + len(data)] = data

    def read_groups(self) -> list[str]:
        """By their numbers."""
        data, _, _ = self._map[_GROUPS_AT:].partition(b"\0")
        return data.decode(errors="replace").splitlines()


def nothing_more() -> dict[str, Any]:
    """For who has nothing to add to a report."""
    return {}


class Beat:
    """The side thread of a rank, and its page.

    `progress`: a number that changes when the rank gets on. `where`: in words. `more`: what else a report holds. They
    are called in the side thread.
    """

    def __init__(self, path: str, *, tick_seconds: float = TICK_SECONDS):
        self.path = path
        self.page = Page.make(path)
        self.progress: Callable[[], int] | None = None
        self.where: Callable[[], str] | None = None
        self.more: Callable[[], dict[str, Any]] = nothing_more
        self.failed_at: list[FrameSummary] = []
        """Where the training thread failed, outermost first: it stands elsewhere by now."""
        self._tick_seconds = tick_seconds
        self._answered = 0
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def expect(self, state: PageState) -> None:
        """What is expected of this rank from now on."""
        self.page.words[Word.STATE] = state

    def has_watcher(self) -> bool:
        """Whether somebody looked at the page within the last seconds; waits that long for the first look."""
        before = self.page.words[Word.LOOKS]
        if before == 0:
            return False
        end = time.monotonic() + LOOKED_AT_SECONDS
        while time.monotonic() < end:
            if self.page.words[Word.LOOKS] != before:
                return True
            time.sleep(0.05)
        return False

    def wait_until_told(self, seconds: float) -> None:
        """Until who watches has told what it was asked to look at, or for so long."""
        before = self.page.words[Word.TOLD]
        end = time.monotonic() + seconds
        while self.page.words[Word.TOLD] == before and time.monotonic() < end:
            time.sleep(0.05)

    def report(self) -> dict[str, Any]:
        """Where this rank is: in words, its stacks by thread, innermost last, and what `more` says."""
        where = ""
        if self.where is not None:
            where = self.where()
        stacks = stacks_of_threads(self._main_thread)
        if self.failed_at:
            stacks["main"] = lines_of(self.failed_at)
        return {"where": where, "stacks": stacks, **self.more()}

    def _run(self) -> None:
        words = self.page.words
        while True:
            words[Word.BEATS] += 1
            if self.progress is not None:
                words[Word.PROGRESS] = self.progress() & (2**64 - 1)
            wanted = words[Word.WANTED]
            if wanted != self._answered:
                self._answered = wanted
                write_report(self.path, {"number": wanted, **self.report()})
            time.sleep(self._tick_seconds)


_current: list[Beat] = []


def begin(path: str) -> Beat:
    """Makes this process's page and starts its side thread."""
    beat = Beat(path)
    _current.append(beat)
    return beat


def current() -> Beat | None:
    """This process's; None where nobody watches it."""
    if not _current:
        return None
    return _current[-1]


def page_path(store_path: str, rank: int) -> str:
    """Where the page of a rank is, beside the file by which the ranks of its attempt meet."""
    return f"{store_path}.beat-{rank}"


def stacks_of_threads(main_thread: int | None) -> dict[str, list[str]]:
    """By thread the lines `function (file:line)`, outermost first; the main thread's under `main`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = {}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        name = "main" if ident == main_thread else names.get(ident, str(ident))
        found[name] = lines_of(traceback.extract_stack(frame))
    return found


def lines_of(stack: Sequence[FrameSummary]) -> list[str]:
    """The innermost of a stack, as lines."""
    lines = []
    for entry in stack[-_MOST_STACK:]:
        lines.append(f"{entry.name} ({entry.filename}:{entry.lineno})")
    return lines


def write_report(page: str, report: dict[str, Any]) -> None:
    """Beside the page, whole or not at all."""
    temporary = f"{page}.report.tmp"
    with suppress(OSError):
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(report, file)
        os.replace(temporary, f"{page}.report")


def read_report(page: str, number: int) -> dict[str, Any] | None:
    """The report that was asked for; None where it has not come."""
    try:
        found = json.loads(Path(f"{page}.report").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("number") != number:
        return None
    return found
