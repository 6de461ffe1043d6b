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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.errors import printable
from megaspec.core.regular_files import open_inside, write_beside
from megaspec.log.events import NAMES, EvalDone, Event, RolledBack, RunEnded

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

    A damaged line in front of lines that stay is left as it is. Where the file has another name as well, as one that
    was copied by hard links, that one keeps its lines. Where the run goes back they are cut off as well.

    A line is in the kernel's hands when `__call__` returns, so a killed process loses none. OSError when a line can't
    be written; it is then kept, and written before the next one. Lines that there never was room for are told, by the
    end that gives them up, or, where that was a kill, by the start that misses them.
    """

    def __init__(self, path: Path, *, step: int):
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._n_given_up = 0
        # never through a link: what lies behind one would be cut off
        self._fd = _open(path)
        history = _history_until(self._fd, step)
        self._length = history.length
        if history.last_step is not None and history.last_step < step:
            text = f"{path} tells nothing of steps {history.last_step + 1} to {step}: the start before was killed while"
            text += " there was no room for their lines, or lines were taken away"
            print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
        if os.fstat(self._fd).st_nlink > 1:
            self._fd = _apart(self._fd, path, self._length)
        os.ftruncate(self._fd, self._length)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolledBack):
            self._cut(event.step)
        line = {"event": NAMES[type(event)], "time": round(time.time(), 3), **asdict(event)}
        text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False)
        if len(self._waiting) == MOST_WAITING:
            # the oldest one goes
            self._n_given_up += 1
        self._waiting.append(text.encode(errors="backslashreplace") + b"\n")
        self._write_waiting()

    def close(self) -> None:
        """OSError when lines had to be given up, with how many."""
        try:
            self._write_waiting()
        except OSError as error:
            self._n_given_up += len(self._waiting)
            raise OSError(error.errno, f"{error.strerror}: {self._given_up_in_words()}") from None
        finally:
            os.close(self._fd)
        if self._n_given_up:
            raise OSError(errno.ENOSPC, self._given_up_in_words())

    def _given_up_in_words(self) -> str:
        if self._n_given_up == 1:
            return "1 line is lost"
        return f"{self._n_given_up:,} lines are lost"

    def _cut(self, step: int) -> None:
        """Takes lines of later steps away, those that are not written yet, too."""
        self._waiting = deque((line for line in self._waiting if not _is_later(line, step)), maxlen=MOST_WAITING)
        # lines are appended wherever the file is read
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._length = _history_until(self._fd, step).length
        os.ftruncate(self._fd, self._length)

    def _write_waiting(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._fd, line)
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError:
                os.ftruncate(self._fd, self._length)  # what is there of the line
                raise
            self._length += len(line)
            self._waiting.popleft()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Every whole line of a metrics.jsonl."""
    data = Path(path).read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def ended_at(path: Path) -> float | None:
    """The time of the end of a run that is the last line of a metrics.jsonl; None where that tells of something else,
    as of a run whose ranks were killed."""
    try:
        fd = open_inside(path.parent, path.name)
    except OSError:
        return None
    with open(fd, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE))
        lines = file.read(MAX_LINE).splitlines()
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


def is_evaluated(path: Path, step: int) -> bool:
    """Whether a metrics.jsonl tells of an evaluation after a step; False where there is none that can be read."""
    try:
        fd = open_inside(path.parent, path.name)
    except OSError:
        return False
    with open(fd, "rb") as file:
        while line := file.readline(MAX_LINE):
            # most lines are steps: they need no parsing
            if EVALUATION in line and _is_evaluation_of(line, step):
                return True
    return False


def losses_by_step(path: Path, set_name: str) -> dict[int, float]:
    """The loss of an evaluation set, or with `mean` that of all, after each step of which a metrics.jsonl tells an
    evaluation. Steps without that set are left out, and lines that can't be read."""
    losses: dict[int, float] = {}
    try:
        fd = open_inside(path.parent, path.name)
    except OSError:
        return losses
    with open(fd, "rb") as file:
        while line := file.readline(MAX_LINE):
            found = _evaluation(line) if EVALUATION in line else None
            if found is None:
                continue
            sets = found.get("sets")
            loss = found.get("loss")
            if set_name != "mean":
                loss = sets.get(set_name) if isinstance(sets, dict) else None
            if isinstance(found.get("step"), int) and (isinstance(loss, int | float) or loss in _NOT_FINITE):
                losses[found["step"]] = float(loss)
    return losses


def _evaluation(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it is no evaluation."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("event") != NAMES[EvalDone]:
        return None
    return found


def _is_evaluation_of(line: bytes, step: int) -> bool:
    found = _evaluation(line)
    return found is not None and found.get("step") == step


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
