"""JSON lines: plain files by stretches of bytes, compressed ones whole.

Note "Blank lines". A line of nothing but white space is no record and no mistake: most writers end a file with one.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from megaspec.core.errors import DataError
from megaspec.data.text_fields import BadLine, TextFields, bad_utf8, found

LINE_LIMIT = 64 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Of the byte after the magic number: whether the frame ends with a checksum of its content (RFC 8878).
_ZSTD_CHECKSUM = 4


def read_lines(path: str, start: int, stop: int, fields: TextFields) -> Iterator[tuple[int, str | BadLine | None]]:
    """(line, text, what is wrong, or None for a blank line) of the lines that begin in the bytes start to stop.

    Lines count from 1 at the first of them. Raises DataError for a file that can't be read.
    """
    with opened(path) as file:
        position = 0
        if start:
            # A line belongs to the slice in which it begins. From the byte before the slice on: where that ends a line,
            # nothing of the slice is skipped.
            file.seek(start - 1)
            position = start - 1 + _skip_line(file)
        yield from _lines(file, position, stop, fields)


def read_compressed(path: str, fields: TextFields) -> Iterator[tuple[int, str | BadLine | None]]:
    """The same of a .gz or .zst file. Raises DataError, for a damaged one as soon as that is seen."""
    with opened(path) as raw, _damage_told(path), _DECOMPRESSORS[ending(path)](path, raw) as file:
        yield from _lines(file, 0, None, fields)


def ending(path: str) -> str:
    """How a compressed file ends: `.gz` or `.zst`; "" for one that is not compressed."""
    for known in _DECOMPRESSORS:
        if path.lower().endswith(known):
            return known
    return ""


def carries_checksum(path: str) -> bool:
    """Whether damage in a compressed file shows; in a zstd frame without a checksum it may be other text."""
    if ending(path) == ".gz":
        return True
    with opened(path) as file:
        head = file.read(5)
    return head[:4] == _ZSTD_MAGIC and bool(head[4] & _ZSTD_CHECKSUM)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """A file to read. Raises DataError."""
    try:
        with open(path, "rb", buffering=2**20) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


def _lines(
    file: BinaryIO, position: int, stop: int | None, fields: TextFields
) -> Iterator[tuple[int, str | BadLine | None]]:
    """The lines that begin before `stop`; position: number of the first byte in the file."""
    line = 0
    while stop is None or position < stop:
        raw = file.readline(LINE_LIMIT)
        if not raw:
            return
        position += len(raw)
        line += 1
        if len(raw) == LINE_LIMIT and not raw.endswith(b"\n"):
            position += _skip_line(file)
            yield line, BadLine("line too long", f"more than {LINE_LIMIT:,} bytes")
            continue
        if position == len(raw) and raw.startswith(_BYTE_ORDER_MARK):
            raw = raw[len(_BYTE_ORDER_MARK) :]
        if not raw or raw.isspace():
            yield line, None
        else:
            yield line, _text_of_line(raw, fields)


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while chunk := file.readline(LINE_LIMIT):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _text_of_line(raw: bytes, fields: TextFields) -> str | BadLine:
    try:
        decoded = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return bad_utf8(error)
    try:
        # Counting is cheap, the hook is not: only a line that may hold a key twice gets it.
        hook = None
        for name in fields.spellings:
            if raw.count(name) > 1:
                hook = _once
        record = json.loads(decoded, object_pairs_hook=hook, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return BadLine("broken JSON", f"{error.msg.removesuffix(' at')} at character {error.pos + 1}")
    except RecursionError:
        return BadLine("broken JSON", "brackets within brackets without end")
    except ValueError as error:
        return BadLine("broken JSON", str(error))
    if not isinstance(record, dict):
        return BadLine("no object", f"a line must be an object, found {found(record)}")
    return fields.text(record)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key twice in one object")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def _damage_told(path: str) -> Iterator[None]:
    """Whatever a decompressor raises, as DataError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        cause = str(error).strip() or type(error).__name__
        told = f"{path}: can't be decompressed: {cause}: damaged, cut off, or not what its ending says"
        raise DataError(told) from error


@contextmanager
def _gzip(path: str, raw: BinaryIO) -> Iterator[BinaryIO]:
    with gzip.GzipFile(fileobj=raw, mode="rb") as stream, io.BufferedReader(stream, 2**20) as file:
        yield file


@contextmanager
def _zstd(path: str, raw: BinaryIO) -> Iterator[BinaryIO]:
    try:
        from pyarrow import CompressedInputStream
    except ImportError as error:
        raise DataError(f"{path}: zstd needs pyarrow; install the extra megaspec[parquet]") from error
    with CompressedInputStream(raw, "zstd") as stream, io.BufferedReader(stream, 2**20) as file:
        yield file


_DECOMPRESSORS: dict[str, Callable[[str, BinaryIO], Any]] = {".gz": _gzip, ".zst": _zstd}
