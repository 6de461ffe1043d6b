"""metrics.jsonl: the history of a run, one JSON object a line, each step once. Torch-free.

    {"event": "step", "time": 1764000000.123, "step": 10, "loss": 3.25, ...}

`time` is in seconds since 1970. A number that is not finite is the text "nan", "inf" or "-inf": JSON has no number for
it, and float() reads it.
"""

import json
import math
import os
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaspec.core.bounded_json import parse_json
from megaspec.core.regular_files import open_inside
from megaspec.log.events import NAMES, Event

# Lines that are kept while they can't be written.
MOST_WAITING = 100_000
# Bytes of a line; those of a step have some 400, and no sample of text comes near it.
MAX_LINE = 1 << 20


class JsonlSink:
    """Appends events to a file. `step`: where the run goes on; lines of later steps, and a torn last one, are cut off.

    A line is in the kernel's hands when `__call__` returns, so a killed process loses none. OSError when a line can't
    be written; it is then kept, and written before the next one.
    """

    def __init__(self, path: Path, *, step: int):
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        # never through a link: what lies behind one would be cut off
        self._fd = open_inside(path.parent, path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._length = _length_until(self._fd, step)
        os.ftruncate(self._fd, self._length)

    def __call__(self, event: Event) -> None:
        line = {"event": NAMES[type(event)], "time": round(time.time(), 3), **asdict(event)}
        text = json.dumps({k: _plain(v) for k, v in line.items()}, ensure_ascii=False, allow_nan=False)
        self._waiting.append(text.encode(errors="backslashreplace") + b"\n")
        self._write_waiting()

    def close(self) -> None:
        """OSError when lines had to be given up."""
        try:
            self._write_waiting()
        finally:
            os.close(self._fd)

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


def _length_until(fd: int, step: int) -> int:
    """Bytes up to the first line that is torn, is not ours or belongs to a later step."""
    length = 0
    with open(fd, "rb", closefd=False) as file:
        while line := file.readline(MAX_LINE):
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            length += len(line)
    return length


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for one that is not ours, so that it is cut off."""
    try:
        found = parse_json(line)
    except ValueError:
        return math.inf
    step = found.get("step") if isinstance(found, dict) else None
    return step if type(step) is int else math.inf


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
