"""What every implementation of the cast shares: the formats, which elements share a scale, and the scale itself.

Note "Scales". A scale is what fp8 numbers are multiplied by: x ≈ scale · x8. It is a power of two, in every recipe, and
the smallest with which the largest element fits. fp8 rounds by the exponent, so a finer scale would keep no more bits
of a number, but for those below the smallest normal one. In exchange multiplying and dividing by a scale rounds
nothing: what is quantised depends on the rounding to fp8 alone, on every device and in every kernel, and scales along
other dimensions can be put on afterwards without loss. Nothing saturates whose own largest element made the scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Block = tuple[int | None, int | None]
"""Rows and columns of a matrix that share a scale; None: all that there are."""

# The lines along which products sum, of rows and of columns: whole ones, and short ones as DeepSeek-V3 has them.
SHORT_LINE = 128
ROW: Block = (1, None)
COLUMN: Block = (None, 1)
SHORT_ROW: Block = (1, SHORT_LINE)
SHORT_COLUMN: Block = (SHORT_LINE, 1)

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# The exponent of 2 in LARGEST / 0.875, which is a power of two for both.
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}
# A scale and its inverse are normal numbers of fp32.
_LIMIT = 126


class Known(NamedTuple):
    """What a kernel has to know to write fp8 before it has seen all of a matrix, and what it records."""

    scale: Tensor
    """[1], in at least fp32: what elements are divided by, a power of two."""
    seen: Tensor | None
    """[1], in at least fp32, never negative: becomes the largest finite |x| where that is larger. None: nothing is
    recorded now."""
    saturated: Tensor
    """int64 [1]: elements that were finite and beyond the largest number of their format are added."""
    dtype: torch.dtype
    """The format to write."""


class Quantised(NamedTuple):
    """A matrix in fp8 in both layouts, each by scales of its own."""

    rows: Tensor
    """[M, K]"""
    row_scale: Tensor
    """[M, k]; of short lines those of one part of all rows lie behind each other, as products read them"""
    columns: Tensor
    """[K, M]"""
    column_scale: Tensor
    """[m, K], contiguous"""


def by_parts(scale_mk: Tensor) -> Tensor:
    """[m, k], the same numbers, with those of one k behind each other in memory."""
    return scale_mk.t().contiguous().t()


def scale_of(amax: Tensor, dtype: torch.dtype, *, margin: int = 0) -> Tensor:
    """The scale of elements up to `amax` in `dtype`, times 2^margin, in amax's shape and format (at least fp32).

    1 where amax is zero, infinite or NaN: there is nothing to scale, or nothing that a scale could save. Exponents stay
    within ±126, so elements below 2^-118 keep fewer bits.
    """
    # amax = mantissa · 2^exponent with a mantissa in [0.5, 1); the largest number of both formats is 0.875 · 2^n
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - _LARGEST_EXPONENT[dtype] + (mantissa > 0.875) + margin
    exponent = torch.where(torch.isfinite(amax) & (amax > 0), exponent, 0).clamp(-_LIMIT, _LIMIT)
    # by its bits: no power function rounds on the way
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32).to(amax.dtype)


def sizes_of(block: Block, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a block of a matrix."""
    rows, columns = block
    return rows or max(1, shape[0]), columns or max(1, shape[1])


def scale_shape(block: Block, shape: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a matrix has; those at its ends may be smaller."""
    rows, columns = sizes_of(block, shape)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def spread(scale_mk: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """[m, k] -> a scale for each element [M, K], or what multiplies with one."""
    rows, columns = sizes_of(block, shape)
    if scale_mk.shape[0] > 1 and rows > 1:
        scale_mk = scale_mk.repeat_interleave(rows, 0)[: shape[0]]
    if scale_mk.shape[1] > 1 and columns > 1:
        scale_mk = scale_mk.repeat_interleave(columns, 1)[:, : shape[1]]
    return scale_mk
