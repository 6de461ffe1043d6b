"""Casts to MXFP8 and products of such matrices as equations (OCP Microscaling Formats 1.0; Mishra et al. 2025,
Recipes for Pre-training LLMs with MXFP8).

Note "MXFP8". 32 numbers along which a product sums share a scale, a power of two in the eight bits of E8M0: a byte b
stands for 2^(b - 127), 255 for NaN. The scale is the smallest with which the largest of them fits, as Transformer
Engine has it; the specification's own choice, the one below, lets some saturate. In rows blocks are 1x32, in columns
32x1, and each layout is made of the numbers themselves. Unlike those of Hopper, Blackwell's tensor cores take factors
that lie along the other dimension: columns are not turned round, values are [M, K] in both layouts. Scales are [M, k]
in rows and [m, K] in columns.

Of 32 numbers that are all zero the byte is 0. NaN stays NaN and makes no scale. Infinity is the format's largest by the
largest scale, which is infinite in fp32.
"""

# M rows, K columns of a matrix; m, k blocks along them

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import LARGEST
from megaspec_kernels.linear.factors import Cast, Factor, Layout

BLOCK = 32
# Of E8M0: the byte of 1, and that of the largest scale.
BIAS = 127
LARGEST_SCALE = 254
# The exponent of 2 in LARGEST / 0.875, which is a power of two for both.
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}


def cast(x_MK: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True) -> Cast:
    """A matrix in the layouts that are asked for. K is a multiple of 32; behind M rows there are zeros."""
    in_rows = None
    in_columns = None
    if rows:
        in_rows = _cast(x_MK, dtype)
    if columns:
        values_KM, scale_Km = _cast(in_units(x_MK).t(), dtype)
        in_columns = Factor(values_KM.t()[: x_MK.shape[0]].contiguous(), scale_Km.t().contiguous())
    return Cast(in_rows, in_columns)


def _cast(x_MK: Tensor, dtype: torch.dtype) -> Factor:
    """By blocks of 1x32."""
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32))
    blocks_MkB = wide.unflatten(1, (-1, BLOCK))
    amax_Mk = blocks_MkB.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(2)
    scale_Mk = scale_of(amax_Mk, dtype)
    scaled = blocks_MkB / in_numbers(scale_Mk).to(wide.dtype)[:, :, None]
    # what is infinite by any scale
    largest = LARGEST[dtype]
    return Factor(scaled.clamp(-largest, largest).flatten(1).to(dtype), scale_Mk)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of elements up to `amax` in `dtype`, as bytes of E8M0.

    Transformer Engine rounds amax / LARGEST up to a power of two, in fp32. Of numbers in bf16 and fp16 it is the same.
    """
    # amax = mantissa · 2^exponent with a mantissa in [0.5, 1); the largest number of both formats is 0.875 · 2^n
    mantissa, exponent = torch.frexp(amax)
    found = exponent - _LARGEST_EXPONENT[dtype] + (mantissa > 0.875) + BIAS
    found = torch.where(amax > 0, found, 0)
    found = torch.where(torch.isinf(amax), LARGEST_SCALE, found)
    return found.clamp(0, LARGEST_SCALE).to(torch.uint8)


def in_numbers(scale: Tensor) -> Tensor:
    """Bytes of E8M0 -> fp32."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def product(
    layout: Layout,
    a: Factor,
    b: Factor,
    *,
    dtype: torch.dtype,
    fast: bool = False,
    into: Tensor | None = None,
    overwrite: bool = True,
) -> Tensor:
    """A product as te.py's note "Layouts" names it, [.., ..] in `dtype`; in `into` where that is given, added to what
    is there unless `overwrite`. A is in rows for TN, else in columns; B in columns for NT, else in rows. `fast`: sums
    may be kept in fewer bits than fp32 has; not here."""
    wide = torch.promote_types(torch.float32, dtype)
    a_wide = dequantised(a, in_rows=layout[0] == "T", dtype=wide)
    b_wide = dequantised(b, in_rows=layout[1] == "N", dtype=wide)
    if layout == "TN":
        found = b_wide @ a_wide.t()
    elif layout == "NN":
        found = b_wide @ a_wide
    else:
        found = b_wide.t() @ a_wide
    found = found.to(dtype)
    if into is None:
        return found
    if overwrite:
        return into.copy_(found)
    return into.add_(found)


def dequantised(factor: Factor, *, in_rows: bool, dtype: torch.dtype) -> Tensor:
    """What a matrix in one layout stands for, [M, K]; `in_rows`, or in columns."""
    scale = in_numbers(factor.scale).to(dtype)
    values = factor.values.to(dtype)
    if in_rows:
        return (values.unflatten(1, (-1, BLOCK)) * scale[:, :, None]).flatten(1)
    blocks = in_units(values).unflatten(0, (-1, BLOCK))
    return (blocks * scale[:, None]).flatten(0, 1)[: len(values)]


def in_units(x_MK: Tensor) -> Tensor:
    """With rows of zeros behind those that fill no block."""
    if x_MK.shape[0] % BLOCK == 0:
        return x_MK
    return F.pad(x_MK, (0, 0, 0, -x_MK.shape[0] % BLOCK))
