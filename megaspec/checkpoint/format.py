"""The manifest of a checkpoint: what is stored where, and the checksums that prove it. Torch-free.

A checkpoint is a folder `step-00000100` with one safetensors file per rank that had something to write and a
`manifest.json`, which is one JSON object over a single line:

    {"sha256":"<of the bytes of the inner object>","manifest":{...}}

The inner object lists files (size, one CRC-32 per chunk) and tensors (dtype, global shape, and the rectangles of it
that are stored: file, byte offset, start, shape), and holds the Spec and the state as plain JSON.

Note "Why CRC-32": what has to be caught is a flipped bit, a hole, a truncation, another file's bytes. CRC-32 misses no
single flipped bit and no burst of up to 32 bits, and one in 2^32 of the rest. Measured on one core: 4.1 GB/s, where
SHA-256 ran at 1.8 (0.36 on a core without instructions for it) and BLAKE2b at 0.9; and zlib is in every Python. The
manifest, which is small and carries all the CRCs, is held by SHA-256. Neither is a signature: whoever can write the
folder can write both.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from megaspec.checkpoint.rectangles import Rectangle, overlapping
from megaspec.core.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 256 << 20  # bytes
CHUNK_BYTES = 8 << 20
LARGEST_CHUNK = 64 << 20
LARGEST_NUMBER = 1 << 62
MOST_DIMS = 16

# safetensors' names of number formats, and bytes per element.
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

_PREFIX = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":')
_SUFFIX = b"}\n"
_PREFIX_BYTES = len(b'{"sha256":"') + 64 + len(b'","manifest":')
_FILE_NAME = re.compile(r"rank-[0-9]{5,8}\.safetensors")
_TENSOR_NAME = re.compile(r"[A-Za-z0-9._/-]{1,512}")
_HEX = re.compile(r"(?:[0-9a-f]{8})*")
_KEYS = {"version", "step", "generation", "token", "chunk_bytes", "files", "tensors", "spec", "state"}


class NewerFormatError(CheckpointError):
    """A whole manifest of a version that this program does not know."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A rectangle of a global tensor, row-major from byte `offset` of file number `file`."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor: dtype as in DTYPE_BYTES, global shape, and its rectangles, which don't overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the checkpoint: size in bytes and the CRC-32 of each chunk."""

    name: str
    bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is known about a checkpoint. `generation` counts the publications of a run folder, `token` is the
    fencing token of the lock under which it was published (0 without a lock)."""

    step: int
    generation: int
    token: int
    chunk_bytes: int
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    spec: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.bytes for f in self.files)


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def is_tensor_name(name: str) -> bool:
    """True for 1 to 512 of `A-Z a-z 0-9 . _ / -` without empty, `.` or `..` parts between slashes."""
    return bool(_TENSOR_NAME.fullmatch(name)) and not {"", ".", ".."} & set(name.split("/"))


def encode_json(value: Any) -> str:
    """Compact JSON. Raises ValueError for NaN and infinities, TypeError for what JSON has no form of."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises CheckpointError when they would exceed MANIFEST_LIMIT."""
    body = encode_json(
        {
            "version": FORMAT_VERSION,
            "step": manifest.step,
            "generation": manifest.generation,
            "token": manifest.token,
            "chunk_bytes": manifest.chunk_bytes,
            "files": [[f.name, f.bytes, "".join(f"{c:08x}" for c in f.crc32)] for f in manifest.files],
            "tensors": {
                name: [t.dtype, t.shape, [[p.file, p.offset, p.start, p.shape] for p in t.pieces]]
                for name, t in manifest.tensors.items()
            },
            "spec": manifest.spec,
            "state": manifest.state,
        }
    ).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    data = b"".join((b'{"sha256":"', digest, b'","manifest":', body, _SUFFIX))
    if len(data) > MANIFEST_LIMIT:
        raise CheckpointError(f"{MANIFEST}: {len(data)} bytes exceed the limit of {MANIFEST_LIMIT}; save fewer pieces")
    return data


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`. `where` names the file in errors.

    Raises CheckpointError for anything but a whole, well-formed manifest; NewerFormatError for an unknown version.
    """
    prefix = _PREFIX.match(data)
    if not prefix or not data.endswith(_SUFFIX):
        raise CheckpointError(f"{where}: expected a manifest, found {len(data)} other bytes: {data[:24]!r}...")
    body = memoryview(data)[_PREFIX_BYTES : -len(_SUFFIX)]
    expected, found = prefix[1].decode(), hashlib.sha256(body).hexdigest()
    if expected != found:
        raise CheckpointError(f"{where}: sha256 expected {expected}, found {found}")
    try:
        raw = json.loads(bytes(body), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, found: {error}") from None
    check = _Checker(where)
    check.that(type(raw) is dict and "version" in raw, "manifest", "expected an object with a version")
    if raw["version"] != FORMAT_VERSION:
        raise NewerFormatError(
            f"{where}: version={raw['version']!r}, this program reads {FORMAT_VERSION}; use the program that wrote it"
        )
    check.that(set(raw) == _KEYS, "keys", f"expected {sorted(_KEYS)}, found {sorted(raw)}")
    chunk_bytes = check.number(raw["chunk_bytes"], "chunk_bytes", least=8, most=LARGEST_CHUNK)
    check.that(chunk_bytes % 8 == 0, "chunk_bytes", "expected a multiple of 8")
    for key in ("spec", "state", "tensors"):
        check.that(type(raw[key]) is dict, key, "expected an object")
    check.that(type(raw["files"]) is list, "files", "expected a list")
    files = tuple(check.file(item, chunk_bytes) for item in raw["files"])
    check.that(len({f.name for f in files}) == len(files), "files", "expected names that differ")
    return Manifest(
        step=check.number(raw["step"], "step"),
        generation=check.number(raw["generation"], "generation"),
        token=check.number(raw["token"], "token"),
        chunk_bytes=chunk_bytes,
        files=files,
        tensors={name: check.tensor(name, item, files) for name, item in raw["tensors"].items()},
        spec=raw["spec"],
        state=raw["state"],
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object with the same key twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


@dataclass(frozen=True)
class _Checker:
    """Takes a parsed manifest apart; whatever is not as it must be raises CheckpointError."""

    where: str

    def that(self, holds: bool, what: str, rule: str) -> None:
        if not holds:
            raise CheckpointError(f"{self.where}: {what[:200]}: {rule}")

    def number(self, value: Any, what: str, *, least: int = 0, most: int = LARGEST_NUMBER) -> int:
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(f"{self.where}: {what[:200]}: expected a whole number from {least} to {most}")
        return value

    def numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if type(value) is not list or len(value) > MOST_DIMS:
            raise CheckpointError(f"{self.where}: {what[:200]}: expected at most {MOST_DIMS} whole numbers")
        return tuple(self.number(v, what) for v in value)

    def file(self, item: Any, chunk_bytes: int) -> StoredFile:
        self.that(type(item) is list and len(item) == 3, "files", "expected [name, bytes, checksums]")
        name, size, crcs = item
        self.that(type(name) is str and bool(_FILE_NAME.fullmatch(name)), "files", f"name {name!r} is not allowed")
        size = self.number(size, name)
        chunks = -(-size // chunk_bytes)
        self.that(type(crcs) is str and len(crcs) == 8 * chunks, name, f"expected {chunks} checksums")
        self.that(bool(_HEX.fullmatch(crcs)), name, "expected checksums of 8 hexadecimal digits")
        return StoredFile(name, size, tuple(int(crcs[i : i + 8], 16) for i in range(0, len(crcs), 8)))

    def tensor(self, name: str, item: Any, files: tuple[StoredFile, ...]) -> StoredTensor:
        self.that(is_tensor_name(name), repr(name), "this name is not allowed for a tensor")
        self.that(type(item) is list and len(item) == 3, name, "expected [dtype, shape, pieces]")
        dtype, shape, pieces = item
        self.that(type(dtype) is str and dtype in DTYPE_BYTES, name, f"dtype {dtype!r} is not one of {[*DTYPE_BYTES]}")
        shape = self.numbers(shape, name)
        self.that(type(pieces) is list, name, "expected a list of pieces")
        stored = tuple(self.piece(name, p, shape, DTYPE_BYTES[dtype], files) for p in pieces)
        clash = overlapping([Rectangle(p.start, p.shape) for p in stored])
        self.that(clash is None, name, f"two pieces overlap: {clash}")
        return StoredTensor(dtype, shape, stored)

    def piece(
        self, name: str, item: Any, shape: tuple[int, ...], itemsize: int, files: tuple[StoredFile, ...]
    ) -> StoredPiece:
        if type(item) is not list or len(item) != 4 or not files:
            self.that(False, name, "expected pieces of [file, offset, start, shape]")
        file = self.number(item[0], name, most=len(files) - 1)
        piece = StoredPiece(file, self.number(item[1], name), self.numbers(item[2], name), self.numbers(item[3], name))
        if not len(piece.start) == len(piece.shape) == len(shape):
            self.that(False, name, f"piece {item} has other dimensions than the shape {list(shape)}")
        for start, extent, whole in zip(piece.start, piece.shape, shape, strict=True):
            if extent <= 0 or start + extent > whole:
                self.that(False, name, f"piece {item} lies outside the shape {list(shape)}")
        end = piece.offset + prod(piece.shape) * itemsize
        if end > files[file].bytes or piece.offset % itemsize:
            size = files[file].bytes
            self.that(False, name, f"piece {item} must begin at an element of {itemsize} bytes and end by byte {size}")
        return piece
