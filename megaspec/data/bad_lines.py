"""Lines that are no documents: found in one pass over all inputs, counted, listed in a file beside the output.

Note "What comes first". Every input is read before a tokenizer is trained or a token is written: who has bad lines
learns of all of them at once, after minutes and not after the hours that tokenizing takes. What is found of a part is
kept with the job, so a job that goes on reads no part a second time.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError, WriteError, printable
from megaspec.data.files import write_atomically
from megaspec.data.inputs import InputPart
from megaspec.data.scan_worker import ScanSettings, scan_path
from megaspec.data.text_fields import BadLine, TextFields
from megaspec.data.workers import run_workers

_SHOWN = 10


@dataclass(frozen=True)
class PlacedBadLine:
    """A bad line and where it stands."""

    path: str
    line: int
    """Line or row of the file, from 1."""
    bad: BadLine

    def __str__(self) -> str:
        return printable(f"{self.path}:{self.line}: {self.bad}")


def bad_lines_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bad-lines.txt")


class InputScan:
    """What a pass over the inputs found, part by part."""

    def __init__(self, folder: str, parts: list[InputPart], entries: dict[int, dict[str, Any]]):
        self._folder = folder
        self._parts = parts
        self._entries = entries
        # lines of the file before each slice of each part
        self._above: dict[int, list[int]] = {}
        self._count_lines()

    def kinds(self) -> dict[str, int]:
        """Bad lines by what is wrong with them."""
        counted: Counter[str] = Counter()
        for entry in self._entries.values():
            counted.update(entry["bad"])
        return dict(sorted(counted.items()))

    def of_part(self, number: int) -> dict[str, int]:
        """The same of one part."""
        return self._entries[number]["bad"]

    def place(self, part: InputPart, number: int, line: int) -> tuple[str, int]:
        """File and line of a line of slice `number` of a part."""
        return part.slices[number].path, self._above[part.number][number] + line

    def bad_lines(self, extra: dict[int, list[tuple[int, int, str]]] | None = None) -> Iterator[PlacedBadLine]:
        """All bad lines in the order of the inputs. extra: of parts, more of them, as (slice, line, kind)."""
        more = extra or {}
        for part in self._parts:
            rows = self._rows(part.number)
            if part.number in more:
                added = [(number, line, kind, "") for number, line, kind in more[part.number]]
                rows = iter(sorted([*rows, *added]))
            for number, line, kind, detail in rows:
                path, at = self.place(part, number, line)
                yield PlacedBadLine(path, at, BadLine(kind, detail))

    def _rows(self, number: int) -> Iterator[tuple[int, int, str, str]]:
        if not self._entries[number]["bad"]:
            return
        with open(scan_path(self._folder, number, ".bad"), "rb") as file:
            for line in file:
                yield tuple(json.loads(line))

    def _count_lines(self) -> None:
        counted: Counter[str] = Counter()
        for part in self._parts:
            above: list[int] = []
            for piece, n_lines in zip(part.slices, self._entries[part.number]["lines"], strict=True):
                # rows of other kinds count from the beginning of the file
                is_counted = piece.kind == "jsonl"
                above.append(counted[piece.path] if is_counted else 0)
                if is_counted:
                    counted[piece.path] += n_lines
            self._above[part.number] = above


def scan_inputs(
    folder: str, parts: list[InputPart], fields: TextFields, workers: int, progress: Callable[[int], None]
) -> InputScan:
    """Read all parts that were not read before. progress: called with the bytes of input that are read.

    Raises DataError for an input that can't be read, WriteError.
    """
    entries: dict[int, dict[str, Any]] = {}
    missing = []
    done = 0
    for part in parts:
        entry = _load(folder, part)
        if entry is None:
            missing.append(part)
        else:
            entries[part.number] = entry
            done += part.bytes
    running: Counter[int] = Counter()
    for part, event in run_workers("megaspec.data.scan_worker", missing, ScanSettings(folder, fields), workers):
        if "done" in event:
            running.pop(part.number, None)
            entry = _load(folder, part)
            if entry is None:
                raise WriteError(f"{scan_path(folder, part.number, '.bad')}: not what was written")
            entries[part.number] = entry
            done += part.bytes
        else:
            running[part.number] = min(part.bytes, running[part.number] + event["characters"])
        progress(done + running.total())
    return InputScan(folder, parts, entries)


def check_bad_lines(scan: InputScan, prefix: str, allowed: int, *, extra: dict[int, Any] | None = None) -> None:
    """List the bad lines in a file. Raises DataError, which names the first, where there are more than allowed."""
    path = bad_lines_path(prefix)
    kinds = Counter(scan.kinds())
    for rows in (extra or {}).values():
        kinds.update(kind for _, _, kind in rows)
    total = kinds.total()
    if not total:
        path.unlink(missing_ok=True)
        return
    write_atomically(path, (f"{line}\n".encode(errors="backslashreplace") for line in scan.bad_lines(extra)))
    if total <= allowed:
        return
    shown: list[str] = []
    for line in scan.bad_lines(extra):
        shown.append(f"  {line}")
        if len(shown) == _SHOWN:
            break
    allows = ""
    if allowed:
        allows = f", --skip-bad {allowed} allows {allowed}"
    lines = [f"{total} bad {_lines(total)} ({counted_kinds(kinds)}){allows}:", *shown]
    if total > len(shown):
        lines.append(f"  and {total - len(shown)} more")
    lines.append(f"all of them: {path}; mend the input, or leave them out with --skip-bad")
    raise DataError(lines)


def counted_kinds(kinds: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))


def _lines(count: int) -> str:
    return "line" if count == 1 else "lines"


def _load(folder: str, part: InputPart) -> dict[str, Any] | None:
    """What NUMBER.scan says; None where it isn't there, is of another stretch, or its list is not what was written."""
    try:
        entry = json.loads(scan_path(folder, part.number, ".scan").read_bytes())
        crc = 0
        with open(scan_path(folder, part.number, ".bad"), "rb") as file:
            while chunk := file.read(2**20):
                crc = zlib.crc32(chunk, crc)
    except (OSError, ValueError):
        return None
    if entry["part"] != part.identity or entry["bad_crc32"] != crc:
        return None
    return entry
