"""Who is suspected to compute wrongly: what ranks tell a supervisor, and what it keeps away from. Torch-free.

    suspects.jsonl       {"attempt": 3, "ranks": [1], "why": "..."}; every rank that ends with 77 writes it
    avoided.jsonl        {"host": "node1", "device": "2", "attempt": 3, "why": "..."}; the supervisor writes it, and the
                         nodes of a job of several
    failed_hosts.jsonl   {"host": "node1", "start": "4711-0", "why": "..."}; the nodes of a job of several write it

A device that stands in avoided.jsonl is not used again by this run; delete its line, or the file, once it is mended.
A `device` of null stands for the whole host; a number is counted as in RUN/devices. People edit that file: a line of
it that can't be read is an error, since a slip would put what it names back into use.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.regular_files import append_line, open_inside, read_inside

SUSPECTS = "suspects.jsonl"
AVOIDED = "avoided.jsonl"
FAILED_HOSTS = "failed_hosts.jsonl"
HOST_FAILURES = 2
"""So many failures of a host, and a run keeps away from it."""
LOCK_SECONDS = 5.0
"""How long a node waits for another that writes the same file."""
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


def count_suspicions(run_dir: Path) -> int:
    """How many lines tell of suspects by now. OSError."""
    return len(_lines(run_dir, SUSPECTS))


def read_suspects(run_dir: Path, attempt: int, *, after: int = 0) -> dict[int, str]:
    """Rank -> why, of those that are suspected in an attempt. `after`: lines that were there before; each start of a
    job counts its attempts anew. OSError."""
    found: dict[int, str] = {}
    for line in _lines(run_dir, SUSPECTS)[after:]:
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


def avoid_host(run_dir: Path, what: Avoided) -> bool:
    """Keeps a whole host away from what follows: one line, however many nodes say so. -> whether it is new. OSError."""
    with _only_writer(run_dir, AVOIDED):
        if what.host in read_whole_avoided(run_dir).hosts:
            return False
        avoid(run_dir, what)
    return True


def tell_failed_host(run_dir: Path, host: str, *, start: str, why: str) -> None:
    """Says that the ranks of a host failed in a start of a job, and not for others. OSError."""
    with _only_writer(run_dir, FAILED_HOSTS):
        append_line(run_dir, FAILED_HOSTS, json.dumps({"host": host, "start": start, "why": why}))


def failures_of_host(run_dir: Path, host: str) -> dict[str, str]:
    """Start of a job -> why, of those in which this host failed and no other one: where several fail at once, as they
    do for a bug or with the power of a rack, none of them is to blame. OSError."""
    hosts_of: dict[str, set[str]] = {}
    why_of: dict[str, str] = {}
    for line in _lines(run_dir, FAILED_HOSTS):
        start = str(line.get("start", ""))
        hosts_of.setdefault(start, set()).add(str(line.get("host", "")))
        why_of.setdefault(start, str(line.get("why", "")))
    return {start: why_of[start] for start, hosts in hosts_of.items() if hosts == {host}}


@contextmanager
def _only_writer(run_dir: Path, name: str) -> Iterator[None]:
    """While entered, no other node writes this file, as far as file systems have locks. OSError: it can't be opened."""
    fd = open_inside(run_dir, name, os.O_RDWR | os.O_CREAT)
    give_up = time.monotonic() + LOCK_SECONDS
    try:
        while time.monotonic() < give_up:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break  # a file system without locks: a line may stand there twice, which says the same
        yield
    finally:
        os.close(fd)


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
