"""Tiles in fp8 by a scale that is known: what Triton kernels that write fp8 share."""

# M rows, K columns of a matrix

from typing import NamedTuple

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import LARGEST

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks such kernels there
    triton = None

# Of the bytes of a number in a format: those of its mantissa, and the exponent of its smallest normal number.
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
LEAST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}

if triton is not None:
    # The interpreter's conversion drops the carry of a mantissa that rounds up to the next power of two, and NaN
    # (Triton 3.7), so there the kernel makes the bytes itself.
    INTERPRETED = triton.knobs.runtime.interpret

    @triton.jit
    def fp8_bytes(y, mantissa: tl.constexpr, least_exponent: tl.constexpr):
        """fp32 within the range of the format -> uint8, to nearest, ties to even."""
        bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        drop: tl.constexpr = 23 - mantissa
        nearest = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop
        # the exponent of the format's smallest normal number is written as 1
        normal = nearest - ((126 + least_exponent) << mantissa)
        # below it steps are equal: added to 1.5 · 2^23 of them, a number is rounded to a whole number of steps
        per_step: tl.constexpr = 2.0 ** (mantissa - least_exponent)
        many: tl.constexpr = 12582912.0
        subnormal = ((tl.abs(y) * per_step + many) - many).to(tl.int32)
        magnitude = tl.where(tl.abs(y) < 2.0**least_exponent, subnormal, normal)
        magnitude = tl.where(y == y, magnitude, 0x7F)
        sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(y == y, magnitude | sign, 0x7F).to(tl.uint8)

    @triton.jit
    def inverse_of(scale):
        """2^-e of 2^e, by its bits."""
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)

    @triton.jit
    def in_fp8(
        x,
        inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """A tile in fp32 -> its bytes; its finite elements without their signs, else 0; where they saturate."""
        size = tl.abs(x)
        is_finite = size < float("inf")
        y = x * inverse
        over = is_finite & (tl.abs(y) > largest)
        # comparisons leave NaN as it is
        y = tl.where(y > largest, largest, y)
        y = tl.where(y < -largest, -largest, y)
        # one NaN for all that is not finite
        y = tl.where(is_finite, y, float("nan"))
        if interpreted:
            q = fp8_bytes(y, mantissa, least_exponent)
        elif mantissa == 3:
            q = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            q = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return q, tl.where(is_finite, size, 0.0), over

    @triton.jit
    def record(seen_ptr, saturated_ptr, largest_seen, over, has_seen: tl.constexpr):
        """Of a program: its largest finite element, and how many saturated."""
        if has_seen:
            # numbers that are not negative are ordered as their bits are
            tl.atomic_max(seen_ptr, largest_seen.to(tl.int32, bitcast=True))
        if over > 0:
            tl.atomic_add(saturated_ptr, over.to(tl.int64))


def format_constants(dtype: torch.dtype) -> tuple[float, int, int, bool]:
    """Of a format, what `in_fp8` takes behind the inverse."""
    return LARGEST[dtype], MANTISSA[dtype], LEAST_EXPONENT[dtype], INTERPRETED


class Known(NamedTuple):
    """What a kernel has to know to write fp8 before it has seen all of a matrix, and what it records."""

    scale: Tensor
    """[1], fp32: what elements are divided by, a power of two."""
    seen: Tensor | None
    """fp32 [1]: becomes the largest finite |x| where that is larger. None: nothing is recorded now."""
    saturated: Tensor
    """int64 [1]: finite elements beyond the largest number of the format are added."""
    dtype: torch.dtype
    """The format to write."""


class Written(NamedTuple):
    """A matrix in fp8, in both layouts, and its scale."""

    rows: Tensor
    """[M, K]"""
    columns: Tensor
    """[K, M]"""
    scale: Tensor
    """[1, 1]"""


def empty_pair(like: Tensor, M: int, K: int, dtype: torch.dtype) -> Written:
    """Memory for one, on the device of `like`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return Written(
        like.new_empty(M, K, dtype=dtype), like.new_empty(K, M, dtype=dtype), like.new_empty(1, 1, dtype=wide)
    )
