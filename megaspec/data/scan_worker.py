"""One worker that looks for bad lines. Started as `python -m megaspec.data.scan_worker`, before anything is tokenized.

Standard input: one JSON line of settings, then one line per part. Standard output: one JSON line per event:
{"characters": n}, {"done": part number}, {"data_error": text}, {"write_error": text}.
"""

import json
import os
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspec.data.files import write_error
from megaspec.data.inputs import InputPart, read_lines
from megaspec.data.serve_parts import Report, Work, serve_parts
from megaspec.data.text_fields import BadLine, TextFields

_SECONDS_BETWEEN_REPORTS = 0.5
# Of what a reason tells of a line.
DETAIL_LENGTH = 200


@dataclass(frozen=True)
class ScanSettings:
    """What all parts share."""

    folder: str
    """Folder of the parts' files."""
    fields: TextFields
    """Which fields of a line are its document."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ScanSettings":
        return ScanSettings(value["folder"], TextFields(tuple(value["fields"]["keys"]), value["fields"]["join"]))


def scan_path(folder: str | Path, number: int, ending: str) -> Path:
    """NUMBER.bad: a JSON line [slice, line of the slice, kind, detail] per bad line. NUMBER.scan: what was counted."""
    return Path(folder) / f"{number:06d}{ending}"


def scan_part(part: InputPart, settings: ScanSettings, report: Report) -> None:
    """Make NUMBER.bad and, last, NUMBER.scan of a part. Raises DataError for unreadable input, WriteError."""
    lines: list[int] = []
    kinds: Counter[str] = Counter()
    documents = 0
    characters = 0
    crc = 0
    told = time.monotonic()
    temporary = scan_path(settings.folder, part.number, f".bad.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", buffering=2**20) as file:
            for number, piece in enumerate(part.slices):
                last = 0
                for last, text in read_lines(piece, settings.fields):
                    if isinstance(text, BadLine):
                        kinds[text.kind] += 1
                        row = [number, last, text.kind, text.detail[:DETAIL_LENGTH]]
                        data = json.dumps(row).encode() + b"\n"
                        crc = zlib.crc32(data, crc)
                        file.write(data)
                    elif text is not None:
                        documents += 1
                        characters += len(text)
                        if not documents % 256 and time.monotonic() - told > _SECONDS_BETWEEN_REPORTS:
                            report({"characters": characters})
                            characters = 0
                            told = time.monotonic()
                lines.append(last)
        os.replace(temporary, scan_path(settings.folder, part.number, ".bad"))
        entry = {
            "part": part.identity,
            "lines": lines,
            "documents": documents,
            "bad": dict(kinds),
            "bad_crc32": crc,
        }
        path = scan_path(settings.folder, part.number, ".scan")
        written = scan_path(settings.folder, part.number, f".scan.{os.getpid()}.tmp")
        written.write_bytes(json.dumps(entry).encode())
        os.replace(written, path)
    except OSError as error:
        raise write_error(error.filename or temporary, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def begin(settings: dict[str, Any], report: Report) -> Work:
    """What scans the parts."""
    shared = ScanSettings.from_json(settings)
    return lambda part: scan_part(part, shared, report)


if __name__ == "__main__":
    sys.exit(serve_parts(begin))
