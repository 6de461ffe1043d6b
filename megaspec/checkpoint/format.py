"""The manifest of a checkpoint: what is stored where, and the checksums that prove it. Torch-free.

A checkpoint is a folder `step-00000100` with one safetensors file per rank that had something to write and a
`manifest.json`, which is one JSON object over a single line:

    {"sha256":"<of the bytes of the inner object>","manifest":{...}}

The inner object lists files (size, one CRC-32 per chunk) and tensors (dtype, global shape, and the rectangles of it
that are stored: file, byte offset, start, shape), and holds the Spec and the state as plain JSON. It has one form only,
that which codec.py writes: keys in that order, nothing between them.

Note "Why CRC-32": what has to be caught is a flipped bit, a hole, a truncation, another file's bytes. CRC-32 misses no
single flipped bit and no burst of up to 32 bits, and one in 2^32 of the rest. Measured on one core: 4.1 GB/s, where
SHA-256 ran at 1.8 (0.36 on a core without instructions for it) and BLAKE2b at 0.9; and zlib is in every Python. The
manifest, which is small and carries all the CRCs, is held by SHA-256. Neither is a signature: whoever can write the
folder can write both.

Note "Limits": a manifest that somebody made up must not take all memory or hours. The largest of our recipes:

    Llama 3.1 405B on 1,024 GPUs   12.9 MB, 1,024 files, 581,404 chunks, 3,301 tensors, 202,429 pieces, 144 of one
    DeepSeek-V3 on 256 GPUs        12.4 MB, 256 files, 1,005,095 chunks, 1,943 tensors, 106,913 pieces, 255 of one

(DeepSeek's with plain attention.) Each limit leaves room for eight times that or more. What is read takes memory in
proportion to the file: numbers go from the text straight into arrays (as Python's objects they took up to twenty bytes
for each byte of text), and only the Spec and the state, which are small, become objects.
"""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaspec.core.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megaspec.checkpoint.rectangles import Integers

FORMAT_VERSION = 2
"""Of a run's spec.json and of its checkpoints' manifests. 2: a model is a decoder of chosen parts. 1: a family."""
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 128 << 20
"""Bytes. See the note "Limits"."""
OBJECTS_LIMIT = 2 << 20
"""Bytes of the Spec and the state together."""
MOST_DEPTH = 64
"""Objects and lists within each other in the Spec and the state."""
MOST_FILES = 1 << 17
MOST_CHUNKS = 1 << 23
"""Of all files."""
MOST_TENSORS = 1 << 17
MOST_PIECES = 1 << 22
"""Of all tensors."""
MOST_CORNERS = 1 << 20
"""Of all pieces of one tensor, 2^dims each (rectangles.py): 262,144 pieces of a matrix."""
MOST_DIMS = 5
"""Of a tensor: what the weight of a three-dimensional convolution has."""
CHUNK_BYTES = 8 << 20
LARGEST_CHUNK = 64 << 20
LARGEST_NUMBER = 10**18 - 1
"""What is counted, and sizes in bytes."""
LARGEST_GENERATION = 10**12

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

_TENSOR_NAME = re.compile(r"[A-Za-z0-9._/-]{1,512}")


class OtherFormatError(CheckpointError):
    """A whole manifest of another version than this program reads."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A rectangle of a global tensor, row-major from byte `offset` of file number `file`."""

    file: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A global tensor: dtype as in DTYPE_BYTES, global shape, and its rectangles, which hold each element once."""

    dtype: str
    shape: tuple[int, ...]
    table: "Integers"
    """[pieces, 2 + 2·dims]: of each piece its file, offset, start and shape."""

    @property
    def n_corners(self) -> int:
        """Of all its pieces."""
        return len(self.table) << len(self.shape)

    @property
    def starts(self) -> "Integers":
        """[pieces, dims]"""
        return self.table[:, 2 : 2 + len(self.shape)]

    @property
    def shapes(self) -> "Integers":
        """[pieces, dims]"""
        return self.table[:, 2 + len(self.shape) :]

    def piece(self, number: int) -> StoredPiece:
        """One of its pieces."""
        file, offset, *numbers = self.table[number].tolist()
        n_dims = len(self.shape)
        return StoredPiece(file, offset, tuple(numbers[:n_dims]), tuple(numbers[n_dims:]))


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """A file of the checkpoint: size in bytes and the CRC-32 of each chunk."""

    name: str
    bytes: int
    crc32: "NDArray[np.uint32]"


@dataclass(frozen=True)
class Manifest:
    """All that is known about a checkpoint. `generation` counts the publications of a run folder, `token` is the
    fencing token of the lock under which it was published (0 without a lock). `digest` is the SHA-256 that a manifest
    that was read carries: no two checkpoints that were saved have the same."""

    step: int
    generation: int
    token: int
    chunk_bytes: int
    files: tuple[StoredFile, ...]
    tensors: dict[str, StoredTensor]
    spec: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

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
