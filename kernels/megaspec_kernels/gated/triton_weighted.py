"""Gated activations of experts times the weight of each row, in one kernel for each direction; inputs alone are kept.

The compiler's kernel for the gradients, which puts those of gates and of the rest beside each other, moves 0.6 of the
4.2 TB/s of an H200.

Note "Places". Those that write fp8 go through padded rows as the cast of groups does: fp8_cast/groups.py, note "Units".
A program has a tile of them and of features, so that a row's weight has its gradient from several: each leaves its
part, and the parts are added in one order.
"""

# R rows, F features, P rows with padding, T tiles of features

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.fp8_cast.padding import UNIT
from megaspec_kernels.fp8_cast.tile import Written, format_constants
from megaspec_kernels.fp8_cast.tiles import Tile, grid_of_tiles
from megaspec_kernels.fp8_cast.triton_groups import group_cast
from megaspec_kernels.gated.form import GatedForm, decoded
from megaspec_kernels.gated.tiles import WEIGHTED_BACKWARD_TILE, WEIGHTED_FORWARD_TILE

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.tile import (
        INTERPRETED,
        columns_of_rows,
        four_in_fp8,
        larger_size,
        largest_size,
        load_known,
        record,
        recounted,
        size_of_four_rows,
        split,
        tile_of_program,
        two_in_fp8,
    )
    from megaspec_kernels.fp8_cast.triton_groups import load_row_pairs, store_columns, store_four
    from megaspec_kernels.gated.triton import gated_tile
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Features of a row that a program takes at a time.
BLOCK = 1024
WARPS = 4


if triton is not None:

    @triton.jit
    def weighted_fwd_kernel(
        gate_up_ptr,
        weights_ptr,
        out_ptr,
        F,
        weight_stride,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        b_f: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        f = tl.program_id(1) * b_f + tl.arange(0, b_f)
        mask = f < F
        weight = tl.load(weights_ptr + row * weight_stride).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=mask, other=0.0).to(tl.float32)
        out, _, _ = gated_tile(gate, up, limit, alpha, name, has_limit)
        tl.store(out_ptr + row * F + f, (out * weight).to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def weighted_bwd_kernel(
        grad_ptr,
        gate_up_ptr,
        weights_ptr,
        grad_gate_up_ptr,
        grad_weights_ptr,
        F,
        weight_stride,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        b_f: tl.constexpr,
    ):
        """A program for each row, which sums its weight's gradient in one order."""
        row = tl.program_id(0).to(tl.int64)
        weight = tl.load(weights_ptr + row * weight_stride).to(tl.float32)
        grad_weight = tl.zeros([b_f], tl.float32)
        for first in range(0, F, b_f):
            f = first + tl.arange(0, b_f)
            mask = f < F
            grad = tl.load(grad_ptr + row * F + f, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=mask, other=0.0).to(tl.float32)
            out, by_gate, by_up = gated_tile(gate, up, limit, alpha, name, has_limit)
            grad_weight += grad * out
            grad *= weight
            dtype = grad_gate_up_ptr.dtype.element_ty
            tl.store(grad_gate_up_ptr + row * (2 * F) + f, (grad * by_gate).to(dtype), mask=mask)
            tl.store(grad_gate_up_ptr + row * (2 * F) + F + f, (grad * by_up).to(dtype), mask=mask)
        tl.store(grad_weights_ptr + row, tl.sum(grad_weight, axis=0).to(grad_weights_ptr.dtype.element_ty))

    @triton.jit
    def place_of(first_ptr, last_ptr, group_ptr, q, is_place, E, quarters: tl.constexpr):
        """Of quarters of units: their first row, where rows of its group end, and the same with none for rows that
        belong to no group."""
        u = q // quarters
        row = tl.load(first_ptr + u, mask=is_place, other=0) + q % quarters * 4
        last = tl.load(last_ptr + u, mask=is_place, other=0)
        group = tl.load(group_ptr + u, mask=is_place, other=E)
        return row, last, tl.where(group < E, last, 0)

    @triton.jit
    def weight_of(weights_ptr, row, is_read, weight_stride):
        return tl.load(weights_ptr + row.to(tl.int64) * weight_stride, mask=is_read, other=0.0).to(tl.float32)[:, None]

    @triton.jit
    def outputs_of_pairs(gate, up, weight, limit, alpha, name: tl.constexpr, has_limit: tl.constexpr):
        """Of two neighbours each in gate and up, int32 of two bf16 -> both outputs in fp32, weighted."""
        gate_low, gate_high = split(gate)
        up_low, up_high = split(up)
        low, _, _ = gated_tile(gate_low, up_low, limit, alpha, name, has_limit)
        high, _, _ = gated_tile(gate_high, up_high, limit, alpha, name, has_limit)
        return low * weight, high * weight

    @triton.jit
    def gradients_of_pairs(grad, gate, up, weight, limit, alpha, name: tl.constexpr, has_limit: tl.constexpr):
        """-> of both gates, of both of up, and what the row's weight has of its gradient in these features."""
        grad_low, grad_high = split(grad)
        gate_low, gate_high = split(gate)
        up_low, up_high = split(up)
        out_low, by_gate_low, by_up_low = gated_tile(gate_low, up_low, limit, alpha, name, has_limit)
        out_high, by_gate_high, by_up_high = gated_tile(gate_high, up_high, limit, alpha, name, has_limit)
        of_weight = tl.sum(grad_low * out_low + grad_high * out_high, axis=1)
        grad_low *= weight
        grad_high *= weight
        return grad_low * by_gate_low, grad_high * by_gate_high, grad_low * by_up_low, grad_high * by_up_high, of_weight

    @triton.jit
    def load_of_row(pairs_ptr, row, read_end, c, is_feature, width):
        """Pairs of rows `width` pairs wide, of which those from `read_end` on are zeros."""
        return load_row_pairs(pairs_ptr, row.to(tl.int64), row < read_end, c, is_feature, width)

    @triton.jit
    def load_four_places(pairs_ptr, row, read_end, c, is_feature, width):
        """The same of four rows that lie behind each other."""
        pairs_0 = load_of_row(pairs_ptr, row, read_end, c, is_feature, width)
        pairs_1 = load_of_row(pairs_ptr, row + 1, read_end, c, is_feature, width)
        pairs_2 = load_of_row(pairs_ptr, row + 2, read_end, c, is_feature, width)
        pairs_3 = load_of_row(pairs_ptr, row + 3, read_end, c, is_feature, width)
        return pairs_0, pairs_1, pairs_2, pairs_3

    @triton.jit
    def four_weights(weights_ptr, row, read_end, weight_stride):
        """Of the same rows, in fp32."""
        weight_0 = weight_of(weights_ptr, row, row < read_end, weight_stride)
        weight_1 = weight_of(weights_ptr, row + 1, row + 1 < read_end, weight_stride)
        weight_2 = weight_of(weights_ptr, row + 2, row + 2 < read_end, weight_stride)
        weight_3 = weight_of(weights_ptr, row + 3, row + 3 < read_end, weight_stride)
        return weight_0, weight_1, weight_2, weight_3

    @triton.jit
    def weighted_fwd_fp8_kernel(
        pairs_ptr,
        weights_ptr,
        first_ptr,
        last_ptr,
        group_ptr,
        row_ptr,
        column_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        half_F,
        units,
        E,
        rows,
        weight_stride,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        quarters: tl.constexpr,
        b_p: tl.constexpr,
        b_f: tl.constexpr,
        below: tl.constexpr,
    ):
        """gate_up as int32 [R, F], rows as int16 [R, F / 2], columns as int32 [F, P / 4]: see note "Places", and
        fp8_cast/triton.py, note "Pairs". `rows`: four, which the compiler must not know."""
        # so that the compiler knows how the columns are aligned, whatever the number of rows is
        quarter_P = units * quarters
        tile_p, tile_f = tile_of_program(below)
        if tile_p * (b_p // 4) >= quarter_P:
            return
        q = tile_p * (b_p // 4) + tl.arange(0, b_p // 4)
        c = tile_f * (b_f // 2) + tl.arange(0, b_f // 2)
        is_place = q < quarter_P
        is_feature = c < half_F
        row, last, read_end = place_of(first_ptr, last_ptr, group_ptr, q, is_place, E, quarters)
        # all are loaded before anything is stored, and before anything is computed
        gate_0, gate_1, gate_2, gate_3 = load_four_places(pairs_ptr, row, read_end, c, is_feature, 2 * half_F)
        up_0, up_1, up_2, up_3 = load_four_places(pairs_ptr + half_F, row, read_end, c, is_feature, 2 * half_F)
        weight_0, weight_1, weight_2, weight_3 = four_weights(weights_ptr, row, read_end, weight_stride)
        scale, inverse, before = load_known(scale_ptr, seen_ptr)
        a_0, b_0 = outputs_of_pairs(gate_0, up_0, weight_0, limit, alpha, name, has_limit)
        a_1, b_1 = outputs_of_pairs(gate_1, up_1, weight_1, limit, alpha, name, has_limit)
        a_2, b_2 = outputs_of_pairs(gate_2, up_2, weight_2, limit, alpha, name, has_limit)
        a_3, b_3 = outputs_of_pairs(gate_3, up_3, weight_3, limit, alpha, name, has_limit)
        none = q[:, None] * 0 + c[None, :] * 0
        sizes = size_of_four_rows(none.to(tl.float32), a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3)
        q_0, q_1, q_2, q_3 = four_in_fp8(
            a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four(row_ptr, row, last, c, is_feature, half_F, q_0, q_1, q_2, q_3)
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_columns(column_ptr, q, is_place, c, is_feature, quarter_P, first, second)
        top = largest_size(sizes)
        count = 0
        if not (top * inverse <= largest):
            # rare: computed again rather than kept
            size = none.to(tl.float32)
            over = none
            for j in range(rows):
                gate = load_of_row(pairs_ptr, row + j, read_end, c, is_feature, 2 * half_F)
                up = load_of_row(pairs_ptr + half_F, row + j, read_end, c, is_feature, 2 * half_F)
                weight = weight_of(weights_ptr, row + j, row + j < read_end, weight_stride)
                a, b = outputs_of_pairs(gate, up, weight, limit, alpha, name, has_limit)
                size, over = recounted(size, over, a, b, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)
        if (tile_p == 0) & (tile_f == 0):
            tl.store(scale_copy_ptr, scale)

    @triton.jit
    def weighted_bwd_fp8_kernel(
        grad_ptr,
        pairs_ptr,
        weights_ptr,
        first_ptr,
        last_ptr,
        group_ptr,
        row_ptr,
        column_ptr,
        part_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        R,
        half_F,
        units,
        E,
        rows,
        weight_stride,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        quarters: tl.constexpr,
        b_p: tl.constexpr,
        b_f: tl.constexpr,
        below: tl.constexpr,
    ):
        """The gradient as int32 [R, F / 2], gate_up as int32 [R, F], rows as int16 [R, F], columns as int32
        [2 F, P / 4]; parts of the weights' gradients [T, R]. See weighted_fwd_fp8_kernel."""
        # so that the compiler knows how the columns are aligned, whatever the number of rows is
        quarter_P = units * quarters
        tile_p, tile_f = tile_of_program(below)
        if tile_p * (b_p // 4) >= quarter_P:
            return
        q = tile_p * (b_p // 4) + tl.arange(0, b_p // 4)
        c = tile_f * (b_f // 2) + tl.arange(0, b_f // 2)
        is_place = q < quarter_P
        is_feature = c < half_F
        row, last, read_end = place_of(first_ptr, last_ptr, group_ptr, q, is_place, E, quarters)
        grad_0, grad_1, grad_2, grad_3 = load_four_places(grad_ptr, row, read_end, c, is_feature, half_F)
        gate_0, gate_1, gate_2, gate_3 = load_four_places(pairs_ptr, row, read_end, c, is_feature, 2 * half_F)
        up_0, up_1, up_2, up_3 = load_four_places(pairs_ptr + half_F, row, read_end, c, is_feature, 2 * half_F)
        weight_0, weight_1, weight_2, weight_3 = four_weights(weights_ptr, row, read_end, weight_stride)
        scale, inverse, before = load_known(scale_ptr, seen_ptr)
        none = q[:, None] * 0 + c[None, :] * 0
        sizes = none.to(tl.float32)
        # a row at a time; in fp8 q are its gates, p is up
        a, b, u, v, w_0 = gradients_of_pairs(grad_0, gate_0, up_0, weight_0, limit, alpha, name, has_limit)
        sizes = larger_size(larger_size(sizes, a, b), u, v)
        q_0 = two_in_fp8(a, b, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        p_0 = two_in_fp8(u, v, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        a, b, u, v, w_1 = gradients_of_pairs(grad_1, gate_1, up_1, weight_1, limit, alpha, name, has_limit)
        sizes = larger_size(larger_size(sizes, a, b), u, v)
        q_1 = two_in_fp8(a, b, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        p_1 = two_in_fp8(u, v, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        a, b, u, v, w_2 = gradients_of_pairs(grad_2, gate_2, up_2, weight_2, limit, alpha, name, has_limit)
        sizes = larger_size(larger_size(sizes, a, b), u, v)
        q_2 = two_in_fp8(a, b, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        p_2 = two_in_fp8(u, v, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        a, b, u, v, w_3 = gradients_of_pairs(grad_3, gate_3, up_3, weight_3, limit, alpha, name, has_limit)
        sizes = larger_size(larger_size(sizes, a, b), u, v)
        q_3 = two_in_fp8(a, b, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        p_3 = two_in_fp8(u, v, inverse, inverse, largest, mantissa, least_exponent, interpreted)
        # zeros of rows that belong to no group
        part_ptr += tile_f.to(tl.int64) * R
        tl.store(part_ptr + row, w_0, mask=row < last)
        tl.store(part_ptr + row + 1, w_1, mask=row + 1 < last)
        tl.store(part_ptr + row + 2, w_2, mask=row + 2 < last)
        tl.store(part_ptr + row + 3, w_3, mask=row + 3 < last)
        F = 2 * half_F
        store_four(row_ptr, row, last, c, is_feature, F, q_0, q_1, q_2, q_3)
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_columns(column_ptr, q, is_place, c, is_feature, quarter_P, first, second)
        # behind all of the gate
        row_ptr += half_F
        column_ptr += F.to(tl.int64) * quarter_P
        store_four(row_ptr, row, last, c, is_feature, F, p_0, p_1, p_2, p_3)
        first, second = columns_of_rows(p_0, p_1, p_2, p_3, interpreted)
        store_columns(column_ptr, q, is_place, c, is_feature, quarter_P, first, second)
        top = largest_size(sizes)
        count = 0
        if not (top * inverse <= largest):
            size = none.to(tl.float32)
            over = none
            for j in range(rows):
                grad = load_of_row(grad_ptr, row + j, read_end, c, is_feature, half_F)
                gate = load_of_row(pairs_ptr, row + j, read_end, c, is_feature, 2 * half_F)
                up = load_of_row(pairs_ptr + half_F, row + j, read_end, c, is_feature, 2 * half_F)
                weight = weight_of(weights_ptr, row + j, row + j < read_end, weight_stride)
                a, b, u, v, _ = gradients_of_pairs(grad, gate, up, weight, limit, alpha, name, has_limit)
                size, over = recounted(size, over, a, b, inverse, largest)
                size, over = recounted(size, over, u, v, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)
        if (tile_p == 0) & (tile_f == 0):
            tl.store(scale_copy_ptr, scale)


def forward(gate_up_RF: Tensor, weights_R: Tensor, *, form: GatedForm) -> Tensor:
    """[R, 2 F], [R] -> weight · gated, [R, F], computed in fp32 and rounded once."""
    R, width = gate_up_RF.shape
    F = width // 2
    out = gate_up_RF.new_empty(R, F)
    if out.numel() and not out.is_meta:
        said = decoded(form.code)
        weighted_fwd_kernel[(R, ceil_div(F, BLOCK))](
            gate_up_RF.contiguous(),
            weights_R,
            out,
            F,
            weights_R.stride(0),
            said.limit,
            said.alpha,
            said.activation,
            said.has_limit,
            BLOCK,
            num_warps=WARPS,
        )
    return out


def gradients(grad_RF: Tensor, gate_up_RF: Tensor, weights_R: Tensor, *, form: GatedForm) -> tuple[Tensor, Tensor]:
    """[R, F], [R, 2 F], [R] -> the gradients of gates and the rest, [R, 2 F], and of the weights, [R]."""
    R, width = gate_up_RF.shape
    F = width // 2
    grad_gate_up = torch.empty_like(gate_up_RF, memory_format=torch.contiguous_format)
    grad_weights = weights_R.new_empty(R)
    if grad_gate_up.is_meta:
        return grad_gate_up, grad_weights
    if not grad_gate_up.numel():
        return grad_gate_up, grad_weights.zero_()
    said = decoded(form.code)
    weighted_bwd_kernel[(R,)](
        grad_RF.contiguous(),
        gate_up_RF.contiguous(),
        weights_R,
        grad_gate_up,
        grad_weights,
        F,
        weights_R.stride(0),
        said.limit,
        said.alpha,
        said.activation,
        said.has_limit,
        BLOCK,
        num_warps=WARPS,
    )
    return grad_gate_up, grad_weights


def forward_in_fp8(
    gate_up_RF: Tensor,
    weights_R: Tensor,
    groups: Groups,
    *,
    form: GatedForm,
    known: Known,
    tile: Tile = WEIGHTED_FORWARD_TILE,
) -> Written:
    """`forward`, written in fp8 alone by a scale that is known: rows of groups [R, F], and columns [F, P]; see
    group_cast in fp8_cast/reference_groups.py."""
    F = gate_up_RF.shape[1] // 2
    if not _in_pairs(gate_up_RF):
        # rounded once, as in pairs
        return _cast(forward(gate_up_RF.to(torch.float32), weights_R, form=form), groups, known)
    gate_up_RF = gate_up_RF.contiguous()
    written = _empty(gate_up_RF, groups, F, known)
    if gate_up_RF.is_meta:
        return written
    weighted_fwd_fp8_kernel[grid_of_tiles(ceil_div(groups.columns, tile.rows), ceil_div(F, tile.columns), tile.below)](
        gate_up_RF.view(torch.int32),
        weights_R,
        *_places(groups),
        written.rows.view(torch.int16),
        written.columns.view(torch.int32),
        *_recorded(written, known),
        F // 2,
        groups.columns // UNIT,
        groups.ends.shape[0],
        UNIT // 4,
        weights_R.stride(0),
        *_form(form, known),
        quarters=UNIT // 4,
        b_p=tile.rows,
        b_f=tile.columns,
        below=tile.below,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return written


def gradients_in_fp8(
    grad_RF: Tensor,
    gate_up_RF: Tensor,
    weights_R: Tensor,
    groups: Groups,
    *,
    form: GatedForm,
    known: Known,
    tile: Tile = WEIGHTED_BACKWARD_TILE,
) -> tuple[Written, Tensor]:
    """`gradients`, those of gates and the rest written in fp8 alone as by `forward_in_fp8`: [R, 2 F] and [2 F, P]. Rows
    of no group have none."""
    R, F = grad_RF.shape
    if not _in_pairs(gate_up_RF, grad_RF):
        wide = (grad_RF.to(torch.float32), gate_up_RF.to(torch.float32))
        grad_gate_up, grad_weights = gradients(*wide, weights_R, form=form)
        return _cast(grad_gate_up, groups, known), grad_weights
    grad_RF = grad_RF.contiguous()
    gate_up_RF = gate_up_RF.contiguous()
    written = _empty(gate_up_RF, groups, 2 * F, known)
    tiles = ceil_div(F, tile.columns)
    parts_TR = torch.empty(tiles, R, dtype=torch.float32, device=grad_RF.device)
    if gate_up_RF.is_meta:
        return written, parts_TR.sum(0).to(weights_R.dtype)
    weighted_bwd_fp8_kernel[grid_of_tiles(ceil_div(groups.columns, tile.rows), tiles, tile.below)](
        grad_RF.view(torch.int32),
        gate_up_RF.view(torch.int32),
        weights_R,
        *_places(groups),
        written.rows.view(torch.int16),
        written.columns.view(torch.int32),
        parts_TR,
        *_recorded(written, known),
        R,
        F // 2,
        groups.columns // UNIT,
        groups.ends.shape[0],
        UNIT // 4,
        weights_R.stride(0),
        *_form(form, known),
        quarters=UNIT // 4,
        b_p=tile.rows,
        b_f=tile.columns,
        below=tile.below,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return written, parts_TR.sum(0).to(weights_R.dtype)


def _in_pairs(*tensors: Tensor) -> bool:
    """bf16 in sizes that 16 divides."""
    in_pairs = True
    for x in tensors:
        in_pairs = in_pairs and x.dtype == torch.bfloat16 and x.shape[1] % 16 == 0 and x.data_ptr() % 16 == 0
    return in_pairs


def _empty(like: Tensor, groups: Groups, features: int, known: Known) -> Written:
    return Written(
        like.new_empty(groups.rows, features, dtype=known.dtype),
        like.new_empty(features, groups.columns, dtype=known.dtype),
        like.new_empty(1, 1, dtype=torch.float32),
    )


def _cast(x: Tensor, groups: Groups, known: Known) -> Written:
    """What is there in the model's format."""
    scale = known.scale.view(1, 1)
    copy = torch.empty_like(scale)
    rows, columns = group_cast(
        x,
        scale,
        groups,
        dtype=known.dtype,
        columns=True,
        seen=known.seen,
        saturated=known.saturated,
        scale_copy=copy,
    )
    return Written(rows, columns, copy)


def _places(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    return groups.first, groups.last, groups.group


def _recorded(written: Written, known: Known) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # where nothing is recorded nothing is written: any address serves
    seen = known.scale if known.seen is None else known.seen
    return known.scale, written.scale, seen.view(torch.int32), known.saturated


def _form(form: GatedForm, known: Known) -> tuple[object, ...]:
    """What kernels that write fp8 take of both, behind the sizes."""
    said = decoded(form.code)
    return (
        said.limit,
        said.alpha,
        said.activation,
        said.has_limit,
        known.seen is not None,
        *format_constants(known.dtype),
        INTERPRETED,
    )
