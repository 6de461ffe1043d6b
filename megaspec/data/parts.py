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
from megaspec.data.manifest import SampleRecord
from megaspec.data.prepare_worker import Settings, part_path
from megaspec.data.workers import run_workers

_SHOWN = 10
# Different lost characters that a manifest keeps.
_LOST_KEPT = 20
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


@dataclass(frozen=True)
class Allowed:
    """What does not stop a job."""

    bad_lines: int
    """So many lines that are no documents."""
    losses: bool
    """A tokenizer that loses characters."""


def make_parts(
    parts: list[Part],
    settings: Settings,
    workers: int,
    allowed: Allowed,
    progress: Callable[[Progress], None],
) -> tuple[list[dict[str, Any]], int]:
    """What NUMBER.json says of every part, made where it isn't there; and how many were there."""
    entries = {part.number: entry for part in parts if (entry := load_part(settings.folder, part)) is not None}
    reused = len(entries)
    total = sum(part.bytes for part in parts)
    done = sum(part.bytes for part in parts if part.number in entries)
    running: dict[int, Counter[str]] = {}
    check_losses(parts, entries, settings, allowed)
    check_bad(parts, entries, allowed.bad_lines)
    missing = [part for part in parts if part.number not in entries]
    for part, event in run_workers(missing, settings, workers):
        if "done" in event:
            running.pop(part.number, None)
            entry = load_part(settings.folder, part)
            if entry is None:
                raise WriteError(f"{part_path(settings.folder, part.number, '.bin')}: not what was written")
            entries[part.number] = entry
            done += part.bytes
            # Before bad lines: a document of which nothing is left counts as an empty one.
            if entry["sample"]["lost_characters"]:
                check_losses(parts, entries, settings, allowed)
            check_bad(parts, entries, allowed.bad_lines)
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


def sample_of(entries: list[dict[str, Any]]) -> SampleRecord:
    """What the samples of all parts say together."""
    samples = [entry["sample"] for entry in entries]
    lost: Counter[str] = Counter()
    for sample in samples:
        lost.update(sample["lost"])
    commonest = sorted(lost.items(), key=lambda one: (-one[1], one[0]))[:_LOST_KEPT]
    names = ("documents", "characters", "lossy_documents", "lost_characters")
    return SampleRecord(lost=dict(commonest), **{name: sum(sample[name] for sample in samples) for name in names})


def losses(sample: SampleRecord) -> str:
    """What was lost, in a line."""
    shown = [f"{character!r} {count}" for character, count in list(sample.lost.items())[:_SHOWN]]
    more = ", ..." if len(sample.lost) > _SHOWN else ""
    return (
        f"{sample.lost_characters:,} of {sample.characters:,} characters in {sample.lossy_documents:,} of "
        f"{sample.documents:,} sampled documents ({', '.join(shown)}{more})"
    )


def check_losses(parts: list[Part], entries: dict[int, dict[str, Any]], settings: Settings, allowed: Allowed) -> None:
    """Raises DataError where the tokenizer loses characters and may not."""
    sample = sample_of(list(entries.values()))
    if allowed.losses or not sample.lost_characters:
        return
    shown = []
    for part in parts:
        for number, line in entries.get(part.number, {}).get("sample", {}).get("places", ()):
            if len(shown) < _SHOWN:
                piece = part.slices[number]
                shown.append(f"  {piece.path}:{lines_before(piece) + line}")
    still = "" if len(entries) == len(parts) else " so far"
    raise DataError(
        [
            f"{settings.tokenizer_where}: this tokenizer loses {losses(sample)}{still}:",
            *shown,
            "take one that knows these characters, or accept the loss with --allow-lossy-tokenizer",
        ]
    )


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
