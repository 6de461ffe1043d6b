"""Rectangles of a folder's tensors, dequantised where they are quantised: what is read is what is wanted, and its
scales."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.shard import TORCH_DTYPES, as_bytes
from megaspec.core.divisors import ceil_div
from megaspec.hf.fits import DEQUANTISED, Stored
from megaspec.hf.folder import HfFolder, TheirEntry

SLAB_BYTES = 64 << 20
"""Read, or computed with, at once of a tensor of which not every byte is wanted as it is."""
# A quantised number, itself, its scale and their product in fp32.
_FP8_BYTES = 13
# Of a number: half a byte and its index, itself, and its product with the scale in bfloat16.
_MXFP4_BYTES = 7
# e2m1: a sign, two bits of exponent, one behind the point.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_BY_CODE = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
_BYTES = torch.arange(256)
_FP4_BY_BYTE = torch.stack((_FP4_BY_CODE[_BYTES & 15], _FP4_BY_CODE[_BYTES >> 4]), dim=-1)
"""[256, 2]: the numbers of a byte, the lower half's first."""
# e8m0: 2^(code - 127), and 255 is NaN. All are numbers of bfloat16, and so is each of their products with e2m1's that a
# weight has.
_POWERS = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [float("nan")], dtype=torch.bfloat16)


def read_rectangle(folder: HfFolder, stored: Stored, rows: slice, columns: slice, *, expert: int | None) -> Tensor:
    """Of a matrix, of the matrix of one expert, or of a vector as one column; [rows, columns] in `stored.dtype`."""
    return _READERS[stored.form](folder, stored, rows, columns, expert)


def read_whole(folder: HfFolder, stored: Stored) -> Tensor:
    """In its shape."""
    if len(stored.shape) < 3:
        rows, *columns = stored.shape
        found = read_rectangle(folder, stored, slice(0, rows), slice(0, prod(columns)), expert=None)
        return found.view(stored.shape)
    out = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
    _, rows, columns = stored.shape
    for expert, place in enumerate(out):
        place.copy_(read_rectangle(folder, stored, slice(0, rows), slice(0, columns), expert=expert))
    return out


def _plain(folder: HfFolder, stored: Stored, rows: slice, columns: slice, expert: int | None) -> Tensor:
    matrix = stored.shape if expert is None else stored.shape[1:]
    offset = 0
    if expert is not None:
        offset = expert * prod(matrix) * DTYPE_BYTES[stored.numbers.dtype]
    if len(matrix) == 1:
        matrix = (*matrix, 1)
    return _read_matrix(folder, stored.numbers, matrix, offset, rows, columns)


def _fp8(folder: HfFolder, stored: Stored, rows: slice, columns: slice, expert: int | None) -> Tensor:
    """Each number times the scale of its block, in fp32, rounded once."""
    assert expert is None, f"experts that lie in one tensor have no blocks: {stored.shape}"
    block_rows, block_columns = stored.block
    scale_columns = _blocks(columns, block_columns)
    by_column = torch.arange(columns.start, columns.stop) // block_columns - scale_columns.start
    out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=TORCH_DTYPES[DEQUANTISED])
    for some in _slabs(rows, out.shape[1] * _FP8_BYTES):
        numbers = _read_matrix(folder, stored.numbers, stored.shape, 0, some, columns)
        scale_rows = _blocks(some, block_rows)
        scales = _read_matrix(folder, stored.scales, stored.scales.shape, 0, scale_rows, scale_columns)
        by_row = torch.arange(some.start, some.stop) // block_rows - scale_rows.start
        scale = scales.to(torch.float32)[by_row][:, by_column]
        out[some.start - rows.start : some.stop - rows.start] = numbers.to(torch.float32) * scale
    return out


def _mxfp4(folder: HfFolder, stored: Stored, rows: slice, columns: slice, expert: int | None) -> Tensor:
    """Each number times its power of two, which is exact. Stored are outputs by inputs, the tensor is inputs by
    outputs."""
    assert expert is not None, f"tensors of experts alone are quantised so: {stored.shape}"
    _, inputs, outputs = stored.shape
    group = stored.block[1]
    # whole groups, of which what is not wanted is cut off
    groups = _blocks(rows, group)
    in_bytes = slice(groups.start * group // 2, groups.stop * group // 2)
    first = rows.start - groups.start * group
    n_rows = rows.stop - rows.start
    n_columns = columns.stop - columns.start
    out = torch.empty(n_columns, n_rows, dtype=TORCH_DTYPES[DEQUANTISED])
    numbers_at = expert * outputs * inputs // 2
    scales_at = expert * outputs * inputs // group
    for some in _slabs(columns, (groups.stop - groups.start) * group * _MXFP4_BYTES):
        packed = _read_matrix(folder, stored.numbers, (outputs, inputs // 2), numbers_at, some, in_bytes)
        codes = _read_matrix(folder, stored.scales, (outputs, inputs // group), scales_at, some, groups)
        numbers = _FP4_BY_BYTE[packed.to(torch.int32)].view(*codes.shape, group)
        values = numbers * _POWERS[codes.to(torch.int32)][..., None]
        here = slice(some.start - columns.start, some.stop - columns.start)
        out[here] = values.flatten(1)[:, first : first + n_rows]
    return out.T


_READERS: dict[str, Callable[[HfFolder, Stored, slice, slice, int | None], Tensor]] = {
    "plain": _plain,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _blocks(span: slice, size: int) -> slice:
    """The blocks of `size` that a span meets."""
    return slice(span.start // size, ceil_div(span.stop, size))


def _slabs(span: slice, each: int) -> Iterator[slice]:
    """A span in parts of at most SLAB_BYTES, where one of it takes `each` bytes."""
    at_once = max(1, SLAB_BYTES // max(1, each))
    for begin in range(span.start, span.stop, at_once):
        yield slice(begin, min(begin + at_once, span.stop))


def _read_matrix(
    folder: HfFolder, entry: TheirEntry, shape: Sequence[int], offset: int, rows: slice, columns: slice
) -> Tensor:
    """A rectangle of the row-major matrix of `shape` that begins at byte `offset` of what a folder keeps."""
    dtype = TORCH_DTYPES[entry.dtype]
    row_bytes = shape[1] * DTYPE_BYTES[entry.dtype]
    n_rows = rows.stop - rows.start
    if columns.stop - columns.start == shape[1]:
        whole = torch.empty(n_rows, shape[1], dtype=dtype)
        folder.read_into(entry, as_bytes(whole), offset + rows.start * row_bytes)
        return whole
    out = torch.empty(n_rows, columns.stop - columns.start, dtype=dtype)
    for some in _slabs(slice(0, n_rows), row_bytes):
        slab = torch.empty(some.stop - some.start, shape[1], dtype=dtype)
        folder.read_into(entry, as_bytes(slab), offset + (rows.start + some.start) * row_bytes)
        out[some] = slab[:, columns]
    return out
