"""From what a user names to parts of equal work, and from a part to documents.

How the input is cut depends on the input alone, never on the number of workers, so the result doesn't either.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaspec.core.errors import DataError
from megaspec.data import arrow, json_lines, parquet, python_corpus
from megaspec.data.text_fields import BadLine, TextFields, bad_utf8, checked_text

PYTHON_CORPUS = "python"
# Bytes of a part. There are about _PARTS of them, where that makes them neither too small nor too large.
SMALLEST_PART = 2**19
LARGEST_PART = 256 * 2**20
_PARTS = 1024
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "compressed",
    ".jsonl.zst": "compressed",
    ".ndjson.gz": "compressed",
    ".ndjson.zst": "compressed",
    ".json.gz": "compressed",
    ".json.zst": "compressed",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_FILES = ".jsonl, .ndjson, .jsonl.gz, .jsonl.zst, .txt, .md, .parquet or .arrow file"
_KNOWN = f"a {_FILES}, a folder of them, a folder that datasets saved, or the word python"


@dataclass(frozen=True)
class InputSlice:
    """A stretch of one input file: bytes of JSON lines, row groups of parquet, record batches of Arrow, units of the
    Python corpus; of other files all."""

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


@dataclass(frozen=True)
class Document:
    """A text and where it stands."""

    text: str
    path: str
    line: int
    """Line or row of the file, from 1."""


def documents(path: str, key: str | TextFields = "text") -> Iterator[Document]:
    """The documents of one file, in order. Raises DataError for the first bad line, with its place."""
    for part in cut(find_inputs([path])):
        for piece in part.slices:
            above = None
            for line, text in read_documents(piece, key):
                if above is None:
                    above = lines_before(piece)
                if isinstance(text, BadLine):
                    raise DataError(f"{piece.path}:{above + line}: {text}")
                yield Document(text, piece.path, above + line)


def read_documents(piece: InputSlice, key: str | TextFields) -> Iterator[tuple[int, str | BadLine]]:
    """(line, text or what is wrong with it) of a slice. Lines count from 1 at the beginning of the slice.

    Raises DataError when a file as a whole can't be read.
    """
    for line, text in read_lines(piece, key):
        if text is not None:
            yield line, text


def read_lines(piece: InputSlice, key: str | TextFields) -> Iterator[tuple[int, str | BadLine | None]]:
    """The same with None for every blank line of JSON lines, so that the last number counts them all."""
    yield from _READERS[piece.kind](piece, TextFields.of(key))


def carries_checksums(piece: InputSlice, key: str | TextFields) -> bool:
    """False for a slice that has been read, in which damage may be other text without a word. Raises DataError."""
    if piece.kind == "parquet":
        return parquet.carries_checksums(piece.path, piece.start, TextFields.of(key))
    if piece.kind == "compressed":
        return json_lines.carries_checksum(piece.path)
    return piece.kind != "arrow"


def lines_before(piece: InputSlice) -> int:
    """How many lines of the file lie before the slice."""
    if piece.kind != "jsonl" or piece.start == 0:
        return 0
    count = 0
    left = piece.start
    chunk = b""
    with json_lines.opened(piece.path) as file:
        while left and (chunk := file.read(min(2**20, left))):
            count += chunk.count(b"\n")
            left -= len(chunk)
    # A line that begins before the slice and ends in it is none of the slice's.
    return count + (not chunk.endswith(b"\n"))


def _python_input() -> Input:
    size = sum(unit.bytes for unit in python_corpus.units())
    corpus = ("python", python_corpus.identity(), size, 0)
    return Input(PYTHON_CORPUS, (corpus,), 0)


def _kind(path: Path) -> str | None:
    """How a file is read, by its name; None for one of no known kind."""
    return kind_of_name(path.name)


def kind_of_name(name: str) -> str | None:
    """How a file of that name is read; None for one of no known kind."""
    name = name.lower()
    for ending, kind in _KINDS.items():
        if name.endswith(ending):
            return kind
    return None


def _file_input(name: str) -> Input:
    root = Path(name)
    if root.is_dir():
        found = _files_below(root)
        known = [path for path in found if _kind(path) is not None]
        if not known:
            raise DataError(f"{name}: no {_FILES} in this folder")
        return _input_of(name, known, len(found) - len(known))
    if not root.exists():
        raise DataError(f"{name}: no such file or folder; an input is {_KNOWN}")
    if _kind(root) is None:
        raise DataError(f"{name}: an input is {_KNOWN}; JSON lines need the ending .jsonl")
    return _input_of(name, [root], 0)


def _files_below(root: Path) -> list[Path]:
    """All files of a folder, in the order of their paths, those of a data set that was saved in its own.

    Of a saved data set nothing else is an input. Raises OSError for a folder in it that can't be read, DataError for a
    link to nothing that would be an input.
    """

    def refuse(error: OSError) -> None:
        raise error

    # with the place of a file among its folder's, which is that of its name but in saved data sets
    found: list[tuple[tuple[Path, int], Path]] = []
    for folder, below, names in os.walk(root, onerror=refuse):
        saved = arrow.saved_files(Path(folder))
        if saved is not None:
            below.clear()
            found += [((Path(folder), number), path) for number, path in enumerate(saved)]
            continue
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                found.append(((path, 0), path))
            elif path.is_symlink() and not path.exists() and _kind(path) is not None:
                raise DataError(f"{path}: a link to nothing; put its file back, or remove the link")
    return [path for _, path in sorted(found)]


def _input_of(name: str, paths: list[Path], passed_over: int) -> Input:
    files = []
    touched = []
    for path in paths:
        status = path.stat()
        files.append((_kind(path), str(path), status.st_size, status.st_mtime_ns))
        touched.append(status.st_ctime_ns)
    return Input(name, tuple(files), passed_over, tuple(touched))


def _cut_jsonl(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for start in range(0, size, target):
        stop = min(start + target, size)
        yield InputSlice("jsonl", path, start, stop), stop - start


def _cut_whole(kind: str) -> Callable[[str, int, int], Iterator[tuple[InputSlice, int]]]:
    """Of files that can't be read from the middle."""

    def cut_file(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
        yield InputSlice(kind, path, 0, size), size

    return cut_file


def _cut_parquet(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for group, n_bytes in enumerate(parquet.row_group_sizes(path)):
        yield InputSlice("parquet", path, group, group + 1), n_bytes


def _cut_arrow(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    # batches are small, often of 1,000 rows
    start = 0
    filled = 0
    for number, n_bytes in enumerate(arrow.batch_sizes(path)):
        if filled and filled + n_bytes > target:
            yield InputSlice("arrow", path, start, number), filled
            start = number
            filled = 0
        filled += n_bytes
    if filled:
        yield InputSlice("arrow", path, start, number + 1), filled


def _cut_python(path: str, size: int, target: int) -> Iterator[tuple[InputSlice, int]]:
    for unit in python_corpus.units():
        yield InputSlice("python", f"{unit.kind}:{unit.name}", 0, unit.bytes), unit.bytes


def _read_jsonl(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine | None]]:
    return json_lines.read_lines(piece.path, piece.start, piece.stop, fields)


def _read_compressed(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine | None]]:
    return json_lines.read_compressed(piece.path, fields)


def _read_text(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    try:
        with json_lines.opened(piece.path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield 1, bad_utf8(error)
        return
    yield 1, checked_text(text)


def _read_parquet(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    return parquet.read_texts(piece.path, piece.start, piece.stop, fields)


def _read_arrow(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    return arrow.read_texts(piece.path, piece.start, piece.stop, fields)


def _read_python(piece: InputSlice, fields: TextFields) -> Iterator[tuple[int, str | BadLine]]:
    kind, _, name = piece.path.partition(":")
    for text in python_corpus.documents(kind, name):
        if isinstance(checked := checked_text(text), str):
            yield 1, checked


_CUTTERS: dict[str, Callable[[str, int, int], Iterator[tuple[InputSlice, int]]]] = {
    "jsonl": _cut_jsonl,
    "compressed": _cut_whole("compressed"),
    "text": _cut_whole("text"),
    "parquet": _cut_parquet,
    "arrow": _cut_arrow,
    "python": _cut_python,
}
_READERS: dict[str, Callable[[InputSlice, TextFields], Iterator[tuple[int, str | BadLine | None]]]] = {
    "jsonl": _read_jsonl,
    "compressed": _read_compressed,
    "text": _read_text,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
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
