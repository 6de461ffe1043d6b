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

    # PTX of four numbers in fp32 -> their bytes in 32 bits, the first one's lowest. Of two operands a conversion makes
    # the first one the upper byte.
    _CONVERT = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.FORMAT.f32 low, $2, $1;
        cvt.rn.satfinite.FORMAT.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }"""
    CONVERT_TO_E4M3 = tl.constexpr(_CONVERT.replace("FORMAT", "e4m3x2"))
    CONVERT_TO_E5M2 = tl.constexpr(_CONVERT.replace("FORMAT", "e5m2x2"))

    @triton.jit
    def fp8_bytes(y, mantissa: tl.constexpr, least_exponent: tl.constexpr, largest: tl.constexpr):
        """fp32 -> uint8 in int32, to nearest, ties to even; beyond the largest number the largest, NaN for NaN.

        Kernels that store a tile as it is and turned round take this one element at a time: what a GPU's own conversion
        makes, ptxas 12.9 mixes up between two such stores (triton-lang/triton#11111).
        """
        # comparisons leave NaN as it is
        y = tl.where(y > largest, largest, y)
        y = tl.where(y < -largest, -largest, y)
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
        sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(y == y, magnitude | sign, 0x7F)

    @triton.jit
    def tile_of_program(below: tl.constexpr):
        """Of a grid that grid_of_tiles makes: the program's tile, down and across. It may lie below the matrix."""
        return tl.program_id(2) * below + tl.program_id(0), tl.program_id(1)

    @triton.jit
    def from_the_end(tile_m, M, b_m: tl.constexpr):
        """The tile that takes the place of another one, down, where a kernel begins with the last rows.

        Where a kernel before went over the same matrix, from its first rows to its last, caches hold the last ones.
        """
        return tl.cdiv(M, b_m) - 1 - tile_m

    @triton.jit
    def inverse_of(scale):
        """2^-e of 2^e, by its bits."""
        return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)

    @triton.jit
    def load_known(scale_ptr, seen_ptr):
        """-> a known scale, its inverse, and the largest element that was seen so far, as bits; see see_above.

        Its place is behind the loads of a tile and ahead of what is computed of them: the compiler waits for a scale,
        which is one number for a whole program, before it begins a load that stands behind it.
        """
        scale = tl.load(scale_ptr)
        before = tl.load(seen_ptr)
        return scale, inverse_of(scale), before

    @triton.jit
    def see(top, seen_ptr):
        """Remembers the largest finite element of a tile."""
        see_above(top, tl.load(seen_ptr), seen_ptr)

    @triton.jit
    def see_above(top, before, seen_ptr):
        """The same, with what was there before."""
        bits = top.to(tl.int32, bitcast=True)
        # what was read may be old: then an atomic operation more is done, which changes nothing
        if bits > before:
            tl.atomic_max(seen_ptr, bits, sem="relaxed")

    @triton.jit
    def load_pairs(pairs_ptr, at, mask, is_even: tl.constexpr):
        if is_even:
            pairs = tl.load(pairs_ptr + at)
        else:
            pairs = tl.load(pairs_ptr + at, mask=mask, other=0)
        return pairs

    @triton.jit
    def load_pairs_with(pairs_ptr, at, mask, is_even: tl.constexpr, policy: tl.constexpr):
        """`policy`: what caches are told about it, as tl.load has it."""
        if is_even:
            pairs = tl.load(pairs_ptr + at, eviction_policy=policy)
        else:
            pairs = tl.load(pairs_ptr + at, mask=mask, other=0, eviction_policy=policy)
        return pairs

    @triton.jit
    def load_four_rows(pairs_ptr, at, step, mask, is_even: tl.constexpr, policy: tl.constexpr):
        """Of rows that lie `step` apart; see load_pairs_with."""
        pairs_0 = load_pairs_with(pairs_ptr, at, mask, is_even, policy)
        pairs_1 = load_pairs_with(pairs_ptr, at + step, mask, is_even, policy)
        pairs_2 = load_pairs_with(pairs_ptr, at + 2 * step, mask, is_even, policy)
        pairs_3 = load_pairs_with(pairs_ptr, at + 3 * step, mask, is_even, policy)
        return pairs_0, pairs_1, pairs_2, pairs_3

    @triton.jit
    def store_masked(ptr, at, what, mask, is_even: tl.constexpr):
        if is_even:
            tl.store(ptr + at, what)
        else:
            tl.store(ptr + at, what, mask=mask)

    @triton.jit
    def split(pairs):
        """int32 of two bf16 -> both in fp32, the first of them first."""
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
        return low, high

    @triton.jit
    def two_rows(upper, lower):
        """int16 of each of two rows -> int32, the upper row's half first."""
        return (upper.to(tl.int32) & 0xFFFF) | lower.to(tl.int32) << 16

    @triton.jit
    def columns_of_two_rows(ab, cd, interpreted: tl.constexpr):
        """What two_rows makes of rows a and b, and of c and d -> int32 of four rows of the first column, and of the
        second."""
        if interpreted:
            first = (ab & 0xFF) | (ab >> 8 & 0xFF00) | (cd & 0xFF) << 16 | (cd >> 16 & 0xFF) << 24
            second = (ab >> 8 & 0xFF) | (ab >> 16 & 0xFF00) | (cd >> 8 & 0xFF) << 16 | (cd >> 24 & 0xFF) << 24
        else:
            # bytes 0 to 3 are those of the first operand, 4 to 7 those of the second
            first = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [ab, cd], dtype=tl.int32, is_pure=True, pack=1
            )
            second = tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [ab, cd], dtype=tl.int32, is_pure=True, pack=1
            )
        return first, second

    @triton.jit
    def columns_of_rows(q_0, q_1, q_2, q_3, interpreted: tl.constexpr):
        """int16 of two columns in each of four rows -> int32 of four rows of the first column, and of the second."""
        ab = two_rows(q_0, q_1)
        cd = two_rows(q_2, q_3)
        return columns_of_two_rows(ab, cd, interpreted)

    @triton.jit
    def two_rounded(
        low,
        high,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """Two neighbours of a row in fp32, which are scaled, with NaN for what is not finite -> int16 of two fp8."""
        if interpreted:
            first = fp8_bytes(low, mantissa, least_exponent, largest)
            second = fp8_bytes(high, mantissa, least_exponent, largest)
            both = (first | (second << 8)).to(tl.int16)
        elif mantissa == 3:
            # the first operand becomes the upper byte
            both = tl.inline_asm_elementwise(
                "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
            )
        else:
            both = tl.inline_asm_elementwise(
                "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
            )
        return both

    @triton.jit
    def two_rows_rounded(
        low_0,
        high_0,
        low_1,
        high_1,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """The same of two rows -> int32, as two_rows makes it, for a store of columns alone. A conversion writes half a
        register. What is stored in rows too is put together by two_rows: ptxas 12.8 ends with a segmentation fault
        where a half goes both ways."""
        if interpreted:
            q_0 = two_rounded(low_0, high_0, largest, mantissa, least_exponent, interpreted)
            q_1 = two_rounded(low_1, high_1, largest, mantissa, least_exponent, interpreted)
            both = two_rows(q_0, q_1)
        else:
            convert: tl.constexpr = CONVERT_TO_E4M3 if mantissa == 3 else CONVERT_TO_E5M2
            both = tl.inline_asm_elementwise(
                convert, "=r,f,f,f,f", [low_0, high_0, low_1, high_1], dtype=tl.int32, is_pure=True, pack=1
            )
        return both

    @triton.jit
    def two_in_fp8(
        low,
        high,
        low_inverse,
        high_inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """Two neighbours of a row in fp32 -> int16 of two fp8."""
        # + x · 0 turns infinity into NaN, and changes nothing else: zero has the sign of x
        low = low * low_inverse + low * 0.0
        high = high * high_inverse + high * 0.0
        return two_rounded(low, high, largest, mantissa, least_exponent, interpreted)

    @triton.jit
    def four_in_fp8(
        a_0,
        b_0,
        a_1,
        b_1,
        a_2,
        b_2,
        a_3,
        b_3,
        inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """Two neighbours in each of four rows, in fp32 -> int16 of two fp8 of each row."""
        q_0 = two_in_fp8(a_0, b_0, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        q_1 = two_in_fp8(a_1, b_1, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        q_2 = two_in_fp8(a_2, b_2, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        q_3 = two_in_fp8(a_3, b_3, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        return q_0, q_1, q_2, q_3

    @triton.jit
    def store_four_rows(row_ptr, at, step, q_0, q_1, q_2, q_3, mask, is_even: tl.constexpr):
        """What four_in_fp8 makes, in rows that lie `step` apart."""
        store_masked(row_ptr, at, q_0, mask, is_even)
        store_masked(row_ptr, at + step, q_1, mask, is_even)
        store_masked(row_ptr, at + 2 * step, q_2, mask, is_even)
        store_masked(row_ptr, at + 3 * step, q_3, mask, is_even)

    @triton.jit
    def store_two_columns(column_ptr, at, step, first, second, mask, is_even: tl.constexpr):
        """What columns_of_rows makes, in columns that lie `step` apart."""
        store_masked(column_ptr, at, first, mask, is_even)
        store_masked(column_ptr, at + step, second, mask, is_even)

    @triton.jit
    def in_fp8(
        x,
        inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
    ):
        """A tile in fp32 -> its bytes; its finite elements without their signs, else 0; where they saturate."""
        size = tl.abs(x)
        is_finite = size < float("inf")
        y = x * inverse
        over = is_finite & (tl.abs(y) > largest)
        # one NaN for all that is not finite
        y = tl.where(is_finite, y, float("nan"))
        # by integers, see fp8_bytes
        q = fp8_bytes(y, mantissa, least_exponent, largest).to(tl.uint8)
        return q, tl.where(is_finite, size, 0.0), over

    @triton.jit
    def rows_in_fp8(
        x,
        inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """fp32 -> the bytes of x / scale in fp8, uint8, for a store of the tile as it is."""
        # + x · 0 turns infinity into NaN, and changes nothing else: zero has the sign of x
        y = x * inverse + x * 0.0
        if interpreted:
            q = fp8_bytes(y, mantissa, least_exponent, largest).to(tl.uint8)
        else:
            convert: tl.constexpr = CONVERT_TO_E4M3 if mantissa == 3 else CONVERT_TO_E5M2
            q = tl.inline_asm_elementwise(convert, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
        return q

    @triton.jit
    def top_of_tile(x, inverse, largest: tl.constexpr):
        """Of a tile [M, K] in fp32: its largest finite element without its sign, and how many saturate."""
        # those that are not finite are above all others
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
        count = 0
        if not (top * inverse <= largest):
            # rare
            size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum((size * inverse > largest).to(tl.int32), axis=1), axis=0)
        return top, count

    @triton.jit
    def larger_of(a, b):
        """The larger one, NaN where there is one: one instruction, also where signs are taken off first."""
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def larger_pairs(a, b):
        """The larger one of the first elements of two pairs without signs, and of the second ones. NaN where there is
        one: its bits are above those of all numbers, as infinity's are."""
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def largest_pairs(pairs, axis: tl.constexpr, interpreted: tl.constexpr):
        """The same of all pairs along an axis."""
        if interpreted:
            largest = tl.max(pairs & 0x7FFF0000, axis=axis) | tl.max(pairs & 0x7FFF, axis=axis)
        else:
            largest = tl.reduce(pairs, axis, larger_pairs)
        return largest

    @triton.jit
    def larger_size(size, low, high):
        """The largest one of them without signs, infinity above all numbers; NaN where there is one."""
        return larger_of(size, larger_of(tl.abs(low), tl.abs(high)))

    @triton.jit
    def size_of_four_rows(size, a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3):
        """The same of two neighbours of each of four rows."""
        return larger_size(larger_size(larger_size(larger_size(size, a_0, b_0), a_1, b_1), a_2, b_2), a_3, b_3)

    @triton.jit
    def largest_size(size):
        """Of a whole tile."""
        return tl.reduce(tl.reduce(size, 1, larger_of), 0, larger_of)

    @triton.jit
    def recounted(size, over, low, high, inverse, largest: tl.constexpr):
        """With two more: the largest finite one of each place, and how many saturate."""
        low_finite = tl.where(tl.abs(low) < float("inf"), tl.abs(low), 0.0)
        high_finite = tl.where(tl.abs(high) < float("inf"), tl.abs(high), 0.0)
        low_over = (low_finite * inverse > largest).to(tl.int32)
        high_over = (high_finite * inverse > largest).to(tl.int32)
        return tl.maximum(size, tl.maximum(low_finite, high_finite)), over + low_over + high_over

    @triton.jit
    def record(seen_ptr, before, saturated_ptr, largest_seen, over, has_seen: tl.constexpr):
        """Of a program: its largest finite element, and how many saturated. `before`: see see_above."""
        if has_seen:
            see_above(largest_seen, before, seen_ptr)
        if over > 0:
            tl.atomic_add(saturated_ptr, over.to(tl.int64), sem="relaxed")


def format_constants(dtype: torch.dtype) -> tuple[float, int, int]:
    """Of a format, what `in_fp8` takes behind the inverse."""
    return LARGEST[dtype], MANTISSA[dtype], LEAST_EXPONENT[dtype]


class Written(NamedTuple):
    """A matrix in fp8, in both layouts, and its scale."""

    rows: Tensor
    """[M, K]"""
    columns: Tensor
    """[K, M]; [0] where nobody asked for them"""
    scale: Tensor
    """[1, 1]"""


def empty_pair(like: Tensor, M: int, K: int, dtype: torch.dtype, *, columns: bool = True) -> Written:
    """Memory for one, on the device of `like`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    rows = like.new_empty(M, K, dtype=dtype)
    turned = like.new_empty(0, dtype=dtype)
    if columns:
        turned = like.new_empty(K, M, dtype=dtype)
    return Written(rows, turned, like.new_empty(1, 1, dtype=wide))
