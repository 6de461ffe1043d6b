"""The bytes of a manifest, written and read. Torch-free.

What is read is made up of numbers, names and two JSON objects in the one form that `encode` writes. Whatever else the
bytes hold is refused before anything is made of it; see the note "Limits" in format.py.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaspec.checkpoint.format import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    LARGEST_CHUNK,
    LARGEST_GENERATION,
    LARGEST_NUMBER,
    MANIFEST,
    MANIFEST_LIMIT,
    MOST_CHUNKS,
    MOST_CORNERS,
    MOST_DEPTH,
    MOST_DIMS,
    MOST_FILES,
    MOST_PIECES,
    MOST_TENSORS,
    OBJECTS_LIMIT,
    Manifest,
    OtherFormatError,
    StoredFile,
    StoredTensor,
    is_tensor_name,
)
from megaspec.checkpoint.rectangles import Integers, not_held_once
from megaspec.core.errors import CheckpointError

# Corners of pieces that are checked at once.
_BATCH = 1 << 18

_PREFIX = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":')
_SUFFIX = b"}\n"
_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_UNTOLD_NUMBER = rb"(?:0|[1-9][0-9]{0,17})"
_VERSION = re.compile(rb'\{"version":([0-9]{1,9})[,}]')
_HEAD = re.compile(rb'"step":N,"generation":N,"token":N,"chunk_bytes":N,"files":\['.replace(b"N", _NUMBER))
_FILE = re.compile(rb'\["(rank-[0-9]{5,8}\.safetensors)",N,"((?:[0-9a-f]{8})*+)"\]'.replace(b"N", _NUMBER))
_TENSORS = re.compile(rb',"tensors":\{')
_TENSOR = re.compile(
    rb'"([A-Za-z0-9._/-]{1,512})":\["([A-Z0-9_]{1,8})",\[((?:N(?:,N){0,15})?)\],\['.replace(b"N", _UNTOLD_NUMBER)
)
_OBJECTS = re.compile(rb',"spec":(?=\{)')


def encode_json(value: Any) -> str:
    """Compact JSON. Raises ValueError for NaN and infinities, TypeError for what JSON has no form of."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises CheckpointError for a manifest that exceeds the limits of `decode`."""
    files = [[f.name, f.bytes, f.crc32.astype(">u4").tobytes().hex()] for f in manifest.files]
    head = {
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "generation": manifest.generation,
        "token": manifest.token,
        "chunk_bytes": manifest.chunk_bytes,
        "files": files,
    }
    tensors = ",".join(_tensor_text(name, tensor) for name, tensor in manifest.tensors.items())
    objects = encode_json({"spec": manifest.spec, "state": manifest.state})
    body = f'{encode_json(head)[:-1]},"tensors":{{{tensors}}},{objects[1:]}'.encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    data = b"".join((b'{"sha256":"', digest, b'","manifest":', body, _SUFFIX))
    _check_limits(manifest, n_bytes=len(data), n_object_bytes=len(objects), where=MANIFEST)
    return data


def _tensor_text(name: str, tensor: StoredTensor) -> str:
    """`"name":["dtype",shape,[[file,offset,[start],[shape]],...]]`; one % for all numbers, of which there may be
    millions."""
    numbers = ",".join(["%d"] * len(tensor.shape))
    piece = f"[%d,%d,[{numbers}],[{numbers}]]"
    pieces = ",".join([piece] * len(tensor.table)) % tuple(tensor.table.ravel().tolist())
    return f'"{name}":["{tensor.dtype}",{encode_json(tensor.shape)},[{pieces}]]'


def _check_limits(manifest: Manifest, *, n_bytes: int, n_object_bytes: int, where: str) -> None:
    """Raises CheckpointError for a manifest that is larger than whoever reads it takes."""
    n_chunks = sum(len(file.crc32) for file in manifest.files)
    n_pieces = 0
    most_corners = 0
    for tensor in manifest.tensors.values():
        n_pieces += len(tensor.table)
        most_corners = max(most_corners, tensor.n_corners)
    for what, found, most in (
        ("bytes", n_bytes, MANIFEST_LIMIT),
        ("bytes of Spec and state", n_object_bytes, OBJECTS_LIMIT),
        ("files", len(manifest.files), MOST_FILES),
        ("chunks", n_chunks, MOST_CHUNKS),
        ("tensors", len(manifest.tensors), MOST_TENSORS),
        ("pieces", n_pieces, MOST_PIECES),
        ("corners of one tensor's pieces", most_corners, MOST_CORNERS),
    ):
        if found > most:
            raise CheckpointError(f"{where}: {found:,} {what} exceed the limit of {most:,}")
    if manifest.generation > LARGEST_GENERATION:
        raise CheckpointError(f"{where}: generation={manifest.generation} must be at most {LARGEST_GENERATION}")


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`. `where` names the file in errors.

    Raises CheckpointError for anything but a whole, well-formed manifest; OtherFormatError for another version.
    """
    # the checksum before everything else: what it doesn't cover is looked at by no parser
    prefix = _PREFIX.match(data)
    if not prefix or not data.endswith(_SUFFIX):
        raise CheckpointError(f"{where}: expected a manifest, found {len(data)} other bytes: {data[:24]!r}...")
    expected = prefix[1].decode()
    end = len(data) - len(_SUFFIX)
    found = hashlib.sha256(memoryview(data)[prefix.end() : end]).hexdigest()
    if expected != found:
        raise CheckpointError(f"{where}: sha256 expected {expected}, found {found}")
    return _ManifestParser(data, prefix.end(), end, where).manifest(digest=found)


class _ManifestParser:
    """Takes the inner object of a manifest apart, from left to right. Whatever is not as `encode` writes it raises
    CheckpointError with the byte where that was found, or with the name of the tensor or file."""

    def __init__(self, data: bytes, begin: int, end: int, where: str):
        self._data = data
        self._at = begin
        self._end = end
        self._where = where

    def manifest(self, *, digest: str) -> Manifest:
        # the version before everything that another version may write otherwise
        version = self._take(_VERSION, "an object that begins with its version")
        if int(version[1]) != FORMAT_VERSION:
            raise OtherFormatError(
                f"{self._where}: version={int(version[1])}, this program reads {FORMAT_VERSION}; use the program that "
                "wrote it"
            )
        head = self._take(_HEAD, "step, generation, token, chunk_bytes and files")
        step, generation, token, chunk_bytes = map(int, head.groups())
        self._require(8 <= chunk_bytes <= LARGEST_CHUNK, f"chunk_bytes={chunk_bytes} must be 8 to {LARGEST_CHUNK}")
        self._require(chunk_bytes % 8 == 0, f"chunk_bytes={chunk_bytes} must be a multiple of 8")
        files = tuple(self._file(chunk_bytes) for _ in self._items(b"]", most=MOST_FILES))
        file_names = {file.name for file in files}
        self._require(len(file_names) == len(files), "files: expected names that differ")
        self._take(_TENSORS, "tensors")
        tensors: dict[str, StoredTensor] = {}
        for _ in self._items(b"}", most=MOST_TENSORS):
            name, tensor = self._tensor()
            self._require(name not in tensors, f"{name}: this tensor is given twice")
            tensors[name] = tensor
        _check_pieces(tensors, files, self._require)
        n_object_bytes = self._end - self._at
        spec, state = self._objects()
        manifest = Manifest(step, generation, token, chunk_bytes, files, tensors, spec, state, digest)
        _check_limits(manifest, n_bytes=len(self._data), n_object_bytes=n_object_bytes, where=self._where)
        return manifest

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise CheckpointError(f"{self._where}: {rule}")

    def _take(self, pattern: re.Pattern[bytes], what: str) -> re.Match[bytes]:
        match = pattern.match(self._data, self._at, self._end)
        if match is None:
            found = self._data[self._at : min(self._at + 40, self._end)]
            raise CheckpointError(f"{self._where}: byte {self._at}: expected {what}, found {found!r}")
        self._at = match.end()
        return match

    def _items(self, close: bytes, *, most: int) -> Iterator[None]:
        """Once before each item of a list or object, whose opening bracket is behind; ends behind the closing one."""
        number = 0
        while not self._data.startswith(close, self._at):
            if number:
                self._take(_COMMA, "a comma")
            number += 1
            self._require(number <= most, f"byte {self._at}: more than {most:,} items")
            yield
        self._at += 1

    def _file(self, chunk_bytes: int) -> StoredFile:
        match = self._take(_FILE, "a file as [name, bytes, checksums]")
        name = match[1].decode()
        size = int(match[2])
        hex_crcs = match[3].decode()
        # eight hexadecimal digits of each chunk, the last of which may be short
        chunks = -(-size // chunk_bytes)
        self._require(len(hex_crcs) == 8 * chunks, f"{name}: expected {chunks} checksums, found {len(hex_crcs) / 8:g}")
        crcs = np.frombuffer(bytes.fromhex(hex_crcs), dtype=">u4").astype(np.uint32)
        return StoredFile(name, size, crcs)

    def _tensor(self) -> tuple[str, StoredTensor]:
        match = self._take(_TENSOR, "a tensor as name: [dtype, shape, pieces]")
        name = match[1].decode()
        dtype = match[2].decode()
        shape: tuple[int, ...] = ()
        if match[3]:
            shape = tuple(map(int, match[3].split(b",")))
        self._require(is_tensor_name(name), f"{name!r}: this name is not allowed for a tensor")
        self._require(dtype in DTYPE_BYTES, f"{name}: dtype {dtype!r} is not one of {[*DTYPE_BYTES]}")
        self._require(len(shape) <= MOST_DIMS, f"{name}: {len(shape)} dimensions are more than {MOST_DIMS}")
        size = prod(shape) * DTYPE_BYTES[dtype]
        self._require(size <= LARGEST_NUMBER, f"{name}: shape {list(shape)} is too large")
        table = np.empty((0, 2 + 2 * len(shape)), dtype=np.int64)
        if not self._data.startswith(b"]", self._at):
            table = self._pieces(name, len(shape))
        self._take(_TENSOR_END, "the end of a tensor")
        return name, StoredTensor(dtype, shape, table)

    def _pieces(self, name: str, n_dims: int) -> Integers:
        """[pieces, 2 + 2 · dims]: file, offset, start and shape of each piece."""
        begin = self._at
        self._take(_PIECES[n_dims], f"pieces of {n_dims} dimensions as [file, offset, start, shape]")
        # a piece has three brackets: its own, that of its start and that of its shape
        n_pieces = self._data.count(b"[", begin, self._at) // 3
        most = MOST_CORNERS >> n_dims
        self._require(n_pieces <= most, f"{name}: {n_pieces:,} pieces exceed {most:,}")
        # The pattern has shown that nothing but digits stands between brackets and commas.
        text = self._data[begin : self._at].translate(None, b"[]").strip(b",")
        return np.fromstring(text, dtype=np.int64, sep=",").reshape(n_pieces, 2 + 2 * n_dims)

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The Spec and the state, which are last."""
        self._take(_OBJECTS, "spec, an object")
        self._require(self._end - self._at <= OBJECTS_LIMIT, f"Spec and state have more than {OBJECTS_LIMIT:,} bytes")
        text = b'{"spec":' + self._data[self._at : self._end]
        try:
            found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self._where}: Spec and state: expected JSON, found: {error}") from None
        self._require(list(found) == ["spec", "state"], f"expected the keys spec and state, found {list(found)[:8]}")
        for key, value in found.items():
            self._require(type(value) is dict, f"{key}: expected an object")
            self._require(not _is_deeper(value, MOST_DEPTH), f"{key}: more than {MOST_DEPTH} levels")
        return found["spec"], found["state"]


def _piece_pattern(n_dims: int) -> re.Pattern[bytes]:
    """One piece of a tensor, or several between commas. A tensor without dimensions has one element, so one piece."""
    numbers = b",".join([_UNTOLD_NUMBER] * n_dims)
    piece = rb"\[N,N,\[%b\],\[%b\]\]".replace(b"N", _UNTOLD_NUMBER) % (numbers, numbers)
    if n_dims == 0:
        return re.compile(piece)
    # *+ gives nothing back: hostile bytes can't make the search try again and again
    return re.compile(piece + rb"(?:,%b)*+" % piece)


_COMMA = re.compile(rb",")
_TENSOR_END = re.compile(rb"\]\]")
_PIECES = [_piece_pattern(n_dims) for n_dims in range(MOST_DIMS + 1)]


def _check_pieces(
    tensors: dict[str, StoredTensor], files: Sequence[StoredFile], require: Callable[[bool, str], None]
) -> None:
    """Pieces lie within their tensors, which they hold once, and within their files, which they fill."""
    n_pieces = sum(len(tensor.table) for tensor in tensors.values())
    require(n_pieces <= MOST_PIECES, f"more than {MOST_PIECES:,} pieces")
    spans = [np.empty((0, 3), dtype=np.int64)]
    for names in _batches(tensors):
        spans.append(_check_batch(names, [tensors[name] for name in names], files, require))
    _check_spans(np.concatenate(spans), files, require)
    # last: it takes for granted that pieces lie inside their tensors
    for name in not_whole(tensors)[:1]:
        require(False, f"{name}: its pieces must hold each of its elements once")


def not_whole(tensors: dict[str, StoredTensor]) -> list[str]:
    """Names of the tensors that have elements which none of their pieces holds, or several. Pieces lie inside."""
    wrong = []
    for names in _batches(tensors):
        batch = [tensors[name] for name in names]
        starts = np.concatenate([tensor.starts for tensor in batch])
        shapes = np.concatenate([tensor.shapes for tensor in batch])
        for number in not_held_once(_wholes(batch), _owners(batch), starts, shapes):
            wrong.append(names[number])
    return wrong


def _wholes(tensors: Sequence[StoredTensor]) -> Integers:
    """[tensors, dims]: shapes of tensors of the same number of dimensions."""
    return np.array([t.shape for t in tensors], dtype=np.int64).reshape(len(tensors), len(tensors[0].shape))


def _owners(tensors: Sequence[StoredTensor]) -> Integers:
    """[pieces]: the number of the tensor that each piece belongs to."""
    return np.repeat(np.arange(len(tensors)), [len(t.table) for t in tensors])


def _batches(tensors: dict[str, StoredTensor]) -> Iterator[list[str]]:
    """Names of tensors of the same number of dimensions, with about _BATCH corners."""
    waiting: dict[int, list[str]] = {}
    corners: dict[int, int] = {}
    for name, tensor in tensors.items():
        n_dims = len(tensor.shape)
        waiting.setdefault(n_dims, []).append(name)
        # The tensor itself has corners, too.
        corners[n_dims] = corners.get(n_dims, 0) + tensor.n_corners + (1 << n_dims)
        if corners[n_dims] >= _BATCH:
            corners[n_dims] = 0
            yield waiting.pop(n_dims)
    yield from waiting.values()


def _check_batch(
    names: Sequence[str],
    tensors: Sequence[StoredTensor],
    files: Sequence[StoredFile],
    require: Callable[[bool, str], None],
) -> Integers:
    """Checks tensors of the same number of dimensions. -> [pieces, 3]: file, offset and bytes of each piece."""
    # a row for each piece of all tensors: [pieces] or [pieces, dims]
    owners = _owners(tensors)
    itemsizes = np.array([DTYPE_BYTES[tensor.dtype] for tensor in tensors], dtype=np.int64)[owners]
    table = np.concatenate([tensor.table for tensor in tensors])
    starts = np.concatenate([tensor.starts for tensor in tensors])
    shapes = np.concatenate([tensor.shapes for tensor in tensors])
    file = table[:, 0]
    offset = table[:, 1]

    def each_piece(holds: NDArray[np.bool_], rule: str) -> None:
        if not holds.all():
            first = int(np.argmin(holds))
            require(False, f"{names[owners[first]]}: piece {table[first].tolist()} {rule}")

    # the file first: its number looks up the file's size below
    each_piece(file < len(files), f"must lie in one of {len(files)} files")
    sizes = np.array([stored.bytes for stored in files], dtype=np.int64)
    is_inside = (shapes > 0) & (starts + shapes <= _wholes(tensors)[owners])
    each_piece(is_inside.all(axis=1), "must hold something and lie inside the shape")
    extent = shapes.prod(axis=1) * itemsizes
    each_piece(offset % itemsizes == 0, "must begin at an element of its dtype")
    each_piece(offset + extent <= sizes[file], "must end within its file")
    return np.stack([file, offset, extent], axis=1)


def _check_spans(spans: Integers, files: Sequence[StoredFile], require: Callable[[bool, str], None]) -> None:
    """Each file is a header and then one piece behind the other to its end: no byte serves two pieces, and tensors are
    no larger than files. `spans`: see _check_batch."""
    # by file, and within a file by offset
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    file = spans[:, 0]
    begin = spans[:, 1]
    end = begin + spans[:, 2]
    is_followed = file[:-1] == file[1:]
    gaps = np.flatnonzero(is_followed & (end[:-1] != begin[1:]))
    if len(gaps):
        one = int(gaps[0])
        require(False, f"{files[file[one]].name}: a piece ends at byte {end[one]}, the next begins at {begin[one + 1]}")
    ends = np.zeros(len(files), dtype=np.int64)
    np.maximum.at(ends, file, end)
    for stored, last in zip(files, ends.tolist(), strict=True):
        require(last == stored.bytes, f"{stored.name}: its last piece ends at byte {last}, the file at {stored.bytes}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object with the same key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists lie in each other more than so many levels deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in value)
