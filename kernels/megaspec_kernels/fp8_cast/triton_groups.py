"""Quantising rows that belong to groups, in a kernel for each step; the host reads no group's size.

The cast is that of triton.py, see its note "Pairs", over padded rows: see groups.py, note "Units". It may gather its
rows on the way, so that what experts take is never there in the model's format.
"""

# E groups, R rows, I columns of a matrix, P rows with padding, U units of them

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.fp8_cast.padding import UNIT, padded_rows
from megaspec_kernels.fp8_cast.tile import format_constants
from megaspec_kernels.fp8_cast.tiles import BEST, BEST_OF_GROUP_COLUMNS, Tile, best_of_gathered, grid_of_tiles
from megaspec_kernels.grid import next_power_of_2

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.tile import (
        INTERPRETED,
        columns_of_rows,
        fp8_bytes,
        from_the_end,
        inverse_of,
        largest_pairs,
        recounted,
        see,
        see_above,
        split,
        tile_of_program,
        two_in_fp8,
    )
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Columns that a program of group_column_amax_kernel takes, and rows at a time.
AMAX_TILE = 128
AMAX_ROWS = 32
# Programs that share the rows of a group.
AMAX_PROGRAMS = 16
# Elements that a program of group_amax_kernel reads.
AMAX_ELEMENTS = 16384
# Rows and columns of the cast an element at a time: larger tiles spill.
SMALL_TILE = 64
# Of a table of units and groups that a program works with.
UNITS_AND_GROUPS = 4096
WARPS = 8

if triton is not None:

    @triton.jit
    def groups_kernel(
        ends_ptr,
        padded_ptr,
        first_ptr,
        last_ptr,
        group_ptr,
        R,
        U,
        E,
        unit: tl.constexpr,
        block: tl.constexpr,
        b_u: tl.constexpr,
    ):
        """`block`: a power of two from E on, `b_u`: units of a program."""
        e = tl.arange(0, block)
        is_group = e < E
        end = tl.load(ends_ptr + e, mask=is_group, other=0)
        start = tl.load(ends_ptr + e - 1, mask=is_group & (e > 0), other=0)
        # a group without rows has a unit, too
        units = tl.where(is_group, tl.maximum((end - start + unit - 1) // unit, 1), 0)
        last_unit = tl.cumsum(units, 0)
        if tl.program_id(0) == 0:
            tl.store(padded_ptr + e, last_unit * unit, mask=is_group)
        u = tl.program_id(0) * b_u + tl.arange(0, b_u)
        is_behind = (u[:, None] >= last_unit[None, :]) & is_group[None, :]
        group = tl.sum(is_behind.to(tl.int32), axis=1)
        is_own = group[:, None] == e[None, :]
        first_unit = tl.sum(tl.where(is_own, (last_unit - units)[None, :], 0), axis=1)
        first_row = tl.sum(tl.where(is_own, start[None, :], 0), axis=1)
        last_row = tl.sum(tl.where(is_own, end[None, :], 0), axis=1)
        # rows of none lie behind all groups
        is_none = group >= E
        first_unit = tl.where(is_none, tl.sum(units, axis=0), first_unit)
        first_row = tl.where(is_none, tl.max(end, axis=0), first_row)
        last_row = tl.where(is_none, R, last_row)
        mask = u < U
        tl.store(first_ptr + u, first_row + (u - first_unit) * unit, mask=mask)
        tl.store(last_ptr + u, last_row, mask=mask)
        tl.store(group_ptr + u, group, mask=mask)

    @triton.jit
    def group_amax_kernel(
        x_ptr, ends_ptr, out_ptr, count, width, E, in_pairs: tl.constexpr, block: tl.constexpr, size: tl.constexpr
    ):
        """Of whole groups, which lie in one piece each: every program reads as much, of one group or of several.
        `in_pairs`: x in bf16 as int32 of two; `count`, `width`: of what is read, in all and of a row."""
        begin = tl.program_id(0).to(tl.int64) * size
        at = tl.arange(0, size)
        mask = begin + at < count
        x = tl.load(x_ptr + begin + at, mask=mask, other=0)
        # without the sign bits of floats are ordered as they are, infinity above all numbers and NaN above it
        if in_pairs:
            bits = tl.maximum((x & 0x7FFF) << 16, x & 0x7FFF0000)
        else:
            bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        e = tl.arange(0, block)
        end = tl.load(ends_ptr + e, mask=e < E, other=2147483647).to(tl.int64) * width
        first_group = tl.sum((end <= begin).to(tl.int32), axis=0)
        last_group = tl.sum((end < begin + size).to(tl.int32), axis=0)
        for group in range(first_group, tl.minimum(last_group + 1, E)):
            group_end = tl.load(ends_ptr + group).to(tl.int64) * width - begin
            group_start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0).to(tl.int64) * width - begin
            # within the program, so that comparisons are of 32 bits
            group_start = tl.maximum(group_start, 0).to(tl.int32)
            group_end = tl.minimum(group_end, size).to(tl.int32)
            is_own = (at >= group_start) & (at < group_end)
            top = tl.max(tl.where(is_own, bits, 0), axis=0)
            # what was read may be old: then an atomic operation more is done, which changes nothing
            if top > tl.load(out_ptr + group):
                tl.atomic_max(out_ptr + group, top, sem="relaxed")

    @triton.jit
    def group_column_amax_kernel(x_ptr, ends_ptr, out_ptr, n_columns, rows_at_once: tl.constexpr, tile: tl.constexpr):
        """Any format and any size: programs share the rows of a group."""
        group = tl.program_id(0)
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(ends_ptr + group)
        i = tl.program_id(1) * tile + tl.arange(0, tile)
        step = tl.num_programs(2) * rows_at_once
        bits = tl.zeros([rows_at_once, tile], tl.int32)
        for first in range(start + tl.program_id(2) * rows_at_once, end, step):
            r = first + tl.arange(0, rows_at_once)
            mask = (r < end)[:, None] & (i < n_columns)[None, :]
            x = tl.load(x_ptr + r.to(tl.int64)[:, None] * n_columns + i[None, :], mask=mask, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        tl.atomic_max(out_ptr + group.to(tl.int64) * n_columns + i, tl.max(bits, axis=0), mask=i < n_columns)

    @triton.jit
    def group_column_amax_of_pairs_kernel(
        pairs_ptr,
        ends_ptr,
        out_ptr,
        R,
        half_I,
        E,
        interpreted: tl.constexpr,
        block: tl.constexpr,
        b_r: tl.constexpr,
        b_i: tl.constexpr,
        below: tl.constexpr,
    ):
        """x as int32 [R, I / 2], whose tiles are of one group or of several: every program reads as much. `block`: a
        power of two from E on."""
        tile_r, tile_i = tile_of_program(below)
        begin = tile_r * b_r
        if begin >= R:
            return

        r = tl.arange(0, b_r)
        c = tile_i * (b_i // 2) + tl.arange(0, b_i // 2)
        mask = (begin + r < R)[:, None] & (c < half_I)[None, :]
        pairs_ptr += begin.to(tl.int64) * half_I
        sizes = tl.load(pairs_ptr + r[:, None] * half_I + c[None, :], mask=mask, other=0) & 0x7FFF7FFF
        e = tl.arange(0, block)
        end = tl.load(ends_ptr + e, mask=e < E, other=2147483647)
        first_group = tl.sum((end <= begin).to(tl.int32), axis=0)
        last_group = tl.sum((end < begin + b_r).to(tl.int32), axis=0)
        i = tile_i * b_i + tl.arange(0, b_i)
        n_columns = 2 * half_I.to(tl.int64)
        is_column = i < n_columns
        for group in range(first_group, tl.minimum(last_group + 1, E)):
            group_end = tl.load(ends_ptr + group) - begin
            group_start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0) - begin
            is_own = (r >= group_start) & (r < group_end)
            both = largest_pairs(tl.where(is_own[:, None], sizes, 0), 0, interpreted)
            bits = tl.reshape(tl.join(both << 16, both & 0x7FFF0000), (b_i,))
            at = out_ptr + group * n_columns + i
            # what was read may be old: then an atomic operation more is done, which changes nothing
            before = tl.load(at, mask=is_column, other=0)
            tl.atomic_max(at, bits, mask=is_column & (bits > before), sem="relaxed")

    @triton.jit
    def source_of(row, is_read, index_ptr, gathers: tl.constexpr):
        """Where a row is read, and whether it is."""
        source = row
        if gathers:
            source = tl.load(index_ptr + row, mask=is_read, other=-1)
            is_read = source >= 0
        return source.to(tl.int64), is_read

    @triton.jit
    def group_cast_kernel(
        x_ptr,
        index_ptr,
        first_ptr,
        last_ptr,
        group_ptr,
        scale_ptr,
        row_ptr,
        column_ptr,
        seen_ptr,
        saturated_ptr,
        copy_ptr,
        n_columns,
        P,
        E,
        group_stride,
        column_stride,
        gathers: tl.constexpr,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        sees: tl.constexpr,
        counts: tl.constexpr,
        copies: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        unit: tl.constexpr,
        tile: tl.constexpr,
    ):
        """Any format and any size, an element at a time."""
        p = tl.program_id(0) * tile + tl.arange(0, tile)
        i = tl.program_id(1) * tile + tl.arange(0, tile)
        is_place = p < P
        is_column = i < n_columns
        u = p // unit
        row = tl.load(first_ptr + u, mask=is_place, other=0) + p % unit
        is_row = row < tl.load(last_ptr + u, mask=is_place, other=0)
        group = tl.load(group_ptr + u, mask=is_place, other=E)
        source, is_read = source_of(row, is_row & (group < E), index_ptr, gathers)
        mask = is_read[:, None] & is_column[None, :]
        x = tl.load(x_ptr + source[:, None] * n_columns + i[None, :], mask=mask, other=0.0).to(tl.float32)
        place = group.to(tl.int64)[:, None] * group_stride + i[None, :] * column_stride
        scale = tl.load(scale_ptr + place, mask=mask, other=1.0)
        y = x * inverse_of(scale)
        finite = tl.abs(x) < float("inf")
        if counts:
            over = (tl.abs(y) > largest) & finite
            tl.atomic_add(saturated_ptr, tl.sum(tl.sum(over.to(tl.int64), axis=1), axis=0))
        if sees:
            see(tl.max(tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1), axis=0), seen_ptr)
        if copies:
            is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
            tl.store(copy_ptr, tl.load(scale_ptr), mask=is_first)
        # one NaN for all that is not finite
        y = tl.where(finite, y, float("nan"))
        # by integers, see fp8_bytes
        q = fp8_bytes(y, mantissa, least_exponent, largest).to(tl.uint8)
        if has_rows:
            at = row.to(tl.int64)[:, None] * n_columns + i[None, :]
            tl.store(row_ptr + at, q, mask=is_row[:, None] & is_column[None, :])
        if has_columns:
            tl.store(
                column_ptr + i.to(tl.int64)[None, :] * P + p[:, None], q, mask=is_place[:, None] & is_column[None, :]
            )

    @triton.jit
    def load_row_pairs(pairs_ptr, source, is_read, c, is_column, half_I):
        """Pairs of a row of each unit of four; zeros where there is none."""
        return tl.load(
            pairs_ptr + source[:, None] * half_I + c[None, :], mask=is_read[:, None] & is_column[None, :], other=0
        )

    @triton.jit
    def group_pairs_kernel(
        pairs_ptr,
        index_ptr,
        first_ptr,
        last_ptr,
        group_ptr,
        scale_ptr,
        row_ptr,
        column_ptr,
        seen_ptr,
        saturated_ptr,
        copy_ptr,
        half_I,
        units,
        E,
        group_stride,
        rows,
        by_column: tl.constexpr,
        gathers: tl.constexpr,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        sees: tl.constexpr,
        counts: tl.constexpr,
        copies: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        quarters: tl.constexpr,
        b_p: tl.constexpr,
        b_i: tl.constexpr,
        below: tl.constexpr,
    ):
        """x as int32 [M, I / 2], rows as int16 [R, I / 2], columns as int32 [I, P / 4]; see triton.py, note "Pairs".
        `scale_ptr`: `by_column` int64 of two scales, [E, I / 2].
        `rows`: four, which the compiler must not know, see count_saturated there. `quarters`: of a unit, each of four
        rows. `below`: see grid_of_tiles."""
        # so that the compiler knows how the columns are aligned, whatever the number of rows is
        quarter_P = units * quarters
        tile_p, tile_i = tile_of_program(below)
        if tile_p * b_p >= quarter_P * 4:
            return
        if not sees:
            # of a scale that was not known before: a kernel has read x for it
            tile_p = from_the_end(tile_p, quarter_P * 4, b_p)

        # places 4 q + j of the padded rows, columns 2 c and 2 c + 1
        q = tile_p * (b_p // 4) + tl.arange(0, b_p // 4)
        c = tile_i * (b_i // 2) + tl.arange(0, b_i // 2)
        is_place = q < quarter_P
        is_column = c < half_I
        u = q // quarters
        row = tl.load(first_ptr + u, mask=is_place, other=0) + q % quarters * 4
        last = tl.load(last_ptr + u, mask=is_place, other=0)
        group = tl.load(group_ptr + u, mask=is_place, other=E)
        # of rows of no group nothing is read: they are zeros
        read_end = tl.where(group < E, last, 0)
        source_0, is_read_0 = source_of(row, row < read_end, index_ptr, gathers)
        source_1, is_read_1 = source_of(row + 1, row + 1 < read_end, index_ptr, gathers)
        source_2, is_read_2 = source_of(row + 2, row + 2 < read_end, index_ptr, gathers)
        source_3, is_read_3 = source_of(row + 3, row + 3 < read_end, index_ptr, gathers)
        # all before anything is stored: the compiler can't know that stores change nothing of what is loaded
        pairs_0 = load_row_pairs(pairs_ptr, source_0, is_read_0, c, is_column, half_I)
        pairs_1 = load_row_pairs(pairs_ptr, source_1, is_read_1, c, is_column, half_I)
        pairs_2 = load_row_pairs(pairs_ptr, source_2, is_read_2, c, is_column, half_I)
        pairs_3 = load_row_pairs(pairs_ptr, source_3, is_read_3, c, is_column, half_I)

        place = tl.minimum(group, E - 1).to(tl.int64) * group_stride
        if by_column:
            # two neighbours in one load
            scales = tl.load(scale_ptr + place[:, None] + c[None, :], mask=is_column[None, :], other=0)
            low_inverse = inverse_of(scales.to(tl.int32).to(tl.float32, bitcast=True))
            high_inverse = inverse_of((scales >> 32).to(tl.int32).to(tl.float32, bitcast=True))
        else:
            low_inverse = inverse_of(tl.load(scale_ptr + place))[:, None]
            high_inverse = low_inverse
        if sees or counts:
            # here, so that no pair has to be kept
            bits_0 = pairs_0 & 0x7FFF7FFF
            bits_1 = pairs_1 & 0x7FFF7FFF
            bits_2 = pairs_2 & 0x7FFF7FFF
            bits_3 = pairs_3 & 0x7FFF7FFF
            # of the second ones: what is below them orders only those that are equal
            high = tl.maximum(tl.maximum(bits_0, bits_1), tl.maximum(bits_2, bits_3)) & 0x7FFF0000
            low_01 = tl.maximum(bits_0 & 0x7FFF, bits_1 & 0x7FFF)
            low = tl.maximum(low_01, tl.maximum(bits_2 & 0x7FFF, bits_3 & 0x7FFF)) << 16
            bits = tl.maximum(low, high)
            scaled_low = (low.to(tl.float32, bitcast=True) * low_inverse).to(tl.int32, bitcast=True)
            scaled_high = (high.to(tl.float32, bitcast=True) * high_inverse).to(tl.int32, bitcast=True)
            scaled_bits = tl.maximum(scaled_low & 0x7FFFFFFF, scaled_high & 0x7FFFFFFF)
        if sees:
            # beside the pairs, so that nobody waits for it when all else is done
            before = tl.load(seen_ptr)

        low_0, high_0 = split(pairs_0)
        low_1, high_1 = split(pairs_1)
        low_2, high_2 = split(pairs_2)
        low_3, high_3 = split(pairs_3)
        q_0 = two_in_fp8(low_0, high_0, low_inverse, high_inverse, largest, mantissa, least_exponent, interpreted)
        q_1 = two_in_fp8(low_1, high_1, low_inverse, high_inverse, largest, mantissa, least_exponent, interpreted)
        q_2 = two_in_fp8(low_2, high_2, low_inverse, high_inverse, largest, mantissa, least_exponent, interpreted)
        q_3 = two_in_fp8(low_3, high_3, low_inverse, high_inverse, largest, mantissa, least_exponent, interpreted)
        if has_rows:
            store_four(row_ptr, row, last, c, is_column, half_I, q_0, q_1, q_2, q_3)
        if has_columns:
            first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
            store_columns(column_ptr, q, is_place, c, is_column, quarter_P, first, second)
        if sees or counts:
            top = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
            scaled_top = tl.max(tl.max(scaled_bits, axis=1), axis=0).to(tl.float32, bitcast=True)
            count = 0
            # NaN is above nothing and below nothing
            if (not (top < float("inf"))) | (not (scaled_top <= largest)):
                # rare: read again rather than kept
                size = bits.to(tl.float32) * 0.0
                over = bits * 0
                for j in range(rows):
                    source, is_read = source_of(row + j, row + j < read_end, index_ptr, gathers)
                    pairs = load_row_pairs(pairs_ptr, source, is_read, c, is_column, half_I)
                    a, b = split(pairs)
                    size, over = recounted_pairs(size, over, a, b, low_inverse, high_inverse, largest)
                top = tl.max(tl.max(size, axis=1), axis=0)
                count = tl.sum(tl.sum(over, axis=1), axis=0)
            if sees:
                see_above(top, before, seen_ptr)
            if counts:
                # of none nothing is added
                tl.atomic_add(saturated_ptr, count.to(tl.int64), mask=count > 0, sem="relaxed")
        if copies:
            tl.store(copy_ptr, tl.load(scale_ptr), mask=(tile_p == 0) & (tile_i == 0))

    @triton.jit
    def recounted_pairs(size, over, low, high, low_inverse, high_inverse, largest: tl.constexpr):
        """`recounted` with a scale for each of both."""
        size, over = recounted(size, over, low, low * 0.0, low_inverse, largest)
        return recounted(size, over, high * 0.0, high, high_inverse, largest)

    @triton.jit
    def store_four(row_ptr, row, last, c, is_column, half_I, q_0, q_1, q_2, q_3):
        """Four rows of each quarter of a unit, as int16 of two neighbours, where they are rows of its group."""
        at = row.to(tl.int64)[:, None] * half_I + c[None, :]
        tl.store(row_ptr + at, q_0, mask=(row < last)[:, None] & is_column[None, :])
        tl.store(row_ptr + at + half_I, q_1, mask=(row + 1 < last)[:, None] & is_column[None, :])
        tl.store(row_ptr + at + 2 * half_I, q_2, mask=(row + 2 < last)[:, None] & is_column[None, :])
        tl.store(row_ptr + at + 3 * half_I, q_3, mask=(row + 3 < last)[:, None] & is_column[None, :])

    @triton.jit
    def store_columns(column_ptr, q, is_place, c, is_column, quarter_P, first, second):
        """The same turned round, as int32 of four neighbours, in two columns."""
        at = (2 * c).to(tl.int64)[None, :] * quarter_P + q[:, None]
        mask = is_place[:, None] & is_column[None, :]
        tl.store(column_ptr + at, first, mask=mask)
        tl.store(column_ptr + at + quarter_P, second, mask=mask)


def groups(ends_E: Tensor, rows: int) -> Groups:
    """See reference_groups.py."""
    E = ends_E.shape[0]
    U = padded_rows(rows, E) // UNIT
    padded = torch.empty_like(ends_E)
    first = ends_E.new_empty(U)
    last = ends_E.new_empty(U)
    group = ends_E.new_empty(U)
    if not ends_E.is_meta:
        block = next_power_of_2(E)
        b_u = max(1, UNITS_AND_GROUPS // block)
        # a program at least, for the ends of the groups
        programs = max(1, ceil_div(U, b_u))
        groups_kernel[(programs,)](
            ends_E.contiguous(), padded, first, last, group, rows, U, E, unit=UNIT, block=block, b_u=b_u
        )
    return Groups(ends_E, padded, first, last, group, rows)


def _is_in_pairs(x: Tensor) -> bool:
    """Whether there is something for kernels that read two neighbours of a row at once."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0


def group_amax(x_RI: Tensor, ends_E: Tensor, *, by_column: bool = False, tile: Tile = BEST_OF_GROUP_COLUMNS) -> Tensor:
    """See reference_groups.py."""
    E = ends_E.shape[0]
    I = x_RI.shape[1]  # noqa: E741
    bits = torch.zeros(E, I if by_column else 1, dtype=torch.int32, device=x_RI.device)
    if not x_RI.numel() or x_RI.is_meta:
        return bits.view(torch.float32)
    x_RI = x_RI.contiguous()
    if by_column:
        if _is_in_pairs(x_RI):
            R = x_RI.shape[0]
            group_column_amax_of_pairs_kernel[
                grid_of_tiles(ceil_div(R, tile.rows), ceil_div(I, tile.columns), tile.below)
            ](
                x_RI.view(torch.int32),
                ends_E,
                bits,
                R,
                I // 2,
                E,
                interpreted=INTERPRETED,
                block=next_power_of_2(E),
                b_r=tile.rows,
                b_i=tile.columns,
                below=tile.below,
                num_warps=tile.warps,
                maxnreg=tile.registers,
            )
            return bits.view(torch.float32)
        grid = (E, ceil_div(I, AMAX_TILE), AMAX_PROGRAMS)
        group_column_amax_kernel[grid](x_RI, ends_E, bits, I, AMAX_ROWS, AMAX_TILE, num_warps=4)
        return bits.view(torch.float32)
    in_pairs = x_RI.dtype == torch.bfloat16 and I % 2 == 0 and x_RI.data_ptr() % 4 == 0
    per_read = 1
    if in_pairs:
        x_RI = x_RI.view(torch.int32)
        per_read = 2
    size = AMAX_ELEMENTS // per_read
    group_amax_kernel[(ceil_div(x_RI.numel(), size),)](
        x_RI,
        ends_E,
        bits,
        x_RI.numel(),
        I // per_read,
        E,
        in_pairs=in_pairs,
        block=next_power_of_2(E),
        size=size,
        num_warps=WARPS,
    )
    return bits.view(torch.float32)


def group_cast(
    x: Tensor,
    scale: Tensor,
    groups: Groups,
    *,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = False,
    index_R: Tensor | None = None,
    seen: Tensor | None = None,
    saturated: Tensor | None = None,
    scale_copy: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """See reference_groups.py."""
    assert x.dtype != torch.float64, "the kernel computes in fp32"
    assert scale.dtype == torch.float32, f"scales in {scale.dtype}"
    E = groups.ends.shape[0]
    R = groups.rows
    P = groups.columns
    I = x.shape[1]  # noqa: E741
    assert scale.shape[0] in (1, E), f"{tuple(scale.shape)} for {E} groups"
    assert scale.shape[1] in (1, I), f"{tuple(scale.shape)} for {I} columns"
    assert scale_copy is None or scale.numel() == 1, f"a copy of {tuple(scale.shape)} scales"
    assert index_R is not None or x.shape[0] == R, f"{tuple(x.shape)} for {R} rows"
    by_rows = x.new_empty(R, I, dtype=dtype) if rows else None
    by_columns = x.new_empty(I, P, dtype=dtype) if columns else None
    if x.is_meta or I == 0 or not (rows or columns):
        return by_rows, by_columns
    x = x.contiguous()
    scale = scale.contiguous()
    # what is not asked for is not written, and what is not there not read: any address serves
    some_rows = by_rows if rows else by_columns
    some_columns = by_columns if columns else by_rows
    places = (x if index_R is None else index_R, groups.first, groups.last, groups.group)
    recorded = (
        scale if seen is None else seen.view(torch.int32),
        scale if saturated is None else saturated,
        scale if scale_copy is None else scale_copy,
    )
    largest, mantissa, least_exponent = format_constants(dtype)
    form = {
        "gathers": index_R is not None,
        "has_rows": rows,
        "has_columns": columns,
        "sees": seen is not None,
        "counts": saturated is not None,
        "copies": scale_copy is not None,
        "largest": largest,
        "mantissa": mantissa,
        "least_exponent": least_exponent,
    }
    # a scale for all has no steps
    group_stride = scale.shape[1] if scale.shape[0] > 1 else 0
    if _is_in_pairs(x):
        by_column = scale.shape[1] > 1
        if tile is None:
            tile = BEST if index_R is None else best_of_gathered(P)
        group_pairs_kernel[grid_of_tiles(ceil_div(P, tile.rows), ceil_div(I, tile.columns), tile.below)](
            x.view(torch.int32),
            *places,
            scale.view(torch.int64) if by_column else scale,
            some_rows.view(torch.int16),
            some_columns.view(torch.int32) if columns else some_columns,
            *recorded,
            I // 2,
            P // UNIT,
            E,
            group_stride // 2 if by_column else group_stride,
            UNIT // 4,
            by_column=by_column,
            **form,
            interpreted=INTERPRETED,
            quarters=UNIT // 4,
            b_p=tile.rows,
            b_i=tile.columns,
            below=tile.below,
            num_warps=tile.warps,
        )
        return by_rows, by_columns
    group_cast_kernel[(ceil_div(P, SMALL_TILE), ceil_div(I, SMALL_TILE))](
        x,
        *places,
        scale,
        some_rows.view(torch.uint8),
        some_columns.view(torch.uint8),
        *recorded,
        I,
        P,
        E,
        group_stride,
        1 if scale.shape[1] > 1 else 0,
        **form,
        unit=UNIT,
        tile=SMALL_TILE,
        num_warps=WARPS,
    )
    return by_rows, by_columns
