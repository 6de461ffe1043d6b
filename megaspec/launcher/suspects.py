"""Who is suspected to compute wrongly: what ranks tell a supervisor, and what it keeps away from. Torch-free.

    suspects.jsonl   {"attempt": 3, "ranks": [1], "why": "..."}; every rank that ends with 77 writes it
    avoided.jsonl    {"host": "node1", "device": "2", "attempt": 3, "why": "..."}; the supervisor writes it

A device that stands in avoided.jsonl is not used again by this run; delete its line, or the file, once it is mended. A
`device` of null stands for the whole host.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaspec.core.regular_files import open_inside, read_inside

SUSPECTS = "suspects.jsonl"
AVOIDED = "avoided.jsonl"
_LIMIT = 16 << 20


@dataclass(frozen=True)
class Avoided:
    """A device, or a host, that a run keeps away from."""

    host: str
    device: str | None
    attempt: int
    why: str


def tell_suspects(run_dir: Path, *, attempt: int, ranks: Sequence[int], why: str) -> None:
    """Says which ranks of an attempt are suspected. OSError."""
    _append(run_dir, SUSPECTS, {"attempt": attempt, "ranks": list(ranks), "why": why})


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
    _append(run_dir, AVOIDED, asdict(what))


def read_avoided(run_dir: Path) -> list[Avoided]:
    """What the run keeps away from; lines that are torn, or not ours, are left out."""
    found = []
    for line in _lines(run_dir, AVOIDED):
        try:
            found.append(Avoided(**line))
        except TypeError:
            continue
    return found


def avoided_hosts(run_dir: Path) -> dict[str, str]:
    """Host -> why, of those that the run keeps away from altogether: what a scheduler may be told to exclude."""
    return {one.host: one.why for one in read_avoided(run_dir) if one.device is None}


def _append(run_dir: Path, name: str, line: dict[str, Any]) -> None:
    fd = open_inside(run_dir, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


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
