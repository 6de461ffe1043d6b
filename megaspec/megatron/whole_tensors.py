"""A tensor of the whole model as the rectangles that the files of ranks hold of it. Torch-free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from megaspec.checkpoint.format import DTYPE_BYTES
from megaspec.checkpoint.rectangles import not_held_once
from megaspec.core.errors import CheckpointError
from megaspec.core.problems import show
from megaspec.megatron.checkpoint_names import EMBEDDING, HEAD, VOCABULARY, MegatronTable
from megaspec.megatron.rank_files import RankFiles
from megaspec.megatron.stored_tensors import StoredTensor
from megaspec.megatron.torch_zip import check_bytes

MOST_PROBLEMS = 20
_SLAB_BYTES = 64 << 20
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Patch:
    """Rows and columns of a matrix (or of a vector, as one column) as they lie in a file."""

    row: int
    column: int
    rows: int
    columns: int
    stored: StoredTensor
    offset: int
    """Of its first number in the file, in bytes."""
    row_bytes: int
    """From one row to the next; within a row, numbers lie side by side."""


@dataclass
class WholeTensor:
    """A matrix or vector of the whole model."""

    shape: tuple[int, ...]
    dtype: str
    patches: list[Patch] = field(default_factory=list)

    @property
    def row_numbers(self) -> int:
        return prod(self.shape[1:])


def patch_of(stored: StoredTensor, at: Sequence[int], shape: Sequence[int], *, row: int, column: int) -> Patch:
    """The matrix of `shape` at index `at` of a stored tensor, placed at (row, column) of a whole one.

    All but the last `len(shape)` of the indices name a single matrix. CheckpointError: rows are not side by side.
    """
    offset = stored.offset
    size = DTYPE_BYTES[stored.dtype]
    for index, stride in zip(at, stored.strides, strict=True):
        offset += index * stride * size
    n_columns = shape[1] if len(shape) == 2 else 1
    is_in_order = n_columns == 1 or stored.strides[-1] == 1
    row_stride = stored.strides[-len(shape)]
    if shape[0] <= 1:
        row_stride = n_columns
    if not is_in_order or row_stride < n_columns:
        raise CheckpointError(
            f"{stored.file}: a tensor of shape {list(stored.shape)} has strides {list(stored.strides)}, expected rows "
            "one behind the other"
        )
    return Patch(row, column, shape[0], n_columns, stored, offset, row_stride * size)


def check_whole(tensors: Mapping[str, WholeTensor], where: str) -> list[str]:
    """What is wrong with how patches cover their tensors: gaps, overlaps, patches outside. A line each."""
    problems = []
    names: list[str] = []
    for name, tensor in tensors.items():
        rows = tensor.shape[0]
        for patch in tensor.patches:
            is_inside = patch.row + patch.rows <= rows and patch.column + patch.columns <= tensor.row_numbers
            if not is_inside or not patch.rows or not patch.columns:
                problems.append(f"{where}: {show(name)} has a piece outside of its shape {list(tensor.shape)}")
                break
        else:
            names.append(name)
    wholes = [(tensors[name].shape[0], tensors[name].row_numbers) for name in names]
    owners = []
    starts = []
    shapes = []
    for number, name in enumerate(names):
        for patch in tensors[name].patches:
            owners.append(number)
            starts.append((patch.row, patch.column))
            shapes.append((patch.rows, patch.columns))
    bad = not_held_once(_pairs(wholes), np.array(owners, dtype=np.int64), _pairs(starts), _pairs(shapes))
    for number in bad:
        problems.append(f"{where}: the pieces of {show(names[number])} leave a part of it out, or hold it twice")
    return problems


def _pairs(values: list[tuple[int, int]]) -> np.ndarray:
    return np.array(values, dtype=np.int64).reshape(-1, 2)


def fit_problems(tensors: Mapping[str, WholeTensor], table: MegatronTable, *, padded: int | None) -> list[str]:
    """What of a checkpoint's tensors is not what its model has: missing, left over, of another shape or format.

    `padded`: rows that the vocabulary has there with its padding; None: not known.
    """
    problems = []
    for name, theirs in table.theirs.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"{name} of shape {list(theirs.shape)} is missing")
            continue
        expected = theirs.shape
        if name in VOCABULARY and len(tensor.shape) == 2 and tensor.shape[0] >= theirs.shape[0]:
            expected = (padded or tensor.shape[0], *theirs.shape[1:])
        if tensor.shape != expected:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}")
        if tensor.dtype not in _FLOATS:
            problems.append(f"{name} is in {tensor.dtype}, expected one of {', '.join(_FLOATS)}")
    for name in tensors:
        is_copy = table.is_tied and name == HEAD
        if name not in table.theirs and not is_copy:
            problems.append(f"{show(name)} is of no part of the model that its args say")
    if table.is_tied and HEAD in tensors and EMBEDDING in tensors:
        one, other = tensors[HEAD], tensors[EMBEDDING]
        if one.shape != other.shape or one.dtype != other.dtype:
            problems.append(f"{HEAD} has shape {list(one.shape)}, and {EMBEDDING}, which it is tied to, another")
    return problems


def first_of(problems: list[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(problems) - MOST_PROBLEMS
    if more <= 0:
        return problems
    return [*problems[:MOST_PROBLEMS], f"and {more} more"]


def check_storages(files: RankFiles, tensors: Iterable[WholeTensor]) -> None:
    """Reads every storage that is needed once. CheckpointError: one is damaged."""
    seen = set()
    for tensor in tensors:
        for patch in tensor.patches:
            key = (patch.stored.file, patch.stored.member.offset)
            if key not in seen:
                seen.add(key)
                check_bytes(files, patch.stored.file, patch.stored.member)


def read_rows(files: RankFiles, tensor: WholeTensor, row: int, out: np.ndarray, *, column: int = 0) -> None:
    """Fills `out` [rows, bytes] with the bytes of consecutive rows from `row` on, and of columns from `column` on."""
    size = DTYPE_BYTES[tensor.dtype]
    n_columns = out.shape[1] // size
    for patch in tensor.patches:
        low = max(row, patch.row)
        high = min(row + len(out), patch.row + patch.rows)
        left = max(column, patch.column)
        right = min(column + n_columns, patch.column + patch.columns)
        if low >= high or left >= right:
            continue
        place = out[low - row : high - row, (left - column) * size : (right - column) * size]
        offset = patch.offset + (low - patch.row) * patch.row_bytes + (left - patch.column) * size
        _read_rectangle(files, patch, offset, place)


def _read_rectangle(files: RankFiles, patch: Patch, offset: int, place: np.ndarray) -> None:
    """`place` [rows, bytes] from rows that are patch.row_bytes apart."""
    rows, width = place.shape
    at_once = max(1, _SLAB_BYTES // max(1, patch.row_bytes))
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        # without what lies behind the last row's part, which may be another tensor's or none
        length = (count - 1) * patch.row_bytes + width
        content = np.zeros(count * max(patch.row_bytes, width), dtype=np.uint8)
        files.read_into(patch.stored.file, offset + first * patch.row_bytes, memoryview(content)[:length])
        slab = content.reshape(count, -1)
        place[first : first + count] = slab[:, :width]


def equal_everywhere(files: RankFiles, one: WholeTensor, other: WholeTensor) -> bool:
    """Whether two tensors of the same shape and format hold the same bytes."""
    row_bytes = max(1, one.row_numbers * DTYPE_BYTES[one.dtype])
    at_once = max(1, _SLAB_BYTES // row_bytes)
    for first in range(0, one.shape[0], at_once):
        shape = (min(at_once, one.shape[0] - first), row_bytes)
        contents = []
        for tensor in (one, other):
            content = np.empty(shape, dtype=np.uint8)
            read_rows(files, tensor, first, content)
            contents.append(content)
        if not np.array_equal(*contents):
            return False
    return True
