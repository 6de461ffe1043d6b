"""attempts.jsonl in a run folder: every attempt that a supervisor made, with two lines for each.

    {"event": "start", "attempt": 3, "time": "2026-12-01T10:00:00Z", "host": "node1", "pid": 4711,
     "devices": ["0", "1"], "why": "rank 1 was killed by SIGKILL"}
    {"event": "end", "attempt": 3, "time": "2026-12-01T10:20:00Z", "code": 74, "reason": "rank 0 was killed by SIGKILL",
     "layout": "as the recipe says", "world_size": 2, "from_step": 40, "step": 57, "saved": 50,
     "next": "again in 1.2 s, restart 1 of 100"}

`why` says what an attempt follows, "" for the first one; `devices` is null where nothing limits them. `from_step` is
the newest that was saved before it (one that it found damaged lies behind it), `step` the last that was done, `saved`
the newest that a checkpoint holds. `code` is null where an attempt has no end line: its
supervisor died with it. Attempts are numbered over the whole life of a run, from 0. Torch-free.
"""

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megaspec.core.regular_files import append_line, open_inside, read_inside

ATTEMPTS = "attempts.jsonl"
# A line has some 500 bytes: as many attempts as a supervisor makes in years.
_LIMIT = 64 << 20
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class AttemptStart:
    """What an attempt begins with."""

    attempt: int
    host: str
    pid: int
    """Of the supervisor."""
    devices: tuple[str, ...] | None
    why: str


@dataclass(frozen=True)
class AttemptEnd:
    """What an attempt came to."""

    attempt: int
    code: int
    reason: str
    layout: str
    world_size: int
    """0 where it ended before it had a layout."""
    from_step: int
    step: int
    saved: int
    next: str
    """What the supervisor does now."""


@dataclass(frozen=True)
class Attempt:
    """An attempt as its lines tell it; `end` is None where there is no such line."""

    start: AttemptStart
    end: AttemptEnd | None


def tell_attempt(run_dir: Path, what: AttemptStart | AttemptEnd) -> None:
    """Appends a line. OSError: it can't be written."""
    event = "start" if isinstance(what, AttemptStart) else "end"
    append_line(run_dir, ATTEMPTS, json.dumps({"event": event, "time": _now(), **asdict(what)}))


@dataclass(frozen=True)
class AttemptsFile:
    """What attempts.jsonl holds."""

    attempts: tuple[Attempt, ...]
    """The oldest first."""
    damaged: tuple[str, ...]
    """FILE:LINE and why, of each line that tells of no attempt: a crash may have cut it, or somebody edited it."""


def read_attempts(run_dir: Path) -> AttemptsFile:
    """Every attempt of a run; none where there is no such file. OSError: it can't be read."""
    try:
        data = read_inside(run_dir, ATTEMPTS, limit=_LIMIT)
    except FileNotFoundError:
        data = b""
    starts: dict[int, AttemptStart] = {}
    ends: dict[int, AttemptEnd] = {}
    place_of_end: dict[int, str] = {}
    damaged: list[str] = []
    for number, line in enumerate(data.splitlines(), 1):
        place = f"{run_dir / ATTEMPTS}:{number}"
        if not line.strip():
            continue
        try:
            found = _parse(line)
        except (ValueError, RecursionError) as error:
            damaged.append(f"{place}: {error}")
            continue
        if isinstance(found, AttemptStart):
            starts[found.attempt] = found
        else:
            ends[found.attempt] = found
            place_of_end[found.attempt] = place
    for attempt, place in place_of_end.items():
        if attempt not in starts:
            damaged.append(f"{place}: the line that begins attempt {attempt} is not there")
    attempts = [Attempt(starts[number], ends.get(number)) for number in sorted(starts)]
    return AttemptsFile(tuple(attempts), tuple(damaged))


def _parse(line: bytes) -> AttemptStart | AttemptEnd:
    """ValueError, RecursionError: the line is none of an attempt."""
    try:
        raw = json.loads(line)
    except ValueError:
        raise ValueError("no JSON: cut, or edited") from None
    if type(raw) is not dict or type(raw.get("attempt")) is not int:
        raise ValueError("no object with the number of an attempt")
    event = raw.pop("event", None)
    raw.pop("time", None)
    try:
        if event == "start":
            if raw.get("devices") is not None:
                raw["devices"] = tuple(raw["devices"])
            return AttemptStart(**raw)
        if event == "end":
            return AttemptEnd(**raw)
    except TypeError:
        raise ValueError(f"it has not the keys of an attempt's {event}") from None
    raise ValueError("event is neither start nor end")


def last_step(run_dir: Path, metrics: str, *, elsewhere: Path | None = None) -> int:
    """The last step that the file of metrics, or what it had no room for, tells of; 0 where they tell of none."""
    steps = [_last_step(run_dir, metrics)]
    if elsewhere is not None:
        steps.append(_last_step(elsewhere.parent, elsewhere.name))
    return max(steps)


def _last_step(folder: Path, name: str) -> int:
    try:
        fd = open_inside(folder, name)
    except OSError:
        return 0
    try:
        with open(fd, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        found = _step_of(line)
        if found is not None:
            return found
    return 0


def _step_of(line: bytes) -> int | None:
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if type(raw) is dict and raw.get("event") == "step" and type(raw.get("step")) is int:
        return raw["step"]
    return None


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
