"""Tensors of a Hugging Face folder under our names, read rectangle by rectangle; and ours as theirs, to be written.

A rank asks for what it owns alone. Beside what it returns, a read takes at most stored.SLAB_BYTES of memory.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.reader import Weights
from megaspec.checkpoint.shard import TORCH_DTYPES
from megaspec.core.divisors import ceil_div
from megaspec.core.errors import CheckpointError
from megaspec.hf.blocks import Block, TheirTensor
from megaspec.hf.fits import Stored, fit_of
from megaspec.hf.folder import HfFolder, TheirEntry, first_of
from megaspec.hf.names import WeightTable
from megaspec.hf.stored import SLAB_BYTES, read_rectangle


class HfWeights:
    """The weights of a Hugging Face folder under our names: what Reader is for a checkpoint."""

    def __init__(self, folder: HfFolder, table: WeightTable):
        """CheckpointError: tensors that are missing, left over, of another shape, or no floating-point numbers."""
        self.path = folder.path
        self._folder = folder
        self._table = table
        fit = fit_of(folder, table)
        if fit.problems:
            raise CheckpointError([f"{folder.path}: {problem}" for problem in first_of(fit.problems)])
        self.tensors = fit.tensors
        """Theirs, by the family's names."""
        self._last: tuple[tuple[Any, ...], Tensor] | None = None
        """What was read last of a tensor whose parts take turns, for the other parts."""
        _refuse_other_copies(folder, self.tensors, table.copies)

    def __contains__(self, name: str) -> bool:
        return name in self._table.ours

    def names(self) -> list[str]:
        """Of all tensors, ours."""
        return list(self._table.ours)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table.ours[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The widest of the tensors that it is made of."""
        dtypes = [self.tensors[block.name].dtype for block in self._table.ours[name].blocks]
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

    def _read_rows(self, block: Block, low: int, high: int, columns: slice | None) -> Tensor:
        """Rows low..high of a block and those columns of them, in our order."""
        rows = block.their_rows(low, high)
        first = int(rows.min())
        end = int(rows.max()) + 1
        if block.is_consecutive:
            return self._read_span(block, slice(first, end), columns)
        if block.stride:
            # with the rows between, which other parts take their turn in: theirs is the same span
            first = first // block.stride * block.stride
            end = min(ceil_div(end, block.stride) * block.stride, self._their_size(block))
        key = (block.name, block.expert, first, end, columns and (columns.start, columns.stop))
        # looked at once: several threads may read
        last = self._last
        if last is None or last[0] != key:
            last = (key, self._read_span(block, slice(first, end), columns))
            self._last = last
        return last[1][torch.from_numpy(rows - first)]

    def _read_span(self, block: Block, span: slice, columns: slice | None) -> Tensor:
        """Consecutive rows of ours as they lie in theirs, and those columns of them."""
        stored = self.tensors[block.name]
        if columns is None:
            found = read_rectangle(self._folder, stored, span, slice(0, 1), expert=block.expert).flatten()
        elif block.transposed:
            found = read_rectangle(self._folder, stored, columns, span, expert=block.expert).T
        else:
            found = read_rectangle(self._folder, stored, span, columns, expert=block.expert)
        if not torch.isfinite(found).all():
            raise CheckpointError(f"{self.path}: {block.name} holds NaN or infinities, so it is no trained weight")
        return found

    def _their_size(self, block: Block) -> int:
        """How many rows of ours there are in the matrix that a block is in."""
        shape = self.tensors[block.name].shape
        matrix = shape if block.expert is None else shape[1:]
        return matrix[1] if block.transposed else matrix[0]


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


def _refuse_other_copies(folder: HfFolder, tensors: Mapping[str, Stored], copies: Mapping[str, str]) -> None:
    """CheckpointError: a tensor that the configuration ties to another holds other numbers."""
    for name, other in copies.items():
        if name not in tensors:
            continue
        one = tensors[name].entries
        two = tensors[other].entries
        kinds = [[(entry.dtype, entry.shape) for entry in entries] for entries in (one, two)]
        if kinds[0] != kinds[1] or not all(map(partial(_are_equal, folder), one, two)):
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
