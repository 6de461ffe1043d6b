"""The parts of a preparation job: which are there, having the others made, and what is wrong with the input."""

import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, WriteError
from megaspec.data.inputs import Part, lines_before
from megaspec.data.prepare_worker import Settings, part_path
from megaspec.data.workers import run_workers

_SHOWN = 10
_CHUNK = 2**22


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    bad: int
    stage: str
    """`tokenizer`, `tokens` or `files`."""


def make_parts(
    parts: list[Part],
    settings: Settings,
    workers: int,
    skip_bad: int,
    progress: Callable[[Progress], None],
) -> tuple[list[dict[str, Any]], int]:
    """What NUMBER.json says of every part, made where it isn't there; and how many were there."""
    entries = {part.number: entry for part in parts if (entry := load_part(settings.folder, part)) is not None}
    reused = len(entries)
    total = sum(part.bytes for part in parts)
    done = sum(part.bytes for part in parts if part.number in entries)
    running: dict[int, Counter[str]] = {}
    check_bad(parts, entries, skip_bad)
    missing = [part for part in parts if part.number not in entries]
    for part, event in run_workers(missing, settings, workers):
        if "done" in event:
            running.pop(part.number, None)
            entry = load_part(settings.folder, part)
            if entry is None:
                raise WriteError(f"{part_path(settings.folder, part.number, '.bin')}: not what was written")
            entries[part.number] = entry
            done += part.bytes
            check_bad(parts, entries, skip_bad)
        else:
            running.setdefault(part.number, Counter()).update(event)
        extra = sum(running.values(), Counter())
        documents, tokens, bad = sums(list(entries.values()))
        bytes_done = min(total, done + extra["characters"])
        progress(Progress(bytes_done, total, documents + extra["documents"], tokens + extra["tokens"], bad, "tokens"))
    return [entries[part.number] for part in parts], reused


def load_part(folder: str, part: Part) -> dict[str, Any] | None:
    """What NUMBER.json says, None when the part isn't whole."""
    entry = read_json(part_path(folder, part.number, ".json"))
    if entry is None or entry["part"] != part.identity:
        return None
    data, lengths = part_path(folder, part.number, ".bin"), part_path(folder, part.number, ".len")
    if not data.exists() or data.stat().st_size != entry["bytes"] or not lengths.exists():
        return None
    if zlib.crc32(lengths.read_bytes()) != entry["lengths_crc32"]:
        return None
    crc = 0
    with open(data, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return entry if crc == entry["crc32"] else None


def sums(entries: list[dict[str, Any]]) -> tuple[int, int, int]:
    return (
        sum(entry["documents"] for entry in entries),
        sum(entry["tokens"] for entry in entries),
        sum(sum(entry["bad"].values()) for entry in entries),
    )


def bad_by_kind(entries: list[dict[str, Any]]) -> dict[str, int]:
    return dict(sum((Counter(entry["bad"]) for entry in entries), Counter()))


def check_bad(parts: list[Part], entries: dict[int, dict[str, Any]], skip_bad: int) -> None:
    kinds = bad_by_kind(list(entries.values()))
    n_bad = sum(kinds.values())
    if n_bad <= skip_bad:
        return
    shown = []
    for part in parts:
        for number, line, kind in entries.get(part.number, {}).get("places", ()):
            if len(shown) < _SHOWN:
                piece = part.slices[number]
                shown.append(f"  {piece.path}:{lines_before(piece) + line}: {kind}")
    counted = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    more = [f"  and {n_bad - len(shown)} more"] if n_bad > len(shown) else []
    still = "" if len(entries) == len(parts) else " so far"
    raise DataError(
        [
            f"{n_bad} bad lines{still} ({counted}), --skip-bad {skip_bad} allows {skip_bad}:",
            *shown,
            *more,
            "mend the input, or leave them out with a larger --skip-bad",
        ]
    )


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
