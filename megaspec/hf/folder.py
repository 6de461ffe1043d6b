"""A folder of Hugging Face's: its config.json, its index and the headers of its safetensors files, read strictly.

Nothing in it is executed, no link is followed but the hub's cache's, and sizes are checked before anything is read.
Torch-free.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megaspec.checkpoint.files import open_folder, opened_read_failure, pread_into
from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.core.errors import CheckpointError
from megaspec.hf.cache import open_file, read_file

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# A config names layers and factors; an index has a line a tensor, of which DeepSeek-V3 has 91,991 in 8.9 MB.
CONFIG_LIMIT = 4 << 20
INDEX_LIMIT = 64 << 20
# What safetensors itself reads at most.
HEADER_LIMIT = 100_000_000
MOST_PROBLEMS = 20
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.safetensors")


@dataclass(frozen=True)
class TheirEntry:
    """A tensor as it lies in a file."""

    file: str
    dtype: str
    """As in DTYPE_BYTES."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass
class HfFolder:
    """An opened folder. Close it, or use it as a context."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TheirEntry]
    """By their names, in the order of the files."""
    _folder_fd: int
    _files: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> "HfFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for fd in [*self._files.values(), self._folder_fd]:
            os.close(fd)
        self._files = {}

    def read_into(self, entry: TheirEntry, view: memoryview, offset: int) -> None:
        """Fills `view` with a tensor's bytes from its byte `offset` on. CheckpointError: the file is shorter."""
        if entry.file not in self._files:
            self._files[entry.file] = open_file(self.path, self._folder_fd, entry.file)
        try:
            done = pread_into(self._files[entry.file], view, entry.offset + offset)
        except OSError as error:
            raise opened_read_failure(self.path / entry.file, error) from None
        if done < len(view):
            raise CheckpointError(f"{self.path / entry.file}: it has become shorter since it was opened")


def open_hf_folder(path: Path) -> HfFolder:
    """Reads everything but the tensors. CheckpointError: what is wrong with it, a line each."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name one with a config.json and safetensors files")
    # the folder itself may be a link; what is in it may be one of the hub's cache alone
    path = path.resolve()
    with ExitStack() as stack:
        folder_fd = open_folder(path)
        stack.callback(os.close, folder_fd)
        config = _read_config(path, folder_fd)
        tensors = _read_headers(path, folder_fd)
        # it stays open with what is returned
        stack.pop_all()
    return HfFolder(path, config, tensors, folder_fd)


def read_config(path: Path) -> dict[str, Any]:
    """A folder's config.json alone. CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name one with a config.json")
    path = path.resolve()
    folder_fd = open_folder(path)
    try:
        return _read_config(path, folder_fd)
    finally:
        os.close(folder_fd)


def _read_config(path: Path, folder_fd: int) -> dict[str, Any]:
    return _read_json(path, folder_fd, CONFIG, limit=CONFIG_LIMIT)


def _read_json(path: Path, folder_fd: int, name: str, *, limit: int) -> dict[str, Any]:
    text = read_file(path, folder_fd, name, limit=limit)
    return parse_object(text, f"{path / name}")


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object without repeated keys, NaN or infinities. CheckpointError."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a {type(value).__name__}, expected an object")
    return value


def as_json(value: Mapping[str, Any]) -> bytes:
    """Indented and in the order of the keys, as transformers writes it."""
    return (json.dumps(value, indent=2, sort_keys=False) + "\n").encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number that JSON has")


def _read_headers(path: Path, folder_fd: int) -> dict[str, TheirEntry]:
    """Every tensor of the folder. With an index, exactly those that it names, in the files that it says."""
    present = sorted(name for name in os.listdir(folder_fd) if name.endswith(".safetensors"))
    if INDEX not in os.listdir(folder_fd):
        if not present:
            raise CheckpointError(f"{path} has no safetensors file; pickled weights (.bin, .pt) are never read")
        if present != [SINGLE]:
            raise CheckpointError(f"{path} has {', '.join(present[:3])}, and no {INDEX} says what belongs together")
        return _read_header(path, folder_fd, SINGLE)
    weight_map = _read_json(path, folder_fd, INDEX, limit=INDEX_LIMIT).get("weight_map")
    _check_weight_map(path, weight_map, present)
    tensors: dict[str, TheirEntry] = {}
    problems = []
    for file in sorted(set(weight_map.values())):
        for name, entry in _read_header(path, folder_fd, file).items():
            if weight_map.get(name) != file:
                problems.append(f"{path / file} holds {name}, which {INDEX} has in {weight_map.get(name, 'no file')}")
            tensors[name] = entry
    for name in weight_map:
        if name not in tensors:
            problems.append(f"{path / INDEX}: {name} is not in {weight_map[name]}")
    if problems:
        raise CheckpointError(first_of(problems))
    return tensors


def _check_weight_map(path: Path, weight_map: Any, present: list[str]) -> None:
    """CheckpointError: no object of names and files, a file outside of the folder, or one that is missing."""
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not is_map or not weight_map:
        raise CheckpointError(f"{path / INDEX}: weight_map must name a file for each tensor")
    problems = []
    for file in sorted(set(weight_map.values())):
        if not _FILE_NAME.fullmatch(file):
            problems.append(f"{path / INDEX} names the file {file!r}; it must be a .safetensors file of this folder")
        elif file not in present:
            problems.append(f"{path / file} is missing, and {INDEX} names it")
    if problems:
        raise CheckpointError(first_of(problems))


def _read_header(path: Path, folder_fd: int, name: str) -> dict[str, TheirEntry]:
    """The tensors of one file: eight bytes of length, a JSON object, then the tensors without gaps."""
    where = f"{path / name}"
    fd = open_file(path, folder_fd, name)
    try:
        size = os.fstat(fd).st_size
        length_bytes = bytearray(8)
        if pread_into(fd, memoryview(length_bytes), 0) < len(length_bytes):
            raise CheckpointError(f"{where}: {size} bytes are too few for a safetensors file")
        length = int.from_bytes(length_bytes, "little")
        if length > HEADER_LIMIT or 8 + length > size:
            limit = f"at most {HEADER_LIMIT:,}, and what the file has: {max(size - 8, 0):,}"
            raise CheckpointError(f"{where}: its header says that it has {length:,} bytes, expected {limit}")
        text = bytearray(length)
        pread_into(fd, memoryview(text), 8)
    finally:
        os.close(fd)
    header = parse_object(bytes(text), f"{where}: the header")
    header.pop("__metadata__", None)
    return _entries(where, name, header, begin=8 + length, size=size)


def _entries(where: str, file: str, header: Mapping[str, Any], *, begin: int, size: int) -> dict[str, TheirEntry]:
    """Typed, with offsets that fill the file from `begin` to `size`. CheckpointError."""
    problems = []
    spans = []
    tensors = {}
    for name, fields in header.items():
        entry = _entry(file, fields, begin)
        if isinstance(entry, str):
            problems.append(f"{where}: {name}: {entry}")
            continue
        tensors[name] = entry
        spans.append((entry.offset, entry.offset + entry.bytes, name))
    if problems:
        raise CheckpointError(first_of(problems))
    end = begin
    for start, stop, name in sorted(spans):
        if start != end:
            raise CheckpointError(f"{where}: {name} begins at byte {start:,}, expected {end:,}: a gap or an overlap")
        end = stop
    if end != size:
        raise CheckpointError(f"{where}: its tensors end at byte {end:,}, the file has {size:,}: it is cut or damaged")
    return tensors


def _entry(file: str, fields: Any, begin: int) -> TheirEntry | str:
    """One tensor of a header, or what is wrong with it."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets"
    dtype = fields["dtype"]
    if dtype not in DTYPE_BYTES:
        return f"dtype={dtype!r} is none of {', '.join(DTYPE_BYTES)}"
    shape = fields["shape"]
    offsets = fields["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        return "shape and data_offsets must be whole numbers of at least 0"
    entry = TheirEntry(file, dtype, tuple(shape), begin + offsets[0])
    if offsets[1] - offsets[0] != entry.bytes:
        return f"{offsets[1] - offsets[0]:,} bytes, where dtype={dtype} and shape={shape} take {entry.bytes:,}"
    return entry


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) is int and 0 <= value < 1 << 50 for value in values)


def first_of(problems: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(problems) - MOST_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MOST_PROBLEMS], f"and {more} more"]
