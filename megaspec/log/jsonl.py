"""metrics.jsonl: the history of a run, one JSON object a line, each step once. Torch-free.

    {"event": "step", "time": 1764000000.123, "step": 10, "loss": 3.25, ...}

`time` is in seconds since 1970. A number that is not finite is the text "nan", "inf" or "-inf": JSON has no number for
it, and float() reads it.
"""

import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.errors import printable
from megaspec.core.regular_files import DISK_ERRORS, open_inside, write_beside
from megaspec.log.events import NAMES, EvalDone, Event, RolledBack, RunEnded
from megaspec.log.overflow import Overflow

METRICS = "metrics.jsonl"

# Lines that are kept while they can't be written.
MOST_WAITING = 100_000
# Bytes of a line; those of a step have some 400, and no sample of text comes near it.
MAX_LINE = 1 << 20
# What stands for numbers that JSON has not.
_NOT_FINITE = ("nan", "inf", "-inf")
# What stands in the line of an evaluation.
EVALUATION = f'"{NAMES[EvalDone]}"'.encode()


class JsonlSink:
    """Appends events to a file. `step`: where the run goes on; lines of later steps, and a torn last one, are cut off.
    `elsewhere`: a file on another disk that takes lines while there is no room for them here.

    A damaged line in front of lines that stay is left as it is. Where the file has another name as well, as one that
    was copied by hard links, that one keeps its lines. Where the run goes back they are cut off as well.

    A line is in the kernel's hands when `__call__` returns, so a killed process loses none. OSError when a line can't
    be written here; it is then in `elsewhere`, or else kept in memory, and written before the next one as soon as there
    is room: each line once, in order. MOST_WAITING lines are kept in memory, then the oldest goes. Lines that there
    never was room for are told, by the end that gives them up, or, where that was a kill, by the start that misses
    them.
    """

    def __init__(self, path: Path, *, step: int, elsewhere: Path | None = None):
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._n_given_up = 0
        # never through a link: what lies behind one would be cut off
        self._fd = _open(path)
        history = _history_until(self._fd, step)
        self._length = history.length
        self._overflow = None if elsewhere is None else Overflow(elsewhere)
        last_step = history.last_step
        for line in self._left_elsewhere(step).splitlines():
            last_step = max(last_step or 0, _step_of(line) or 0)
        if last_step is not None and last_step < step:
            text = f"{path} tells nothing of steps {last_step + 1} to {step}: the start before was killed while"
            text += " there was no room for their lines, or lines were taken away"
            _tell(text)
        if os.fstat(self._fd).st_nlink > 1:
            self._fd = _apart(self._fd, path, self._length)
        os.ftruncate(self._fd, self._length)
        self._was_full = False
        self._is_torn = False
        """There may be a part of a line behind those of `_length`."""
        # where there is still no room, the first line will say so
        with suppress(OSError):
            self._bring_home()

    def _left_elsewhere(self, step: int) -> bytes:
        """Lines in the other place that follow those here, up to `step`."""
        if self._overflow is None or not os.path.lexists(self._overflow.path):
            return b""
        until = partial(_length_until, step=step)
        try:
            return self._overflow.adopt(self._fd, length=self._length, until=until)
        except OSError as error:
            _tell(f"{self._overflow.path} {error.strerror}; it is left out of {METRICS}")
            return b""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolledBack):
            self._cut(event.step)
        line = {"event": NAMES[type(event)], "time": round(time.time(), 3), **asdict(event)}
        text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False)
        if len(self._waiting) == MOST_WAITING:
            # the oldest one goes
            self._n_given_up += 1
        self._waiting.append(text.encode(errors="backslashreplace") + b"\n")
        try:
            self._write_waiting()
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {self._where_lines_are()}") from None

    def close(self) -> None:
        """OSError when lines are elsewhere, or had to be given up, with how many."""
        try:
            self._write_waiting()
        except OSError as error:
            self._n_given_up += len(self._waiting)
            words = self._where_lines_are()
            if self._n_given_up:
                words = self._given_up_in_words()
            raise OSError(error.errno, f"{error.strerror}: {words}") from None
        finally:
            os.close(self._fd)
        if self._n_given_up:
            raise OSError(errno.ENOSPC, self._given_up_in_words())

    def _where_lines_are(self) -> str:
        """Of those that there is no room for."""
        if self._overflow is not None and self._overflow.is_begun and not self._waiting:
            return f"lines go to {self._overflow.path} until there is room"
        return f"the last {MOST_WAITING:,} lines are kept in memory until there is room"

    def _given_up_in_words(self) -> str:
        if self._n_given_up == 1:
            return "1 line is lost"
        return f"{self._n_given_up:,} lines are lost"

    def _cut(self, step: int) -> None:
        """Takes lines of later steps away, those that are not written yet, or lie elsewhere, too."""
        self._waiting = deque((line for line in self._waiting if not _is_later(line, step)), maxlen=MOST_WAITING)
        # lines are appended wherever the file is read
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._length = _history_until(self._fd, step).length
        os.ftruncate(self._fd, self._length)
        if self._overflow is not None:
            self._overflow.cut(partial(_length_until, step=step), length=self._length)

    def _write_waiting(self) -> None:
        """OSError: there is no room here. What could be put elsewhere waits no more."""
        try:
            self._bring_home()
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if error.errno in DISK_ERRORS:
                self._was_full = True
                self._put_elsewhere()
            raise
        if self._was_full:
            self._was_full = False
            _tell(f"{METRICS}: there is room again: no line waits any more")

    def _append(self, lines: bytes) -> None:
        """Adds whole lines to the file, all of them or none. OSError."""
        if self._is_torn:
            os.ftruncate(self._fd, self._length)
            self._is_torn = False
        try:
            written = os.write(self._fd, lines)
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except OSError:
            # what is there of them; where even that fails, before the next ones
            self._is_torn = True
            os.ftruncate(self._fd, self._length)
            self._is_torn = False
            raise
        self._length += len(lines)

    def _bring_home(self) -> None:
        """Writes lines here that are elsewhere. OSError: there is no room still."""
        if self._overflow is not None:
            self._overflow.move(self._append)

    def _put_elsewhere(self) -> None:
        """Moves what waits into the other place; where there is none, or no room either, it waits on."""
        if self._overflow is None or not self._waiting:
            return
        lines = list(self._waiting)
        with suppress(OSError):
            self._overflow.append(lines, after=self._length)
            self._waiting.clear()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl."""
    data = Path(path).read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def ended_at(path: Path, *, elsewhere: Path | None = None) -> float | None:
    """The time of the end of a run that is the last line of a metrics.jsonl, or of what it had no room for; None where
    both tell of something else, as of a run whose ranks were killed."""
    times = [_ended_at(path)]
    if elsewhere is not None:
        times.append(_ended_at(elsewhere))
    return max((time for time in times if time is not None), default=None)


def _ended_at(path: Path) -> float | None:
    try:
        fd = open_inside(path.parent, path.name)
    except OSError:
        return None
    try:
        with open(fd, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LINE))
            lines = file.read(MAX_LINE).splitlines()
    except OSError:
        return None
    if not lines:
        return None
    try:
        found = parse_json(lines[-1])
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("event") != NAMES[RunEnded]:
        return None
    time_of_end = found.get("time")
    return float(time_of_end) if isinstance(time_of_end, int | float) else None


def is_evaluated(path: Path, step: int, *, elsewhere: Path | None = None) -> bool:
    """Whether a metrics.jsonl, or what it had no room for, tells of an evaluation after a step; False where there is
    none that can be read."""
    return any(found.get("step") == step for found in _evaluations(path, elsewhere))


def losses_by_step(path: Path, set_name: str, *, elsewhere: Path | None = None) -> dict[int, float]:
    """The loss of an evaluation set, or with `mean` that of all, after each step of which a metrics.jsonl, or what it
    had no room for, tells an evaluation. Steps without that set are left out, and lines that can't be read."""
    losses: dict[int, float] = {}
    for found in _evaluations(path, elsewhere):
        sets = found.get("sets")
        loss = found.get("loss")
        if set_name != "mean":
            loss = sets.get(set_name) if isinstance(sets, dict) else None
        if isinstance(found.get("step"), int) and (isinstance(loss, int | float) or loss in _NOT_FINITE):
            losses[found["step"]] = float(loss)
    return losses


def _evaluations(path: Path, elsewhere: Path | None) -> Iterator[dict[str, Any]]:
    """Every evaluation that these files tell of."""
    for one in (path, elsewhere):
        if one is None:
            continue
        try:
            fd = open_inside(one.parent, one.name)
        except OSError:
            continue
        with open(fd, "rb") as file:
            while line := file.readline(MAX_LINE):
                # most lines are steps: they need no parsing
                found = _evaluation(line) if EVALUATION in line else None
                if found is not None:
                    yield found


def _evaluation(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is no evaluation."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("event") != NAMES[EvalDone]:
        return None
    return found


def _open(path: Path) -> int:
    return open_inside(path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def _apart(fd: int, path: Path, length: int) -> int:
    """A descriptor of a file of its own at `path`, with the first bytes of `fd`, which is closed."""
    with open(fd, "rb") as file:
        file.seek(0)
        os.replace(write_beside(path, _blocks(file, length)), path)
    return _open(path)


def _blocks(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0 and (block := file.read(min(length, MAX_LINE))):
        length -= len(block)
        yield block


@dataclass(frozen=True)
class _History:
    """What a metrics.jsonl keeps when a run goes on."""

    length: int
    """Bytes."""
    last_step: int | None
    """The highest that a line tells of; None where there is no line."""


def _history_until(fd: int, step: int) -> _History:
    """Up to the last of our lines before the first that is torn or belongs to a later step.

    A line that can't be read in the midst of them is no reason to lose those behind it.
    """
    length = 0
    read = 0
    last = None
    with open(fd, "rb", closefd=False) as file:
        while line := file.readline(MAX_LINE):
            found = _step_of(line)
            if not line.endswith(b"\n") or (found is not None and found > step):
                break
            read += len(line)
            if found is not None:
                length = read
                last = found if last is None else max(last, found)
    return _History(length, last)


def _length_until(lines: bytes, step: int) -> int:
    """Bytes of lines up to the first that is torn or belongs to a later step."""
    length = 0
    for line in lines.splitlines(keepends=True):
        if not line.endswith(b"\n") or _is_later(line, step):
            break
        length += len(line)
    return length


def _tell(text: str) -> None:
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)


def _is_later(line: bytes, step: int) -> bool:
    found = _step_of(line)
    return found is not None and found > step


def _step_of(line: bytes) -> int | None:
    """The step of a line. None: it is not ours, or damaged."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    step = found.get("step")
    if type(step) is not int:  # True is an int, too
        return None
    return step


def plain(value: Any) -> Any:
    """A value of an event with texts for numbers that are not finite."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
