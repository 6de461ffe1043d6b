"""The parts of a preparation job: which are there, having the others made, and what is wrong with the input."""

import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, WriteError
from megaspec.data.bad_lines import InputScan, check_bad_lines
from megaspec.data.inputs import InputPart
from megaspec.data.manifest import SampleRecord
from megaspec.data.prepare_worker import NO_TOKENS, PrepareSettings, part_path
from megaspec.data.workers import run_workers

_SHOWN = 10
# Different lost characters that a manifest keeps.
_LOST_KEPT = 20
_CHUNK = 2**22


@dataclass(frozen=True)
class JobProgress:
    """How far a job is."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    bad: int
    stage: str
    """`lines`, `tokenizer`, `tokens` or `files`."""


@dataclass(frozen=True)
class Allowed:
    """What does not stop a job."""

    bad_lines: int
    """So many lines that are no documents."""
    losses: bool
    """A tokenizer that loses characters."""


def make_parts(
    prefix: str,
    parts: list[InputPart],
    scan: InputScan,
    settings: PrepareSettings,
    workers: int,
    allowed: Allowed,
    progress: Callable[[JobProgress], None],
) -> tuple[list[dict[str, Any]], int]:
    """What NUMBER.json says of every part, made where it isn't there; and how many were there.

    Raises DataError where a part holds other bad lines than the pass over the inputs found: it changed since.
    """
    entries: dict[int, dict[str, Any]] = {}
    missing = []
    bytes_total = 0
    bytes_done = 0
    for part in parts:
        bytes_total += part.bytes
        entry = load_part(settings.folder, part)
        if entry is None:
            missing.append(part)
        else:
            entries[part.number] = entry
            bytes_done += part.bytes
    n_reused = len(entries)
    check_losses(parts, scan, entries, settings, allowed)
    check_bad(prefix, parts, scan, entries, allowed.bad_lines)
    # characters, documents and tokens of the parts that are being made, as their workers tell them
    running: dict[int, Counter[str]] = {}
    for part, event in run_workers("megaspec.data.prepare_worker", missing, settings, workers):
        if "done" in event:
            running.pop(part.number, None)
            # what a worker says it wrote is read back and held against its checksums
            entry = load_part(settings.folder, part)
            if entry is None:
                raise WriteError(f"{part_path(settings.folder, part.number, '.bin')}: not what was written")
            entries[part.number] = entry
            bytes_done += part.bytes
            # Before bad lines: a document of which nothing is left counts as an empty one.
            if entry["sample"]["lost_characters"]:
                check_losses(parts, scan, entries, settings, allowed)
            if entry["no_tokens"] and _n_bad(entries) > allowed.bad_lines:
                check_bad(prefix, parts, scan, entries, allowed.bad_lines)
        else:
            running.setdefault(part.number, Counter()).update(event)
        extra = sum(running.values(), Counter())
        documents, tokens, bad = sums(list(entries.values()))
        progress(
            JobProgress(
                # a character has a byte at least
                bytes_done=min(bytes_total, bytes_done + extra["characters"]),
                bytes_total=bytes_total,
                documents=documents + extra["documents"],
                tokens=tokens + extra["tokens"],
                bad=bad,
                stage="tokens",
            )
        )
    # what came after the last time, and whether each part held what the pass over the inputs saw
    check_bad(prefix, parts, scan, entries, allowed.bad_lines)
    return [entries[part.number] for part in parts], n_reused


def load_part(folder: str, part: InputPart) -> dict[str, Any] | None:
    """What NUMBER.json says, None when the part isn't whole."""
    entry = read_json(part_path(folder, part.number, ".json"))
    if entry is None or entry["part"] != part.identity:
        return None
    data = part_path(folder, part.number, ".bin")
    lengths = part_path(folder, part.number, ".len")
    # cheap checks first: all of .bin is read only where everything else is right
    if not data.exists() or data.stat().st_size != entry["bytes"] or not lengths.exists():
        return None
    if zlib.crc32(lengths.read_bytes()) != entry["lengths_crc32"]:
        return None
    crc = 0
    with open(data, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    if crc != entry["crc32"]:
        return None
    return entry


def sums(entries: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Documents, tokens and bad lines of parts."""
    documents = 0
    tokens = 0
    bad = 0
    for entry in entries:
        documents += entry["documents"]
        tokens += entry["tokens"]
        bad += sum(entry["bad"].values())
    return documents, tokens, bad


def bad_by_kind(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Bad lines of parts, counted by what is wrong with them."""
    kinds: Counter[str] = Counter()
    for entry in entries:
        kinds.update(entry["bad"])
    return dict(kinds)


def check_bad(
    prefix: str, parts: list[InputPart], scan: InputScan, entries: dict[int, dict[str, Any]], allowed: int
) -> None:
    """Raises DataError that tells places, where there are more bad lines than are left out.

    Those that the tokenizer leaves nothing of are known only now, part by part.
    """
    extra: dict[int, list[tuple[int, int, str]]] = {}
    for part in parts:
        entry = entries.get(part.number)
        if entry is None:
            continue
        found = {kind: count for kind, count in entry["bad"].items() if kind != NO_TOKENS}
        if found != scan.of_part(part.number):
            raise DataError(f"{part.slices[0].path}: changed while it was read; start the same command again")
        if entry["no_tokens"]:
            extra[part.number] = [(number, line, NO_TOKENS) for number, line in entry["no_tokens"]]
    check_bad_lines(scan, prefix, allowed, extra=extra)


def _n_bad(entries: dict[int, dict[str, Any]]) -> int:
    return sum(bad_by_kind(list(entries.values())).values())


def _so_far(parts: list[InputPart], entries: dict[int, dict[str, Any]]) -> str:
    """What a count says that is not yet of all parts."""
    if len(entries) < len(parts):
        return " so far"
    return ""


def sample_of(entries: list[dict[str, Any]]) -> SampleRecord:
    """What the samples of all parts say together."""
    lost: Counter[str] = Counter()
    counts = {"documents": 0, "characters": 0, "lossy_documents": 0, "lost_characters": 0}
    for entry in entries:
        sample = entry["sample"]
        lost.update(sample["lost"])
        for name in counts:
            counts[name] += sample[name]
    # by count, then by character, so that the manifest doesn't depend on the order of the parts
    commonest = sorted(lost.items(), key=lambda one: (-one[1], one[0]))[:_LOST_KEPT]
    return SampleRecord(lost=dict(commonest), **counts)


def losses(sample: SampleRecord) -> str:
    """What was lost, in a line."""
    shown = [f"{character!r} {count}" for character, count in list(sample.lost.items())[:_SHOWN]]
    if len(sample.lost) > _SHOWN:
        shown.append("...")
    return (
        f"{sample.lost_characters:,} of {sample.characters:,} characters in {sample.lossy_documents:,} of "
        f"{sample.documents:,} sampled documents ({', '.join(shown)})"
    )


def check_losses(
    parts: list[InputPart],
    scan: InputScan,
    entries: dict[int, dict[str, Any]],
    settings: PrepareSettings,
    allowed: Allowed,
) -> None:
    """Raises DataError where the tokenizer loses characters and may not."""
    sample = sample_of(list(entries.values()))
    if allowed.losses or not sample.lost_characters:
        return
    shown = []
    for part in parts:
        for number, line in entries.get(part.number, {}).get("sample", {}).get("places", ()):
            if len(shown) < _SHOWN:
                path, at = scan.place(part, number, line)
                shown.append(f"  {path}:{at}")
    raise DataError(
        [
            f"{settings.tokenizer_where}: this tokenizer loses {losses(sample)}{_so_far(parts, entries)}:",
            *shown,
            "take one that knows these characters, or accept the loss with --allow-lossy-tokenizer",
        ]
    )


def read_json(path: Path) -> Any:
    """What a file of a job says; None where it isn't there or was torn by a kill."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
