"""Reading any rectangle of any tensor of a checkpoint, whatever rectangles it was stored in.

Bytes are read with pread into memory of one's own and checked there, so the bytes that were checked are the bytes that
are used, and a failing disk or network is an error by name. (A mapped file would be checked in one moment and read in
another, and an I/O error under it ends the process with SIGBUS.)
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from megaspec.checkpoint.examine import chunk_length, open_stored, read_chunk, read_manifest_at, worker_threads
from megaspec.checkpoint.files import open_folder
from megaspec.checkpoint.format import DTYPE_BYTES, Manifest, StoredPiece, StoredTensor
from megaspec.checkpoint.in_use import hold
from megaspec.checkpoint.rectangles import Rectangle, intersection
from megaspec.checkpoint.shard import TORCH_DTYPES, as_bytes
from megaspec.core.errors import CheckpointError

KEPT_CHUNKS = 16
MOST_OPEN_FILES = 128
ROW_BYTES = 1 << 20  # rows at least this long are read one by one, shorter ones together with what lies between
BLOCK_BYTES = 256 << 20  # most memory for bytes that are read and not wanted


class Weights(Protocol):
    """Tensors under the names that a checkpoint has for them, of which any rectangle can be read."""

    path: Path

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]:
        """Of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Number format in which it is stored."""
        ...

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The rectangle of `shape` at `start`, on the CPU, in the format that it is stored in."""
        ...


class Reader:
    """An opened checkpoint. Every chunk that is read is checked against its CRC-32 before a tensor is handed out.

    Raises CheckpointError naming file, expected and found. One thread may read at a time; others wait.
    `passed_over`: newer checkpoints that were not good, and why, for whoever tells the user. `kept_chunks`: how many
    chunks of which a part was read stay in memory.
    """

    passed_over: tuple[str, ...] = ()
    kept_chunks: int = KEPT_CHUNKS

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._folder_fd = open_folder(self.path)
        self._held_fd: int | None = None
        self._files: OrderedDict[int, int] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._chunk_lock = threading.Lock()
        try:
            self._held_fd = hold(self.path, self._folder_fd)
            self.manifest: Manifest = read_manifest_at(self.path, self._folder_fd)
        except CheckpointError:
            self.close()
            raise

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def spec(self) -> dict[str, Any]:
        """The Spec that was saved with it, as a JSON object."""
        return self.manifest.spec

    @property
    def state(self) -> dict[str, Any]:
        """The state that was saved with it, as a JSON object."""
        return self.manifest.state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files. Tensors that were read stay valid."""
        if self._pool:
            self._pool.shutdown()
            self._pool = None
        while self._files:
            _, fd = self._files.popitem()
            os.close(fd)
        self._chunks.clear()
        if self._held_fd is not None:
            os.close(self._held_fd)
            self._held_fd = None
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def names(self) -> list[str]:
        """Global names of the tensors, sorted."""
        return sorted(self.manifest.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape. Raises CheckpointError for a name that isn't there."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Number format in which it is stored. Raises CheckpointError for a name that isn't there."""
        return TORCH_DTYPES[self._stored(name).dtype]

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The rectangle of `shape` at `start` of a global tensor, as a new CPU tensor in its stored dtype.

        Without `start` and `shape`: the whole tensor. Raises CheckpointError for damage and a name that isn't there.
        """
        stored = self._stored(name)
        if start is None:
            start = (0,) * len(stored.shape)
        if shape is None:
            shape = _difference(stored.shape, start)
        wanted = Rectangle(tuple(start), tuple(shape))
        assert wanted.is_within(stored.shape), (
            f"{name}: rectangle {wanted} lies outside the stored shape {list(stored.shape)}"
        )
        out = torch.empty(wanted.shape, dtype=TORCH_DTYPES[stored.dtype])
        # Stored pieces hold each element once (codec.decode), so that together they fill it.
        with self._lock:
            for piece in _meeting(stored, wanted):
                cut = intersection(wanted, Rectangle(piece.start, piece.shape))
                assert cut is not None, f"{name}: {piece} does not meet {wanted}"
                start_in_piece = _difference(cut.start, piece.start)
                in_out = Rectangle(_difference(cut.start, wanted.start), cut.shape)
                itemsize = DTYPE_BYTES[stored.dtype]
                self._fill(out[in_out.slices], piece, piece.offset, piece.shape, start_in_piece, itemsize)
        return out

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}")
        return self.manifest.tensors[name]

    def _fill(
        self, out: Tensor, piece: StoredPiece, offset: int, shape: Sequence[int], inner: Sequence[int], itemsize: int
    ) -> None:
        """Copy into `out` the rectangle of its shape at `inner` of a row-major block of `shape` at byte `offset`."""
        row_bytes = prod(shape[1:]) * itemsize
        if shape:
            offset += inner[0] * row_bytes
        has_whole_rows = tuple(out.shape[1:]) == tuple(shape[1:])
        if has_whole_rows and out.is_contiguous():
            # the bytes lie in the file as they lie in `out`
            self._read_bytes(piece.file, offset, as_bytes(out))
            return
        if not has_whole_rows and row_bytes >= ROW_BYTES:
            for i in range(out.shape[0]):
                self._fill(out[i], piece, offset + i * row_bytes, shape[1:], inner[1:], itemsize)
            return
        # Short rows, of which not all columns are wanted, or rows that lie apart in `out`: whole rows are read into a
        # block, a block at a time, and what is wanted of them is copied.
        columns = Rectangle(tuple(inner[1:]), tuple(out.shape[1:])).slices
        block_rows = max(1, BLOCK_BYTES // row_bytes)
        for at in range(0, out.shape[0], block_rows):
            out_rows = out[at : at + block_rows]
            block = torch.empty((out_rows.shape[0], *shape[1:]), dtype=out.dtype)
            self._read_bytes(piece.file, offset + at * row_bytes, as_bytes(block))
            out_rows.copy_(block[(slice(None), *columns)])

    def _read_bytes(self, file: int, offset: int, out: memoryview) -> None:
        """Fill `out` with checked bytes: whole chunks are read in place, several at once, parts from kept ones."""
        if not len(out):
            return
        size = self.manifest.chunk_bytes
        stored = self.manifest.files[file]
        fd = self._open(file)

        def read(span: tuple[int, int, int]) -> None:
            index, low, high = span
            target = out[index * size + low - offset : index * size + high - offset]
            if high - low == chunk_length(stored, index, size):
                read_chunk(fd, self.path / stored.name, stored, index, size, target)
            else:
                # a part can't be checked by itself
                target[:] = self._chunk(file, fd, index)[low:high]

        spans = list(_spans(offset, len(out), size))
        if len(spans) == 1:
            read(spans[0])
            return
        self._pool = self._pool or ThreadPoolExecutor(worker_threads())
        for _ in self._pool.map(read, spans):
            pass

    def _chunk(self, file: int, fd: int, index: int) -> memoryview:
        """A checked chunk; the last few are kept. Threads that call this at the same time ask for different chunks."""
        buffer = self._chunks.pop((file, index), None)
        if buffer is None:
            stored = self.manifest.files[file]
            buffer = memoryview(bytearray(chunk_length(stored, index, self.manifest.chunk_bytes)))
            read_chunk(fd, self.path / stored.name, stored, index, self.manifest.chunk_bytes, buffer)
        self._chunks[file, index] = buffer
        with self._chunk_lock:
            while len(self._chunks) > self.kept_chunks:
                self._chunks.popitem(last=False)
        return buffer

    def _open(self, file: int) -> int:
        """A descriptor of a file; those that were used last stay open."""
        if file not in self._files:
            if len(self._files) >= MOST_OPEN_FILES:
                _, oldest = self._files.popitem(last=False)
                os.close(oldest)
            self._files[file] = open_stored(self.path, self._folder_fd, self.manifest.files[file])
        self._files.move_to_end(file)
        return self._files[file]


def _spans(offset: int, length: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """The chunks that a byte range meets: index, and where within the chunk the range begins and ends."""
    for index in range(offset // chunk, (offset + length - 1) // chunk + 1):
        base = index * chunk
        yield index, max(offset - base, 0), min(offset + length - base, chunk)


def _difference(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """one - other in every dimension."""
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _meeting(stored: StoredTensor, wanted: Rectangle) -> list[StoredPiece]:
    """The pieces of a tensor that share elements with a rectangle."""
    # [pieces, dims]: the intersection of each piece with the rectangle, empty where low >= high in some dimension
    low = np.maximum(stored.starts, np.array(wanted.start, dtype=np.int64))
    high = np.minimum(stored.starts + stored.shapes, np.array(wanted.stop, dtype=np.int64))
    return [stored.piece(number) for number in np.flatnonzero((low < high).all(axis=1)).tolist()]
