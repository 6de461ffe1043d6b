"""Quantising to fp8: kernels for the largest elements and the scales that they make, and for the cast, which reads once
and writes both layouts.

Note "Pairs". The cast is bound by memory: 2 bytes in, 1 and 1 out. Two things cost more than that when they are left to
the compiler. Bytes that are turned round one by one go through shared memory one by one; and the compiler turns bf16
round in place of bytes, since it thinks of the conversion to fp32 alone, and then converts everything twice, with three
times the registers. So bf16 is read as int32, two neighbours of a row. Their bytes leave together, as the int16 of the
row layout, and those of four rows are put together to the int32 of the column layout, four neighbours of a column. What
is turned round is int32, and every access to memory is of 16 bytes a thread. `cast_kernel` does the same for all other
formats and sizes, an element at a time.

Note "Lines". Where rows and columns have scales of their own, a layout at a time reads a matrix four times: 10 bytes an
element. A short line is as long as a tile, so one program sees all of it: `lines_kernel` finds both sets of scales in
the tile that it casts, 4 bytes an element. Whole lines take a pass for the largest elements of both, by atomic
operations, whose order changes nothing, and one that casts by the scales that they make: 6 bytes. A pair is cast twice,
by the scale of its row and by those of its columns. What can be done with both of its elements at once is done in bf16:
the larger ones are found (`larger_pairs`), and infinity becomes NaN (`without_infinity`), once for both casts.
"""

# M rows, K columns of a matrix; m, k blocks along them

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.dependent_launch import following, has_dependent_launch
from megaspec_kernels.fp8_cast.formats import (
    COLUMN,
    LARGEST,
    ROW,
    SHORT_COLUMN,
    SHORT_LINE,
    SHORT_ROW,
    Block,
    Quantised,
    by_parts,
    scale_shape,
    sizes_of,
)
from megaspec_kernels.fp8_cast.tile import format_constants
from megaspec_kernels.fp8_cast.tiles import (
    BEST,
    BEST_OF_LINES,
    BEST_OF_SHORT_LINES,
    Tile,
    best_of_largest,
    grid_of_tiles,
)
from megaspec_kernels.grid import next_power_of_2

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.dependent_launch import let_next_begin, wait_for_kernel_before
    from megaspec_kernels.fp8_cast.tile import (
        INTERPRETED,
        columns_of_rows,
        columns_of_two_rows,
        fp8_bytes,
        from_the_end,
        inverse_of,
        larger_pairs,
        largest_pairs,
        load_four_rows,
        load_pairs,
        see,
        see_above,
        split,
        store_four_rows,
        store_two_columns,
        tile_of_program,
        two_in_fp8,
        two_rounded,
        two_rows_rounded,
    )
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Rows and columns of a tile where scales are of blocks: blocks of 128 are whole tiles.
TILE = 128
WARPS = 8
# Of cast_kernel, an element at a time: larger ones spill.
SMALL_TILE = 64
# int32 of two elements each that a program of amax_of_pairs_kernel reads.
PAIRS = 8192
# Partial results that a program of finish_kernel takes in at a time.
PARTS = 4096


if triton is not None:

    @triton.jit
    def amax_kernel(x_ptr, out_ptr, M, K, by_row: tl.constexpr, by_column: tl.constexpr, tile: tl.constexpr):
        m = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
        k = tl.program_id(1) * tile + tl.arange(0, tile)
        mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
        # without the sign bits of floats are ordered as they are, infinity above all numbers and NaN above it
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if by_row:
            tl.store(out_ptr + m * tl.num_programs(1) + tl.program_id(1), tl.max(bits, axis=1), mask=m < M)
        elif by_column:
            tl.store(out_ptr + tl.program_id(0).to(tl.int64) * K + k, tl.max(bits, axis=0), mask=k < K)
        else:
            place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            tl.store(out_ptr + place, tl.max(tl.max(bits, axis=1), axis=0))

    @triton.jit
    def amax_of_pairs_kernel(
        pairs_ptr, out_ptr, count, block: tl.constexpr, is_even: tl.constexpr, overlaps: tl.constexpr
    ):
        """Of a whole matrix in bf16, whose elements lie two in an int32."""
        let_next_begin(overlaps)
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        if is_even:
            pairs = tl.load(pairs_ptr + at)
        else:
            pairs = tl.load(pairs_ptr + at, mask=at < count, other=0)
        # bits of bf16 are ordered as those of fp32, of which they are the upper half
        low = (pairs & 0x7FFF) << 16
        high = pairs & 0x7FFF0000
        tl.store(out_ptr + tl.program_id(0), tl.max(tl.maximum(low, high), axis=0))

    @triton.jit
    def scale_bits(largest, exponent: tl.constexpr):
        """The bits of scales from those of the largest elements. `exponent`: of 2 in the format's largest number /
        0.875, see formats.py."""
        # 1.fraction · 2^e fits below 1.75 · 2^n: a fraction above 0.75 carries into the exponent. No scale reaches the
        # upper limit; at the lower one numbers are subnormal.
        bits = ((largest + 0x1FFFFF) & 0x7F800000) - ((exponent - 1) << 23)
        bits = tl.maximum(bits, 1 << 23)
        # nothing to scale, or nothing that a scale could save
        return tl.where((largest > 0) & (largest < 0x7F800000), bits, 127 << 23)

    @triton.jit
    def finish_kernel(
        bits_ptr,
        out_ptr,
        outputs,
        parts,
        output_stride,
        part_stride,
        exponent: tl.constexpr,
        b_out: tl.constexpr,
        b_part: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """The largest of the parts of each output. `exponent`: see scale_bits; 0: no scales are made."""
        let_next_begin(overlaps)
        wait_for_kernel_before(overlaps)
        o = tl.program_id(0) * b_out + tl.arange(0, b_out)
        p = tl.arange(0, b_part)
        largest = tl.zeros((b_out,), dtype=tl.int32)
        for first in range(0, parts, b_part):
            mask = (o < outputs)[:, None] & (first + p < parts)[None, :]
            at = o.to(tl.int64)[:, None] * output_stride + (first + p).to(tl.int64)[None, :] * part_stride
            largest = tl.maximum(largest, tl.max(tl.load(bits_ptr + at, mask=mask, other=0), axis=1))
        result = largest
        if exponent:
            result = scale_bits(largest, exponent)
        tl.store(out_ptr + o, result, mask=o < outputs)

    @triton.jit
    def cast_kernel(
        x_ptr,
        scale_ptr,
        row_ptr,
        column_ptr,
        seen_ptr,
        saturated_ptr,
        copy_ptr,
        M,
        K,
        scale_columns,
        block_rows: tl.constexpr,
        block_columns: tl.constexpr,
        largest: tl.constexpr,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        sees: tl.constexpr,
        counts: tl.constexpr,
        copies: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        tile: tl.constexpr,
    ):
        """`block_rows`, `block_columns`: 0: all that there are."""
        m = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
        k = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
        mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
        row = m * 0
        if block_rows:
            row = m // block_rows
        column = k * 0
        if block_columns:
            column = k // block_columns
        scale = tl.load(scale_ptr + row[:, None] * scale_columns + column[None, :], mask=mask, other=1.0)
        y = x * inverse_of(scale)
        finite = tl.abs(x) < float("inf")
        if counts:
            over = (tl.abs(y) > largest) & finite
            tl.atomic_add(saturated_ptr, tl.sum(tl.sum(over.to(tl.int64), axis=1), axis=0))
        if sees:
            size = tl.where(finite, tl.abs(x), 0.0)
            see(tl.max(tl.max(size, axis=1), axis=0), seen_ptr)
        if copies:
            # the only block's
            is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
            tl.store(copy_ptr, tl.load(scale_ptr), mask=is_first)
        # one NaN for all that is not finite
        y = tl.where(finite, y, float("nan"))
        # by integers, see fp8_bytes
        q = fp8_bytes(y, mantissa, least_exponent, largest).to(tl.uint8)
        if has_rows:
            tl.store(row_ptr + m[:, None] * K + k[None, :], q, mask=mask)
        if has_columns:
            tl.store(column_ptr + k[None, :] * M + m[:, None], q, mask=mask)

    @triton.jit
    def finite_in_pairs(pairs):
        """|x| of the larger one, of those that are finite."""
        low, high = split(pairs)
        low = tl.where(tl.abs(low) < float("inf"), tl.abs(low), 0.0)
        high = tl.where(tl.abs(high) < float("inf"), tl.abs(high), 0.0)
        return tl.maximum(low, high)

    @triton.jit
    def finite_top(pairs_ptr, at, half_K, mask, rows, is_even: tl.constexpr):
        """The largest finite |x| of a tile. `rows`: four, see count_saturated."""
        size = at.to(tl.float32) * 0.0
        for j in range(rows):
            size = tl.maximum(size, finite_in_pairs(load_pairs(pairs_ptr, at + j * half_K, mask, is_even)))
        return tl.max(tl.max(size, axis=1), axis=0)

    @triton.jit
    def over_in_pairs(pairs, inverse, largest: tl.constexpr):
        """How many are finite and saturate."""
        low, high = split(pairs)
        low_over = (tl.abs(low * inverse) > largest) & (tl.abs(low) < float("inf"))
        high_over = (tl.abs(high * inverse) > largest) & (tl.abs(high) < float("inf"))
        return low_over.to(tl.int32) + high_over.to(tl.int32)

    @triton.jit
    def count_saturated(
        pairs_ptr,
        at,
        half_K,
        mask,
        rows,
        top,
        inverse,
        saturated_ptr,
        largest: tl.constexpr,
        is_even: tl.constexpr,
    ):
        """`rows`: four, which the compiler must not know: pairs are read again, which is rare, rather than kept, and
        in a loop that is none it keeps their addresses."""
        if top * inverse > largest:
            over = at * 0
            for j in range(rows):
                over += over_in_pairs(load_pairs(pairs_ptr, at + j * half_K, mask, is_even), inverse, largest)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
            tl.atomic_add(saturated_ptr, count.to(tl.int64), sem="relaxed")

    @triton.jit
    def cast_pairs(
        pairs,
        low_inverse,
        high_inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """int32 of two bf16 -> int16 of two fp8."""
        low, high = split(pairs)
        return two_in_fp8(low, high, low_inverse, high_inverse, largest, mantissa, least_exponent, interpreted)

    @triton.jit
    def row_inverse(scale_ptr, m, M, scale_columns, column):
        """Of a scale for each row."""
        return inverse_of(tl.load(scale_ptr + m * scale_columns + column, mask=m < M, other=1.0))[:, None]

    @triton.jit
    def pairs_kernel(
        pairs_ptr,
        scale_ptr,
        row_ptr,
        column_ptr,
        seen_ptr,
        saturated_ptr,
        copy_ptr,
        M,
        K,
        half_K,
        quarter_M,
        scale_columns,
        block_rows: tl.constexpr,
        block_columns: tl.constexpr,
        largest: tl.constexpr,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        sees: tl.constexpr,
        counts: tl.constexpr,
        copies: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_k: tl.constexpr,
        below: tl.constexpr,
        policy: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """x as int32 [M, K / 2], rows as int16 [M, K / 2], columns as int32 [K, M / 4]; see note "Pairs". `block_rows`,
        `block_columns`: 0: all that there are, else 1 or 128."""
        wait_for_kernel_before(overlaps)
        tile_m, tile_k = tile_of_program(below)
        if tile_m * b_m >= M:
            return
        tile_m = from_the_end(tile_m, M, b_m)

        # rows 4 i + j, columns 2 c and 2 c + 1 of the tile
        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_k // 2)
        mask = (tile_m * (b_m // 4) + i < quarter_M)[:, None] & (tile_k * (b_k // 2) + c < half_K)[None, :]
        # offsets within a tile fit into 32 bits
        begin = tile_m.to(tl.int64) * b_m * half_K + tile_k * (b_k // 2)
        at = i[:, None] * (4 * half_K) + c[None, :]
        pairs_ptr += begin
        row_ptr += begin
        # all before anything is stored: the compiler can't know that stores change nothing of what is loaded
        pairs_0, pairs_1, pairs_2, pairs_3 = load_four_rows(pairs_ptr, at, half_K, mask, is_even, policy)

        if sees or counts:
            # here, so that no pair has to be kept
            bits_0 = pairs_0 & 0x7FFF7FFF
            bits_1 = pairs_1 & 0x7FFF7FFF
            bits_2 = pairs_2 & 0x7FFF7FFF
            bits_3 = pairs_3 & 0x7FFF7FFF
            # of the second ones: what is below them orders only those that are equal
            high = tl.maximum(tl.maximum(bits_0, bits_1), tl.maximum(bits_2, bits_3))
            low_01 = tl.maximum(bits_0 & 0x7FFF, bits_1 & 0x7FFF)
            low = tl.maximum(low_01, tl.maximum(bits_2 & 0x7FFF, bits_3 & 0x7FFF))
            bits = tl.maximum(high & 0x7FFF0000, low << 16)
        # beside the pairs, so that nobody waits for them when all else is done
        if sees or counts:
            # with a scale for the whole matrix alone
            inverse = inverse_of(tl.load(scale_ptr))
        if sees:
            before = tl.load(seen_ptr)
        row = 0
        if block_rows == 128:
            row = tile_m * b_m // 128
        column = 0
        if block_columns == 128:
            column = tile_k * b_k // 128
        if block_rows == 1:
            m = tile_m * b_m + 4 * i
            inverse_0 = row_inverse(scale_ptr, m, M, scale_columns, column)
            inverse_1 = row_inverse(scale_ptr, m + 1, M, scale_columns, column)
            inverse_2 = row_inverse(scale_ptr, m + 2, M, scale_columns, column)
            inverse_3 = row_inverse(scale_ptr, m + 3, M, scale_columns, column)
            q_0 = cast_pairs(pairs_0, inverse_0, inverse_0, largest, mantissa, least_exponent, interpreted)
            q_1 = cast_pairs(pairs_1, inverse_1, inverse_1, largest, mantissa, least_exponent, interpreted)
            q_2 = cast_pairs(pairs_2, inverse_2, inverse_2, largest, mantissa, least_exponent, interpreted)
            q_3 = cast_pairs(pairs_3, inverse_3, inverse_3, largest, mantissa, least_exponent, interpreted)
        else:
            if block_columns == 1:
                k = tile_k * b_k + 2 * c
                place = scale_ptr + row * scale_columns + k
                low = inverse_of(tl.load(place, mask=k < K, other=1.0))[None, :]
                high = inverse_of(tl.load(place + 1, mask=k < K, other=1.0))[None, :]
            else:
                low = inverse_of(tl.load(scale_ptr + row * scale_columns + column))
                high = low
            q_0 = cast_pairs(pairs_0, low, high, largest, mantissa, least_exponent, interpreted)
            q_1 = cast_pairs(pairs_1, low, high, largest, mantissa, least_exponent, interpreted)
            q_2 = cast_pairs(pairs_2, low, high, largest, mantissa, least_exponent, interpreted)
            q_3 = cast_pairs(pairs_3, low, high, largest, mantissa, least_exponent, interpreted)

        if has_rows:
            store_four_rows(row_ptr, at, half_K, q_0, q_1, q_2, q_3, mask, is_even)
        if has_columns:
            first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
            column_ptr += tile_k.to(tl.int64) * b_k * quarter_M + tile_m * (b_m // 4)
            to = c[None, :] * (2 * quarter_M) + i[:, None]
            store_two_columns(column_ptr, to, quarter_M, first, second, mask, is_even)
        if sees or counts:
            top = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
            if not (top < float("inf")):
                top = finite_top(pairs_ptr, at, half_K, mask, M // quarter_M, is_even)
            if sees:
                see_above(top, before, seen_ptr)
            if counts:
                count_saturated(
                    pairs_ptr, at, half_K, mask, M // quarter_M, top, inverse, saturated_ptr, largest, is_even
                )
        if copies:
            tl.store(copy_ptr, tl.load(scale_ptr), mask=(tile_m == 0) & (tile_k == 0))

    @triton.jit
    def columns_kernel(
        pairs_ptr,
        column_ptr,
        M,
        K,
        half_K,
        quarter_M,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_k: tl.constexpr,
        below: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """fp8 as int16 [M, K / 2] to int32 [K, M / 4]: what pairs_kernel does once it has cast."""
        wait_for_kernel_before(overlaps)
        tile_m, tile_k = tile_of_program(below)
        if tile_m * b_m >= M:
            return
        tile_m = from_the_end(tile_m, M, b_m)

        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_k // 2)
        mask = (tile_m * (b_m // 4) + i < quarter_M)[:, None] & (tile_k * (b_k // 2) + c < half_K)[None, :]
        at = i[:, None] * (4 * half_K) + c[None, :]
        pairs_ptr += tile_m.to(tl.int64) * b_m * half_K + tile_k * (b_k // 2)
        q_0, q_1, q_2, q_3 = load_four_rows(pairs_ptr, at, half_K, mask, is_even, "")
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        column_ptr += tile_k.to(tl.int64) * b_k * quarter_M + tile_m * (b_m // 4)
        to = c[None, :] * (2 * quarter_M) + i[:, None]
        store_two_columns(column_ptr, to, quarter_M, first, second, mask, is_even)

    @triton.jit
    def largest_in_rows(pairs, interpreted: tl.constexpr):
        """max|x| of each row, as bits of fp32."""
        both = largest_pairs(pairs & 0x7FFF7FFF, 1, interpreted)
        return tl.maximum(both << 16, both & 0x7FFF0000)

    @triton.jit
    def largest_in_columns(pairs_0, pairs_1, pairs_2, pairs_3, interpreted: tl.constexpr):
        """max|x| of the first and of the second column of each pair, as bits of fp32."""
        bits_0 = pairs_0 & 0x7FFF7FFF
        bits_1 = pairs_1 & 0x7FFF7FFF
        bits_2 = pairs_2 & 0x7FFF7FFF
        bits_3 = pairs_3 & 0x7FFF7FFF
        if interpreted:
            high = tl.maximum(tl.maximum(bits_0, bits_1), tl.maximum(bits_2, bits_3)) & 0x7FFF0000
            low_01 = tl.maximum(bits_0 & 0x7FFF, bits_1 & 0x7FFF)
            low_23 = tl.maximum(bits_2 & 0x7FFF, bits_3 & 0x7FFF)
            bits = high | tl.maximum(low_01, low_23)
        else:
            bits = larger_pairs(larger_pairs(bits_0, bits_1), larger_pairs(bits_2, bits_3))
        both = largest_pairs(bits, 0, interpreted)
        return both << 16, both & 0x7FFF0000

    @triton.jit
    def one_behind_the_other(a_0, a_1, a_2, a_3, count: tl.constexpr):
        """Of rows 4 i + j, a vector for each j -> one of `count` rows. What is stored goes through shared memory first,
        for which all threads wait: once for all four."""
        # [i, j % 2, j // 2]
        both = tl.join(tl.join(a_0, a_1), tl.join(a_2, a_3))
        return tl.reshape(tl.permute(both, (0, 2, 1)), (count,))

    @triton.jit
    def amax_of_lines_kernel(
        pairs_ptr,
        row_ptr,
        column_ptr,
        M,
        K,
        half_K,
        quarter_M,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_k: tl.constexpr,
        below: tl.constexpr,
        policy: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """x as int32 [M, K / 2] -> the largest elements of its rows [M] and columns [K], as bits, into memory that is
        filled with zeros right before. See note "Lines"."""
        let_next_begin(overlaps)
        tile_m, tile_k = tile_of_program(below)
        if tile_m * b_m >= M:
            return

        # rows 4 i + j, columns 2 c and 2 c + 1 of the tile
        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_k // 2)
        has_rows = tile_m * (b_m // 4) + i < quarter_M
        has_columns = tile_k * (b_k // 2) + c < half_K
        mask = has_rows[:, None] & has_columns[None, :]
        at = i[:, None] * (4 * half_K) + c[None, :]
        pairs_ptr += tile_m.to(tl.int64) * b_m * half_K + tile_k * (b_k // 2)
        pairs_0, pairs_1, pairs_2, pairs_3 = load_four_rows(pairs_ptr, at, half_K, mask, is_even, policy)

        largest_0 = largest_in_rows(pairs_0, interpreted)
        largest_1 = largest_in_rows(pairs_1, interpreted)
        largest_2 = largest_in_rows(pairs_2, interpreted)
        largest_3 = largest_in_rows(pairs_3, interpreted)
        low, high = largest_in_columns(pairs_0, pairs_1, pairs_2, pairs_3, interpreted)
        m = tile_m * b_m + tl.arange(0, b_m)
        k = tile_k * b_k + tl.arange(0, b_k)
        of_rows = one_behind_the_other(largest_0, largest_1, largest_2, largest_3, b_m)
        of_columns = tl.reshape(tl.join(low, high), (b_k,))
        # for the zeros; x was written before their filling began
        wait_for_kernel_before(overlaps)
        tl.atomic_max(row_ptr + m, of_rows, mask=m < M, sem="relaxed")
        tl.atomic_max(column_ptr + k, of_columns, mask=k < K, sem="relaxed")

    @triton.jit
    def without_infinity(pairs, interpreted: tl.constexpr):
        """Pairs with NaN in place of infinity."""
        if interpreted:
            low = tl.where((pairs & 0x7F80) == 0x7F80, 0x40, 0)
            high = tl.where((pairs & 0x7F800000) == 0x7F800000, 0x400000, 0)
            finite = pairs | low | high
        else:
            # x · 0 + x, which changes nothing else: zero has the sign of x
            finite = tl.inline_asm_elementwise(
                "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
                "=r,r",
                [pairs],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        return finite

    @triton.jit
    def cast_row(
        pairs,
        scale,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """What cast_pairs does, of pairs without infinity, by a scale for each row. `scale`: its bits."""
        inverse = inverse_of(scale.to(tl.float32, bitcast=True))[:, None]
        low, high = split(pairs)
        return two_rounded(low * inverse, high * inverse, largest, mantissa, least_exponent, interpreted)

    @triton.jit
    def cast_two_rows(
        pairs_0,
        pairs_1,
        low_inverse,
        high_inverse,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
    ):
        """The same of two rows by scales of columns, put together as two_rows does it."""
        low_0, high_0 = split(pairs_0)
        low_1, high_1 = split(pairs_1)
        return two_rows_rounded(
            low_0 * low_inverse,
            high_0 * high_inverse,
            low_1 * low_inverse,
            high_1 * high_inverse,
            largest,
            mantissa,
            least_exponent,
            interpreted,
        )

    @triton.jit
    def lines_kernel(
        pairs_ptr,
        row_amax_ptr,
        column_amax_ptr,
        row_scale_ptr,
        column_scale_ptr,
        row_ptr,
        column_ptr,
        M,
        K,
        half_K,
        quarter_M,
        is_short: tl.constexpr,
        exponent: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_k: tl.constexpr,
        below: tl.constexpr,
        policy: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """x as int32 [M, K / 2], rows as int16 [M, K / 2], columns as int32 [K, M / 4]; see notes "Pairs" and "Lines".
        `is_short`: lines are as long as a tile, in which their largest elements are found, and their scales are
        [tiles, M] and [tiles, K]; else those are read, and all are [M] and [K]. All as bits. `exponent`: see
        scale_bits."""
        tile_m, tile_k = tile_of_program(below)
        if tile_m * b_m >= M:
            return
        tile_m = from_the_end(tile_m, M, b_m)

        # rows 4 i + j, columns 2 c and 2 c + 1 of the tile
        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_k // 2)
        has_rows = tile_m * (b_m // 4) + i < quarter_M
        has_columns = tile_k * (b_k // 2) + c < half_K
        mask = has_rows[:, None] & has_columns[None, :]
        begin = tile_m.to(tl.int64) * b_m * half_K + tile_k * (b_k // 2)
        at = i[:, None] * (4 * half_K) + c[None, :]
        pairs_ptr += begin
        row_ptr += begin
        # all before anything is stored, as in pairs_kernel
        pairs_0, pairs_1, pairs_2, pairs_3 = load_four_rows(pairs_ptr, at, half_K, mask, is_even, policy)
        # for the largest elements; x was written before the zeros under them
        wait_for_kernel_before(overlaps)

        pairs_0 = without_infinity(pairs_0, interpreted)
        pairs_1 = without_infinity(pairs_1, interpreted)
        pairs_2 = without_infinity(pairs_2, interpreted)
        pairs_3 = without_infinity(pairs_3, interpreted)

        row_scale_ptr += tile_m * b_m
        column_scale_ptr += tile_k * b_k
        if is_short:
            row_scale_ptr += tile_k.to(tl.int64) * M
            column_scale_ptr += tile_m.to(tl.int64) * K
            amax_0 = largest_in_rows(pairs_0, interpreted)
            amax_1 = largest_in_rows(pairs_1, interpreted)
            amax_2 = largest_in_rows(pairs_2, interpreted)
            amax_3 = largest_in_rows(pairs_3, interpreted)
            low, high = largest_in_columns(pairs_0, pairs_1, pairs_2, pairs_3, interpreted)
        else:
            row_amax_ptr += tile_m * b_m
            column_amax_ptr += tile_k * b_k
            amax_0 = tl.load(row_amax_ptr + 4 * i, mask=has_rows, other=0)
            amax_1 = tl.load(row_amax_ptr + 4 * i + 1, mask=has_rows, other=0)
            amax_2 = tl.load(row_amax_ptr + 4 * i + 2, mask=has_rows, other=0)
            amax_3 = tl.load(row_amax_ptr + 4 * i + 3, mask=has_rows, other=0)
            low = tl.load(column_amax_ptr + 2 * c, mask=has_columns, other=0)
            high = tl.load(column_amax_ptr + 2 * c + 1, mask=has_columns, other=0)
        scale_0 = scale_bits(amax_0, exponent)
        scale_1 = scale_bits(amax_1, exponent)
        scale_2 = scale_bits(amax_2, exponent)
        scale_3 = scale_bits(amax_3, exponent)
        low = scale_bits(low, exponent)
        high = scale_bits(high, exponent)
        if is_short:
            # here: their bits are in registers
            of_rows = one_behind_the_other(scale_0, scale_1, scale_2, scale_3, b_m)
            of_columns = tl.reshape(tl.join(low, high), (b_k,))

        q_0 = cast_row(pairs_0, scale_0, largest, mantissa, least_exponent, interpreted)
        q_1 = cast_row(pairs_1, scale_1, largest, mantissa, least_exponent, interpreted)
        q_2 = cast_row(pairs_2, scale_2, largest, mantissa, least_exponent, interpreted)
        q_3 = cast_row(pairs_3, scale_3, largest, mantissa, least_exponent, interpreted)
        store_four_rows(row_ptr, at, half_K, q_0, q_1, q_2, q_3, mask, is_even)

        low = inverse_of(low.to(tl.float32, bitcast=True))[None, :]
        high = inverse_of(high.to(tl.float32, bitcast=True))[None, :]
        q_01 = cast_two_rows(pairs_0, pairs_1, low, high, largest, mantissa, least_exponent, interpreted)
        q_23 = cast_two_rows(pairs_2, pairs_3, low, high, largest, mantissa, least_exponent, interpreted)
        first, second = columns_of_two_rows(q_01, q_23, interpreted)
        column_ptr += tile_k.to(tl.int64) * b_k * quarter_M + tile_m * (b_m // 4)
        to = c[None, :] * (2 * quarter_M) + i[:, None]
        store_two_columns(column_ptr, to, quarter_M, first, second, mask, is_even)
        # last: nothing waits for them
        m = tl.arange(0, b_m)
        k = tl.arange(0, b_k)
        if is_short:
            tl.store(row_scale_ptr + m, of_rows, mask=tile_m * b_m + m < M)
            tl.store(column_scale_ptr + k, of_columns, mask=tile_k * b_k + k < K)
        else:
            # once for each line
            if tile_k == 0:
                of_rows = tl.load(row_amax_ptr + m, mask=tile_m * b_m + m < M, other=0)
                tl.store(row_scale_ptr + m, scale_bits(of_rows, exponent), mask=tile_m * b_m + m < M)
            if tile_m == 0:
                of_columns = tl.load(column_amax_ptr + k, mask=tile_k * b_k + k < K, other=0)
                tl.store(column_scale_ptr + k, scale_bits(of_columns, exponent), mask=tile_k * b_k + k < K)


def amax(x_MK: Tensor, *, block: Block) -> Tensor:
    """See reference.py."""
    return _largest(x_MK, block=block, exponent=0)


def scale(x_MK: Tensor, *, block: Block, dtype: torch.dtype) -> Tensor:
    """See reference.py."""
    if x_MK.numel() == 0:
        return x_MK.new_ones(scale_shape(block, x_MK.shape), dtype=torch.float32)
    return _largest(x_MK, block=block, exponent=EXPONENT[dtype])


def scale_of(amax_mk: Tensor, dtype: torch.dtype) -> Tensor:
    """See formats.py."""
    assert amax_mk.dtype == torch.float32, f"largest elements in {amax_mk.dtype}"
    if amax_mk.numel() == 0 or amax_mk.is_meta:
        return torch.empty_like(amax_mk)
    bits = amax_mk.contiguous().view(torch.int32)
    return _finish(bits, amax_mk.shape, strides=(1, 1), parts=1, exponent=EXPONENT[dtype])


# The exponent of 2 in the largest number / 0.875, as in formats.py.
EXPONENT = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}


def _largest(x_MK: Tensor, *, block: Block, exponent: int) -> Tensor:
    """The largest elements of blocks, or the scales that they make."""
    M, K = x_MK.shape
    rows, columns = sizes_of(block, x_MK.shape)
    m, k = scale_shape(block, x_MK.shape)
    if x_MK.numel() == 0 or x_MK.is_meta:
        return x_MK.new_zeros(m, k, dtype=torch.float32)
    assert rows in (1, TILE, M), f"blocks of {block}, tiles of {TILE}"
    assert columns in (1, TILE, K), f"blocks of {block}, tiles of {TILE}"
    x_MK = x_MK.contiguous()
    if block == (None, None) and x_MK.dtype == torch.bfloat16 and x_MK.numel() % 2 == 0 and x_MK.data_ptr() % 4 == 0:
        count = x_MK.numel() // 2
        programs = ceil_div(count, PAIRS)
        bits = torch.empty(programs, dtype=torch.int32, device=x_MK.device)
        amax_of_pairs_kernel[(programs,)](
            x_MK.view(-1).view(torch.int32),
            bits,
            count,
            PAIRS,
            count % PAIRS == 0,
            has_dependent_launch(),
            num_warps=WARPS,
        )
        return _finish(bits, (1, 1), strides=(0, 1), parts=programs, exponent=exponent)
    by_row = rows == 1
    by_column = columns == 1 and not by_row
    tiles = (ceil_div(M, TILE), ceil_div(K, TILE))
    shape = tiles
    if by_row:
        shape = (M, tiles[1])
    elif by_column:
        shape = (tiles[0], K)
    bits = torch.empty(shape, dtype=torch.int32, device=x_MK.device)
    amax_kernel[tiles](x_MK, bits, M, K, by_row, by_column, TILE, num_warps=WARPS)
    # what is left of each block: a tile of it was one number, or a line of numbers
    if (m, k) == (1, 1):
        return _finish(bits, (1, 1), strides=(0, 1), parts=bits.numel(), exponent=exponent)
    if shape == (m, k):
        return _finish(bits, (m, k), strides=(1, 1), parts=1, exponent=exponent)
    if k == 1:
        return _finish(bits, (m, 1), strides=(shape[1], 1), parts=shape[1], exponent=exponent)
    assert m == 1, f"{shape} for {(m, k)} blocks of {block} in {tuple(x_MK.shape)}"
    return _finish(bits, (1, k), strides=(1, shape[1]), parts=shape[0], exponent=exponent)


def _finish(bits: Tensor, shape: tuple[int, int], *, strides: tuple[int, int], parts: int, exponent: int) -> Tensor:
    """`strides`: of outputs and of the parts of one."""
    if parts == 1 and not exponent:
        return bits.view(shape).view(torch.float32)
    outputs = shape[0] * shape[1]
    b_part = min(PARTS, next_power_of_2(parts))
    b_out = min(max(1, PARTS // b_part), next_power_of_2(outputs))
    out = torch.empty(shape, dtype=torch.int32, device=bits.device)
    finish_kernel[(ceil_div(outputs, b_out),)](
        bits,
        out,
        outputs,
        parts,
        *strides,
        exponent,
        b_out,
        b_part,
        num_warps=WARPS,
        **following(),
    )
    return out.view(torch.float32)


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
    tile: Tile = BEST,
) -> tuple[Tensor | None, Tensor | None]:
    """See reference.py."""
    assert x_MK.dtype != torch.float64, "the kernel computes in fp32"
    assert scale_mk.dtype == torch.float32, f"scales in {scale_mk.dtype}"
    M, K = x_MK.shape
    by_rows = x_MK.new_empty(M, K, dtype=dtype) if rows else None
    by_columns = x_MK.new_empty(K, M, dtype=dtype) if columns else None
    if x_MK.numel() == 0 or x_MK.is_meta or not (rows or columns):
        return by_rows, by_columns
    x_MK = x_MK.contiguous()
    is_whole = block == (None, None)
    records = seen is not None or saturated is not None or scale_copy is not None
    # what is not asked for is not written: any address serves
    some_rows = by_rows if rows else by_columns
    some_columns = by_columns if columns else by_rows
    form = {
        "block_rows": block[0] or 0,
        "block_columns": block[1] or 0,
        "largest": LARGEST[dtype],
        "has_rows": rows,
        "has_columns": columns,
        "sees": seen is not None,
        "counts": saturated is not None,
        "copies": scale_copy is not None,
        "mantissa": 3 if dtype == torch.float8_e4m3fn else 2,
        "least_exponent": -6 if dtype == torch.float8_e4m3fn else -14,
    }
    recorded = (
        scale_mk if seen is None else seen.view(torch.int32),
        scale_mk if saturated is None else saturated,
        scale_mk if scale_copy is None else scale_copy,
    )
    scale_mk = scale_mk.contiguous()
    if _is_in_pairs(x_MK) and (is_whole or not records):
        pairs_kernel[grid_of_tiles(ceil_div(M, tile.rows), ceil_div(K, tile.columns), tile.below)](
            x_MK.view(torch.int32),
            scale_mk,
            some_rows.view(torch.int16),
            some_columns.view(torch.int32),
            *recorded,
            M,
            K,
            K // 2,
            M // 4,
            scale_mk.shape[1],
            **form,
            interpreted=INTERPRETED,
            is_even=M % tile.rows == 0 and K % tile.columns == 0,
            b_m=tile.rows,
            b_k=tile.columns,
            below=tile.below,
            policy=tile.policy,
            num_warps=tile.warps,
            maxnreg=tile.registers,
            **following(),
        )
        return by_rows, by_columns
    cast_kernel[(ceil_div(M, SMALL_TILE), ceil_div(K, SMALL_TILE))](
        x_MK,
        scale_mk,
        some_rows.view(torch.uint8),
        some_columns.view(torch.uint8),
        *recorded,
        M,
        K,
        scale_mk.shape[1],
        **form,
        tile=SMALL_TILE,
        num_warps=WARPS,
    )
    return by_rows, by_columns


def _is_in_pairs(x_MK: Tensor) -> bool:
    """Whether there is something for kernels that take a matrix as note "Pairs" has it."""
    M, K = x_MK.shape
    if x_MK.numel() == 0 or x_MK.is_meta:
        return False
    return x_MK.dtype == torch.bfloat16 and M % 16 == 0 and K % 16 == 0 and x_MK.data_ptr() % 16 == 0


def amax_of_lines(x_MK: Tensor, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """See reference.py."""
    x_MK = x_MK.contiguous()
    if not _is_in_pairs(x_MK):
        return amax(x_MK, block=ROW), amax(x_MK, block=COLUMN)
    M, K = x_MK.shape
    if tile is None:
        tile = best_of_largest(K)
    bits = torch.zeros(M + K, dtype=torch.int32, device=x_MK.device)
    of_rows = bits[:M]
    of_columns = bits[M:]
    amax_of_lines_kernel[grid_of_tiles(ceil_div(M, tile.rows), ceil_div(K, tile.columns), tile.below)](
        x_MK.view(torch.int32),
        of_rows,
        of_columns,
        M,
        K,
        K // 2,
        M // 4,
        **_form_of_lines(M, K, tile, follows=True),
    )
    return of_rows.view(M, 1).view(torch.float32), of_columns.view(1, K).view(torch.float32)


def _form_of_lines(M: int, K: int, tile: Tile, *, follows: bool) -> dict[str, object]:
    """What kernels of lines are compiled for. `follows`: right behind a kernel that began when x had been written, so
    that x is read before that one has ended, see dependent_launch.py."""
    return {
        "interpreted": INTERPRETED,
        "is_even": M % tile.rows == 0 and K % tile.columns == 0,
        "b_m": tile.rows,
        "b_k": tile.columns,
        "below": tile.below,
        "policy": tile.policy,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
        **following(follows),
    }


def quantise_lines(
    x_MK: Tensor, *, dtype: torch.dtype, amax: tuple[Tensor, Tensor] | None = None, tile: Tile = BEST_OF_LINES
) -> Quantised:
    """See reference.py."""
    x_MK = x_MK.contiguous()
    follows = amax is None
    if amax is None:
        amax = amax_of_lines(x_MK)
    row_amax_M1, column_amax_1K = amax
    M, K = x_MK.shape
    for largest, block in ((row_amax_M1, ROW), (column_amax_1K, COLUMN)):
        assert largest.dtype == torch.float32, f"largest elements in {largest.dtype}"
        shape = scale_shape(block, x_MK.shape)
        assert largest.shape == shape, f"largest elements {tuple(largest.shape)} of lines {shape}"
    if not _is_in_pairs(x_MK):
        row_scale = scale_of(row_amax_M1, dtype)
        column_scale = scale_of(column_amax_1K, dtype)
        rows, _ = cast(x_MK, row_scale, block=ROW, dtype=dtype)
        _, turned = cast(x_MK, column_scale, block=COLUMN, dtype=dtype, rows=False, columns=True)
        return Quantised(rows, row_scale, turned, column_scale)
    both = Quantised(
        x_MK.new_empty(M, K, dtype=dtype),
        torch.empty_like(row_amax_M1, memory_format=torch.contiguous_format),
        x_MK.new_empty(K, M, dtype=dtype),
        torch.empty_like(column_amax_1K, memory_format=torch.contiguous_format),
    )
    _write_lines(x_MK, both, amax=(row_amax_M1.contiguous(), column_amax_1K.contiguous()), follows=follows, tile=tile)
    return both


def quantise_short_lines(x_MK: Tensor, *, dtype: torch.dtype, tile: Tile = BEST_OF_SHORT_LINES) -> Quantised:
    """See reference.py."""
    x_MK = x_MK.contiguous()
    if not _is_in_pairs(x_MK):
        row_scale = scale(x_MK, block=SHORT_ROW, dtype=dtype)
        column_scale = scale(x_MK, block=SHORT_COLUMN, dtype=dtype)
        rows, _ = cast(x_MK, row_scale, block=SHORT_ROW, dtype=dtype)
        _, turned = cast(x_MK, column_scale, block=SHORT_COLUMN, dtype=dtype, rows=False, columns=True)
        return Quantised(rows, by_parts(row_scale), turned, column_scale)
    assert tile.rows == tile.columns == SHORT_LINE, f"{tile} for lines of {SHORT_LINE}"
    M, K = x_MK.shape
    both = Quantised(
        x_MK.new_empty(M, K, dtype=dtype),
        x_MK.new_empty(ceil_div(K, SHORT_LINE), M, dtype=torch.float32).t(),
        x_MK.new_empty(K, M, dtype=dtype),
        x_MK.new_empty(ceil_div(M, SHORT_LINE), K, dtype=torch.float32),
    )
    _write_lines(x_MK, both, amax=None, follows=False, tile=tile)
    return both


def _write_lines(
    x_MK: Tensor, both: Quantised, *, amax: tuple[Tensor, Tensor] | None, follows: bool, tile: Tile
) -> None:
    """Casts into both layouts. `amax`: None: of short lines, see lines_kernel. `follows`: see _form_of_lines."""
    M, K = x_MK.shape
    dtype = both.rows.dtype
    largest, mantissa, least_exponent = format_constants(dtype)
    # [M, 1], or [M, k] as it lies
    scales = (both.row_scale.t(), both.column_scale)
    lines_kernel[grid_of_tiles(ceil_div(M, tile.rows), ceil_div(K, tile.columns), tile.below)](
        x_MK.view(torch.int32),
        # of short lines nothing is read: any address serves
        *(one.view(torch.int32) for one in (scales if amax is None else amax)),
        *(one.view(torch.int32) for one in scales),
        both.rows.view(torch.int16),
        both.columns.view(torch.int32),
        M,
        K,
        K // 2,
        M // 4,
        is_short=amax is None,
        exponent=EXPONENT[dtype],
        largest=largest,
        mantissa=mantissa,
        least_exponent=least_exponent,
        **_form_of_lines(M, K, tile, follows=follows),
    )


def columns(x_MK: Tensor, *, tile: Tile = BEST) -> Tensor:
    """See reference.py."""
    M, K = x_MK.shape
    out = x_MK.new_empty(K, M)
    if x_MK.numel() == 0 or x_MK.is_meta:
        return out
    x_MK = x_MK.contiguous()
    if M % 16 or K % 16 or x_MK.data_ptr() % 16:
        # no product in fp8 takes such a side
        return x_MK.view(torch.uint8).t().contiguous().view(x_MK.dtype)
    columns_kernel[grid_of_tiles(ceil_div(M, tile.rows), ceil_div(K, tile.columns), tile.below)](
        x_MK.view(torch.int16),
        out.view(torch.int32),
        M,
        K,
        K // 2,
        M // 4,
        interpreted=INTERPRETED,
        is_even=M % tile.rows == 0 and K % tile.columns == 0,
        b_m=tile.rows,
        b_k=tile.columns,
        below=tile.below,
        num_warps=tile.warps,
        **following(),
    )
    return out
