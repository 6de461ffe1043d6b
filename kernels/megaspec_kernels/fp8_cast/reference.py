"""Quantising to fp8: the largest element of each block, and the cast, in rows and in columns (Micikevicius et al.
2022).

Non-finite elements become NaN, so that whatever they are multiplied into shows them. Others beyond the format's largest
number, which a scale of older data lets happen, saturate and are counted.
"""

# M rows, K columns of a matrix; m, k blocks along them

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import (
    COLUMN,
    LARGEST,
    ROW,
    SHORT_COLUMN,
    SHORT_ROW,
    Block,
    Quantised,
    by_parts,
    scale_of,
    sizes_of,
    spread,
)


def amax(x_MK: Tensor, *, block: Block) -> Tensor:
    """max|x| of each block, [m, k] in at least fp32; NaN where there is one."""
    rows, columns = sizes_of(block, x_MK.shape)
    M, K = x_MK.shape
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32)).abs()
    padded = F.pad(wide, (0, -K % columns, 0, -M % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def scale(x_MK: Tensor, *, block: Block, dtype: torch.dtype) -> Tensor:
    """The scale of each block that its own largest element makes, [m, k] in at least fp32."""
    return scale_of(amax(x_MK, block=block), dtype)


def cast(
    x_MK: Tensor,
    scale_mk: Tensor,
    *,
    block: Block,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = False,
    seen: Tensor | None = None,
    saturated: Tensor | None = None,
    scale_copy: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """x / scale in fp8, rounded to nearest, ties to even. -> [M, K] where `rows`, [K, M] where `columns`, contiguous.

    `scale_mk`: of each block, powers of two. `seen`: [1], in the format of the scale, becomes the largest finite |x|
    where that is larger. `saturated`: int64 [1], to which the elements that saturate are added. `scale_copy`: in the
    shape of the scale, becomes a copy of it. Only with a scale for the whole matrix.
    """
    largest = LARGEST[dtype]
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32)) / spread(scale_mk, block, x_MK.shape)
    if seen is not None and x_MK.numel():
        # what is not finite shows in the loss, and makes no scale
        finite = torch.where(torch.isfinite(x_MK), x_MK, 0).abs().amax().view(1)
        seen.copy_(torch.maximum(seen, finite.to(seen.dtype)))
    if saturated is not None:
        saturated += (torch.isfinite(x_MK) & (wide.abs() > largest)).sum()
    if scale_copy is not None:
        scale_copy.copy_(scale_mk)
    cut = torch.where(torch.isfinite(x_MK), wide.clamp(-largest, largest), torch.nan).to(dtype)
    return cut if rows else None, cut.t().contiguous() if columns else None


def amax_of_lines(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """max|x| of each row [M, 1] and of each column [1, K], see amax."""
    return amax(x_MK, block=ROW), amax(x_MK, block=COLUMN)


def quantise_lines(x_MK: Tensor, *, dtype: torch.dtype, amax: tuple[Tensor, Tensor] | None = None) -> Quantised:
    """x in rows [M, K] by a scale for each row [M, 1], and in columns [K, M] by one for each column [1, K]. `amax`:
    what scales are made of, as amax_of_lines has it, where more is known than x; None: what it makes of x."""
    row_amax, column_amax = amax_of_lines(x_MK) if amax is None else amax
    row_scale = scale_of(row_amax, dtype)
    column_scale = scale_of(column_amax, dtype)
    rows, _ = cast(x_MK, row_scale, block=ROW, dtype=dtype)
    _, turned = cast(x_MK, column_scale, block=COLUMN, dtype=dtype, rows=False, columns=True)
    return Quantised(rows, row_scale, turned, column_scale)


def quantise_short_lines(x_MK: Tensor, *, dtype: torch.dtype) -> Quantised:
    """x in both layouts by scales of its own: in each layout one for every 128 elements of a line."""
    row_scale = scale(x_MK, block=SHORT_ROW, dtype=dtype)
    column_scale = scale(x_MK, block=SHORT_COLUMN, dtype=dtype)
    rows, _ = cast(x_MK, row_scale, block=SHORT_ROW, dtype=dtype)
    _, turned = cast(x_MK, column_scale, block=SHORT_COLUMN, dtype=dtype, rows=False, columns=True)
    return Quantised(rows, by_parts(row_scale), turned, column_scale)


def columns(x_MK: Tensor) -> Tensor:
    """A matrix in fp8, [M, K] -> [K, M], contiguous: of a scale for the whole of it, its columns."""
    # as bytes: they are moved, not computed with
    return x_MK.view(torch.uint8).t().contiguous().view(x_MK.dtype)
