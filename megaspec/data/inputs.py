"""From what a user names to parts of equal work, and from a part to documents.

How the input is cut depends on the input alone, never on the number of workers, so the result doesn't either.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megaspec.core.errors import DataError
from megaspec.data import parquet, python_corpus

PYTHON_CORPUS = "python"
LINE_LIMIT = 64 * 2**20
# Bytes of a part. There are about _PARTS of them, where that makes them neither too small nor too large.
SMALLEST_PART = 2**19
LARGEST_PART = 256 * 2**20
_PARTS = 1024
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".md": "text", ".parquet": "parquet"}
_KNOWN = "a .jsonl, .ndjson, .txt, .md or .parquet file, a folder of them, or the word python"

BAD_KINDS = ("broken JSON", "missing key", "wrong type", "bad UTF-8", "empty document", "line too long")


@dataclass(frozen=True)
class InputSlice:
    """A stretch of one input file: bytes of JSON lines, row groups of parquet, units of the Python corpus."""

    kind: str
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class InputPart:
    """The work of one worker at a time."""

    number: int
    slices: tuple[InputSlice, ...]
    bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def identity(self) -> str:
        """Hash of what the part covers."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def from_json(value: dict[str, Any]) -> "InputPart":
        return InputPart(value["number"], tuple(InputSlice(**s) for s in value["slices"]), value["bytes"])


@dataclass(frozen=True)
class BadLine:
    """A line that is no document."""

    kind: str
    """One of BAD_KINDS."""


@dataclass(frozen=True)
class Input:
    """One thing that the user named, with the files in it."""

    name: str
    files: tuple[tuple[str, str, int, int], ...]
    """(kind, path, bytes, time of change in ns) of each file, in order."""
    passed_over: int
    """Files of a folder that are no text."""
    touched: tuple[int, ...] = ()
    """Time in ns at which each file was last written or given other attributes, times of change among them."""


def find_inputs(names: list[str]) -> list[Input]:
    """The files behind the names, folders searched through in the order of their paths.

    Raises DataError for what doesn't exist, is of no known kind, or holds nothing.
    """
    found: list[Input] = []
    for name in names:
        try:
            found.append(_python_input() if name == PYTHON_CORPUS else _file_input(name))
        except OSError as error:
            raise DataError(f"{error.filename or name}: can't be read: {error.strerror or error}") from error
    return found


def cut(inputs: list[Input]) -> list[InputPart]:
    """The inputs as parts, in order."""
    files = [file for given in inputs for file in given.files]
    total = sum(size for _, _, size, _ in files)
    target = min(max(total // _PARTS, SMALLEST_PART), LARGEST_PART)
    parts: list[InputPart] = []
    slices: list[InputSlice] = []
    filled = 0

    def close_part() -> None:
        nonlocal filled
        parts.append(InputPart(len(parts), tuple(slices), filled))
        slices.clear()
        filled = 0

    for kind, path, size, _ in files:
        for piece, n_bytes in _CUTTERS[kind](path, size, target):
            # a slice that is larger than the target is a part by itself
            if slices and filled + n_bytes > target:
                close_part()
            slices.append(piece)
            filled += n_bytes
    if slices:
        close_part()
    return parts


def read_documents(piece: InputSlice, key: str) -> Iterator[tuple[int, str | BadLine]]:
    """(line, text or what is wrong with it) of a slice. Lines count from 1 at the beginning of the slice.

    Raises DataError when a file as a whole can't be read.
    """
    yield from _READERS[piece.kind](piece, key)


def carries_checksums(piece: InputSlice, key: str) -> bool:
    """False for a slice that has been read, in which damage may be other text without a word. Raises DataError."""
    return piece.kind != "parquet" or parquet.carries_checksums(piece.path, piece.start, key)


def lines_before(piece: InputSlice) -> int:
    """How many lines of the file lie before the slice."""
    if piece.kind != "jsonl" or piece.start == 0:
        return 0
    count = 0
    left = piece.start
    chunk = b""
    with _opened(piece.path) as file:
        while left and (chunk := file.read(min(2**20, left))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    # A line that begins before the slice and ends in it is none of the slice's.
    return count + (not chunk.endswith(b"\n"))


def _python_input() -> Input:
    size = sum(unit.bytes for unit in python_corpus.units())
    corpus = ("python", python_corpus.identity(), size, 0)
    return Input(PYTHON_CORPUS, (corpus,), 0)


def _file_input(name: str) -> Input:
    root = Path(name)
    if root.is_dir():
        found = _files_below(root)
        known = [path for path in found if path.suffix.lower() in _KINDS]
        if not known:
            raise DataError(f"{name}: no .jsonl, .ndjson, .txt, .md or .parquet file in this folder")
        return _input_of(name, known, len(found) - len(known))
    if not root.exists():
        raise DataError(f"{name}: no such file or folder; an input is {_KNOWN}")
    if root.suffix.lower() not in _KINDS:
        raise DataError(f"{name}: an input is {_KNOWN}; JSON lines need the ending .jsonl")
    return _input_of(name, [root], 0)


def _files_below(root: Path) -> list[Path]:
    """All files of a folder, in the order of their paths. Raises OSError for a folder in it that can't be read,
    DataError for a link to nothing that would be an input."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for folder, _, names in os.walk(root, onerror=refuse):
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                found.append(path)
            elif path.is_symlink() and not path.exists() and path.suffix.lower() in _KINDS:
                raise DataError(f"{path}: a link to nothing; put its file back, or remove the link")
    return sorted(found)


def _input_of(name: str, paths: list[Path], passed_over: int) -> Input:
    files = []
    touched = []
    for path in paths:
        status = path.stat()
        files.append((_KINDS[path.suffix.lower()], str(path), status.st_size, status.st_mtime_ns))
        touched.append(status.st_ctime_ns)
    return Input(name, tuple(files), passed_over, tuple(touched))


def _cut_jsonl(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for start in range(0, size, target):
        stop = min(start + target, size)
        yield InputSlice("jsonl", path, start, stop), stop - start


def _cut_text(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    yield InputSlice("text", path, 0, size), size


def _cut_parquet(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for group, n_bytes in enumerate(parquet.row_group_sizes(path)):
        yield InputSlice("parquet", path, group, group + 1), n_bytes


def _cut_python(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for unit in python_corpus.units():
        yield InputSlice("python", f"{unit.kind}:{unit.name}", 0, unit.bytes), unit.bytes


def _read_jsonl(piece: InputSlice, key: str) -> Iterator[tuple[int, str | BadLine]]:
    quoted = json.dumps(key).encode()
    with _opened(piece.path) as file:
        position = 0
        if piece.start:
            # A line belongs to the slice in which it begins. From the byte before the slice on: where that ends a line,
            # nothing of the slice is skipped.
            file.seek(piece.start - 1)
            position = piece.start - 1 + _skip_line(file)
        line = 0
        while position < piece.stop:
            raw = file.readline(LINE_LIMIT)
            if not raw:
                return
            position += len(raw)
            line += 1
            if len(raw) == LINE_LIMIT and not raw.endswith(b"\n"):
                position += _skip_line(file)
                yield line, BadLine("line too long")
                continue
            # a byte order mark at the beginning of the file
            if position == len(raw) and raw.startswith(b"\xef\xbb\xbf"):
                raw = raw[3:]
            yield line, _text_of_line(raw, key, quoted)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=2**20) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while chunk := file.readline(LINE_LIMIT):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _text_of_line(raw: bytes, key: str, quoted: bytes) -> str | BadLine:
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError:
        return BadLine("bad UTF-8")
    if not decoded.strip():
        return BadLine("empty document")
    try:
        # Counting is cheap, the hook is not: only a line that may hold the key twice gets it.
        hook = _once if raw.count(quoted) > 1 else None
        record = json.loads(decoded, object_pairs_hook=hook, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return BadLine("broken JSON")
    if not isinstance(record, dict):
        return BadLine("wrong type")
    if key not in record:
        return BadLine("missing key")
    return _checked(record[key])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("key twice")
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _checked(text: Any) -> str | BadLine:
    if not isinstance(text, str):
        return BadLine("wrong type")
    if not text.strip():
        return BadLine("empty document")
    if _SURROGATE.search(text):
        return BadLine("bad UTF-8")
    return text


_SURROGATE = re.compile("[\ud800-\udfff]")


def _read_text(piece: InputSlice, key: str) -> Iterator[tuple[int, str | BadLine]]:
    try:
        with _opened(piece.path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        yield 1, BadLine("bad UTF-8")
        return
    yield 1, _checked(text)


def _read_parquet(piece: InputSlice, key: str) -> Iterator[tuple[int, str | BadLine]]:
    for row, value in parquet.read_column(piece.path, piece.start, piece.stop, key):
        yield row, _arrow_text(value)


def _arrow_text(value: Any) -> str | BadLine:
    try:
        return _checked(value.as_py())
    except UnicodeDecodeError:
        return BadLine("bad UTF-8")


def _read_python(piece: InputSlice, key: str) -> Iterator[tuple[int, str | BadLine]]:
    kind, _, name = piece.path.partition(":")
    for text in python_corpus.documents(kind, name):
        if isinstance(checked := _checked(text), str):
            yield 1, checked


_CUTTERS: dict[str, Callable[[str, int, int], Iterator[tuple[InputSlice, int]]]] = {
    "jsonl": _cut_jsonl,
    "text": _cut_text,
    "parquet": _cut_parquet,
    "python": _cut_python,
}
_READERS: dict[str, Callable[[InputSlice, str], Iterator[tuple[int, str | BadLine]]]] = {
    "jsonl": _read_jsonl,
    "text": _read_text,
    "parquet": _read_parquet,
    "python": _read_python,
}


def changed(inputs: list[Input]) -> str | None:
    """The first file that is not as it was when the inputs were listed."""
    for given in inputs:
        if given.name == PYTHON_CORPUS:
            continue
        for (_, path, size, time), touched in zip(given.files, given.touched, strict=True):
            try:
                status = os.stat(path)
            except OSError:
                return path
            if (status.st_size, status.st_mtime_ns, status.st_ctime_ns) != (size, time, touched):
                return path
    return None
