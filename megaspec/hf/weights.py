"""Tensors of a Hugging Face folder under our names, read rectangle by rectangle; and ours as theirs, to be written.

A rank asks for what it owns alone. Beside what it returns, a read takes at most SLAB_BYTES of memory.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.reader import Weights
from megaspec.checkpoint.shard import TORCH_DTYPES, SavedPiece, as_bytes
from megaspec.core.errors import CheckpointError
from megaspec.hf.blocks import Block, TheirTensor
from megaspec.hf.fits import entries_of, misfits
from megaspec.hf.folder import HfFolder, TheirEntry, first_of
from megaspec.hf.names import WeightTable

SLAB_BYTES = 64 << 20
"""Read at once of a tensor of which not every byte is wanted."""


PIECE_BYTES = 256 << 20
"""Of a tensor that is streamed from one file to another, what is in memory at once."""


class HfWeights:
    """The weights of a Hugging Face folder under our names: what Reader is for a checkpoint."""

    def __init__(self, folder: HfFolder, table: WeightTable):
        """CheckpointError: tensors that are missing, left over, of another shape, or no floating-point numbers."""
        self.path = folder.path
        self._folder = folder
        self._table = table
        self._entries = entries_of(folder, table)
        problems = misfits(self._entries, table)
        if problems:
            raise CheckpointError([f"{folder.path}: {problem}" for problem in first_of(problems)])
        _refuse_other_copies(folder, self._entries, table.copies)

    def __contains__(self, name: str) -> bool:
        return name in self._table.ours

    def names(self) -> list[str]:
        """Of all tensors, ours."""
        return list(self._table.ours)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table.ours[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The widest of the tensors that it is made of."""
        dtypes = [self._entry(block).dtype for block in self._table.ours[name].blocks]
        return TORCH_DTYPES[max(dtypes, key=DTYPE_BYTES.__getitem__)]

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """As Weights. CheckpointError: what is read of a tensor of theirs holds NaN or infinities."""
        ours = self._table.ours[name]
        if start is None:
            start = (0,) * len(ours.shape)
        if shape is None:
            shape = [whole - begin for whole, begin in zip(ours.shape, start, strict=True)]
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        columns = slice(start[1], start[1] + shape[1]) if len(shape) == 2 else None
        for block, low, high, begin in ours.parts(start[0], start[0] + shape[0]):
            rows = slice(begin - start[0], begin - start[0] + high - low)
            out[rows] = self._read_rows(block, low, high, columns)
        return out

    def _entry(self, block: Block) -> TheirEntry:
        return self._entries[block.name]

    def _read_rows(self, block: Block, low: int, high: int, columns: slice | None) -> Tensor:
        """Rows low..high of a block and those columns of them, in our order."""
        rows = block.their_rows(low, high)
        first = int(rows.min())
        span = slice(first, int(rows.max()) + 1)
        entry = self._entry(block)
        matrix = entry.shape if block.expert is None else entry.shape[1:]
        offset = 0
        if block.expert is not None:
            offset = block.expert * prod(matrix) * DTYPE_BYTES[entry.dtype]
        if columns is None:
            found = read_matrix(self._folder, entry, (*matrix, 1), offset, span, slice(0, 1)).flatten()
        elif block.transposed:
            found = read_matrix(self._folder, entry, matrix, offset, columns, span).T
        else:
            found = read_matrix(self._folder, entry, matrix, offset, span, columns)
        if not torch.isfinite(found).all():
            raise CheckpointError(f"{self.path}: {block.name} holds NaN or infinities, so it is no trained weight")
        if block.is_consecutive:
            return found
        return found[torch.from_numpy(rows - first)]


def read_matrix(
    folder: HfFolder, entry: TheirEntry, shape: Sequence[int], offset: int, rows: slice, columns: slice
) -> Tensor:
    """A rectangle of the row-major matrix of `shape` that begins at byte `offset` of a tensor."""
    dtype = TORCH_DTYPES[entry.dtype]
    row_bytes = shape[1] * DTYPE_BYTES[entry.dtype]
    n_rows = rows.stop - rows.start
    if columns.stop - columns.start == shape[1]:
        whole = torch.empty(n_rows, shape[1], dtype=dtype)
        folder.read_into(entry, as_bytes(whole), offset + rows.start * row_bytes)
        return whole
    out = torch.empty(n_rows, columns.stop - columns.start, dtype=dtype)
    rows_at_once = max(1, SLAB_BYTES // row_bytes)
    for begin in range(0, n_rows, rows_at_once):
        end = min(begin + rows_at_once, n_rows)
        slab = torch.empty(end - begin, shape[1], dtype=dtype)
        folder.read_into(entry, as_bytes(slab), offset + (rows.start + begin) * row_bytes)
        out[begin:end] = slab[:, columns]
    return out


def streamed_pieces(weights: Weights) -> list[SavedPiece]:
    """All of a source's tensors, for a checkpoint: rows of PIECE_BYTES at most, each read when it is written."""
    pieces = []
    for name in weights.names():
        whole = weights.shape(name)
        dtype = weights.dtype(name)
        rows_at_once = max(1, PIECE_BYTES // (prod(whole[1:]) * dtype.itemsize))
        for first in range(0, whole[0], rows_at_once):
            start = (first,) + (0,) * (len(whole) - 1)
            shape = (min(rows_at_once, whole[0] - first), *whole[1:])
            promised = torch.empty(shape, dtype=dtype, device="meta")
            pieces.append(SavedPiece(name, whole, start, promised, partial(weights.read, name, start, shape)))
    return pieces


def their_dtype(theirs: TheirTensor, weights: Weights) -> torch.dtype:
    """The widest format of the tensors of ours that lie in a tensor of theirs."""
    dtypes = {weights.dtype(ours.name) for ours, _, _ in theirs.pieces}
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def their_tensor(theirs: TheirTensor, weights: Weights, dtype: torch.dtype) -> Tensor:
    """One tensor of theirs out of ours, whole and in `dtype`."""
    out = torch.empty(theirs.shape, dtype=dtype)
    for ours, begin, block in theirs.pieces:
        shape = (block.rows, *ours.shape[1:])
        start = (begin,) + (0,) * (len(shape) - 1)
        value = weights.read(ours.name, start, shape).to(dtype)
        place = out if block.expert is None else out[block.expert]
        if block.transposed:
            place = place.T
        place[torch.from_numpy(block.their_rows(0, block.rows))] = value
    return out


def _refuse_other_copies(folder: HfFolder, entries: Mapping[str, TheirEntry], copies: Mapping[str, str]) -> None:
    """CheckpointError: a tensor that the configuration ties to another holds other numbers."""
    for name, other in copies.items():
        if name not in entries:
            continue
        one = entries[name]
        two = entries[other]
        if one.shape != two.shape or one.dtype != two.dtype or not _are_equal(folder, one, two):
            raise CheckpointError(
                f"{folder.path}: {name} differs from {other}, which tie_word_embeddings=true makes one"
            )


def _are_equal(folder: HfFolder, one: TheirEntry, two: TheirEntry) -> bool:
    for begin in range(0, one.bytes, SLAB_BYTES):
        length = min(SLAB_BYTES, one.bytes - begin)
        a = bytearray(length)
        b = bytearray(length)
        folder.read_into(one, memoryview(a), begin)
        folder.read_into(two, memoryview(b), begin)
        if a != b:
            return False
    return True
