"""Who is suspected to compute wrongly: what ranks tell a supervisor, and what it keeps away from. Torch-free.

    suspects.jsonl   {"attempt": 3, "ranks": [1], "why": "..."}; every rank that ends with 77 writes it
    avoided.jsonl    {"host": "node1", "device": "2", "attempt": 3, "why": "..."}; the supervisor writes it

A device that stands in avoided.jsonl is not used again by this run; delete its line, or the file, once it is mended.
A `device` of null stands for the whole host; a number is counted as in RUN/devices. People edit that file: a line of
it that can't be read is an error, since a slip would put what it names back into use.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.regular_files import append_line, read_inside

SUSPECTS = "suspects.jsonl"
AVOIDED = "avoided.jsonl"
_LIMIT = 16 << 20
_FORM = '{"host": "node1", "device": "2", "attempt": 3, "why": "..."}'


@dataclass(frozen=True)
class Avoided:
    """A device, or a host, that a run keeps away from."""

    host: str
    device: str | None
    attempt: int
    why: str


def tell_suspects(run_dir: Path, *, attempt: int, ranks: Sequence[int], why: str) -> None:
    """Says which ranks of an attempt are suspected. OSError."""
    append_line(run_dir, SUSPECTS, json.dumps({"attempt": attempt, "ranks": list(ranks), "why": why}))


def read_suspects(run_dir: Path, attempt: int) -> dict[int, str]:
    """Rank -> why, of those that are suspected in an attempt."""
    found: dict[int, str] = {}
    for line in _lines(run_dir, SUSPECTS):
        ranks = line.get("ranks")
        if line.get("attempt") != attempt or type(ranks) is not list:
            continue
        for rank in ranks:
            if type(rank) is int:
                found.setdefault(rank, str(line.get("why", "")))
    return found


def avoid(run_dir: Path, what: Avoided) -> None:
    """Keeps a device away from the attempts that follow. OSError."""
    append_line(run_dir, AVOIDED, json.dumps(asdict(what)))


@dataclass(frozen=True)
class AvoidedFile:
    """What avoided.jsonl holds."""

    entries: tuple[Avoided, ...]
    problems: tuple[Problem, ...]
    """One for each line that can't be read."""

    @property
    def hosts(self) -> dict[str, str]:
        """Host -> why, of those that the run keeps away from altogether: what a scheduler may be told to exclude."""
        return {one.host: one.why for one in self.entries if one.device is None}


def read_avoided(run_dir: Path) -> AvoidedFile:
    """What the run keeps away from. RecipeError: a line can't be read. OSError: the file can't be."""
    found = read_whole_avoided(run_dir)
    if found.problems:
        raise RecipeError(found.problems)
    return found


def read_whole_avoided(run_dir: Path) -> AvoidedFile:
    """As `read_avoided`, with the lines that can be read where others can't. OSError."""
    try:
        data = read_inside(run_dir, AVOIDED, limit=_LIMIT)
    except FileNotFoundError:
        data = b""
    entries: list[Avoided] = []
    problems: list[Problem] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entries.append(_avoided(line))
        except (ValueError, RecursionError) as error:
            text = f"{run_dir / AVOIDED}:{number}: {error}; write {_FORM}, with null as the device for the whole host,"
            text += " or delete the line if what it names may be used again"
            problems.append(Problem("", text, code="supervise-avoided"))
    return AvoidedFile(tuple(entries), tuple(problems))


def _avoided(line: bytes) -> Avoided:
    """ValueError, RecursionError: the line is none."""
    try:
        raw = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("is no UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from None
    kinds: dict[str, tuple[type, ...]] = {"host": (str,), "device": (str, NoneType), "attempt": (int,), "why": (str,)}
    if type(raw) is not dict or set(raw) != set(kinds):
        raise ValueError(f"is no object of {', '.join(kinds)}")
    for key, types in kinds.items():
        is_empty = raw[key] == "" and key != "why"
        if type(raw[key]) not in types or is_empty:
            raise ValueError(f"{key}={json.dumps(raw[key])[:80]} is none")
    return Avoided(**raw)


def _lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    try:
        data = read_inside(run_dir, name, limit=_LIMIT)
    except FileNotFoundError:
        return []
    found = []
    for line in data.splitlines():
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if type(raw) is dict:
            found.append(raw)
    return found
