"""Gated activations in one kernel for each direction, of which the input alone is kept."""

# M rows, F features

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.tile import Written, empty_pair, format_constants
from megaspec_kernels.fp8_cast.tiles import Tile, grid_of_tiles
from megaspec_kernels.gated.form import GatedForm, decoded
from megaspec_kernels.gated.tiles import BACKWARD_TILE, FORWARD_TILE
from megaspec_kernels.operation import fake_of, operation

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.tile import (
        INTERPRETED,
        columns_of_rows,
        four_in_fp8,
        in_fp8,
        inverse_of,
        largest_size,
        load_known,
        load_pairs,
        record,
        recounted,
        size_of_four_rows,
        split,
        store_four_rows,
        store_two_columns,
        tile_of_program,
    )
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Features of a row that one program takes, 16 bytes of each part a thread.
BLOCK = 1024
WARPS = 4

if triton is not None:
    # What Python sees as a bool, a kernel as a constant.
    _INTERPRETED = tl.constexpr(INTERPRETED)

    @triton.jit
    def sigmoid(x):
        """1 / (1 + e^-x), by what the GPU has an instruction for: each within 2 ulp.

        Triton's own sigmoid guards both steps against numbers below fp32's normal ones, 8 instructions of 34 that the
        forward kernel takes for an element; here they are 0, as they are for x < -88 in either.
        """
        # e^-x = 2^(-x log2 e)
        power = x * -1.4426950408889634
        if _INTERPRETED:
            share = 1 / (1 + tl.exp2(power))
        else:
            share = tl.inline_asm_elementwise(
                "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
                "=f,f",
                [power],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        return share

    @triton.jit
    def tanh(x):
        # by the exponential that can't overflow
        small = tl.exp(-2 * tl.abs(x))
        bent = (1 - small) / (1 + small)
        return tl.where(x < 0, -bent, bent)

    @triton.jit
    def activated(gate, name: tl.constexpr):
        """activation(gate), and its derivative."""
        if name == "silu":
            share = sigmoid(gate)
            value = gate * share
            slope = share * (1 + gate * (1 - share))
        elif name == "quick_gelu":
            share = sigmoid(1.702 * gate)
            value = gate * share
            slope = share * (1 + 1.702 * gate * (1 - share))
        elif name == "gelu":
            # Φ(x), and x φ(x) with φ(x) = exp(-x² / 2) / sqrt(2 π)
            share = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
            value = gate * share
            slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        elif name == "gelu_tanh":
            # sqrt(2 / π) (x + 0.044715 x³)
            bent = tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
            value = 0.5 * gate * (1 + bent)
            inner = 0.7978845608028654 * (1 + 0.134145 * gate * gate)
            slope = 0.5 * (1 + bent) + 0.5 * gate * (1 - bent * bent) * inner
        elif name == "relu":
            # NaN stays what it is
            value = tl.where(gate <= 0, 0.0, gate)
            slope = tl.where(gate <= 0, 0.0, 1.0)
        else:
            tl.static_assert(name == "relu_squared", "no such activation")
            value = tl.where(gate <= 0, 0.0, gate * gate)
            slope = tl.where(gate <= 0, 0.0, 2 * gate)
        return value, slope

    @triton.jit
    def gated_tile(gate, up, limit, alpha, name: tl.constexpr, has_limit: tl.constexpr):
        """What is computed of both, and its derivatives by either."""
        if has_limit:
            low = tl.where(gate > limit, limit, gate)
            near = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            share = sigmoid(alpha * low)
            value = low * share
            slope = share * (1 + alpha * low * (1 - share))
            out = (near + 1) * value
            by_gate = tl.where(gate > limit, 0.0, (near + 1) * slope)
            by_up = tl.where((up > limit) | (up < -limit), 0.0, value)
        else:
            value, slope = activated(gate, name)
            out = value * up
            by_gate = slope * up
            by_up = value
        return out, by_gate, by_up

    @triton.jit
    def gated_fwd_kernel(
        gate_up_ptr, out_ptr, F, limit, alpha, name: tl.constexpr, has_limit: tl.constexpr, b_f: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        f = tl.program_id(1) * b_f + tl.arange(0, b_f)
        mask = f < F
        gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=mask, other=0.0).to(tl.float32)
        out, _, _ = gated_tile(gate, up, limit, alpha, name, has_limit)
        tl.store(out_ptr + row * F + f, out.to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def gated_bwd_kernel(
        grad_ptr,
        gate_up_ptr,
        grad_gate_up_ptr,
        F,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        b_f: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        f = tl.program_id(1) * b_f + tl.arange(0, b_f)
        mask = f < F
        grad = tl.load(grad_ptr + row * F + f, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=mask, other=0.0).to(tl.float32)
        _, by_gate, by_up = gated_tile(gate, up, limit, alpha, name, has_limit)
        dtype = grad_gate_up_ptr.dtype.element_ty
        tl.store(grad_gate_up_ptr + row * (2 * F) + f, (grad * by_gate).to(dtype), mask=mask)
        tl.store(grad_gate_up_ptr + row * (2 * F) + F + f, (grad * by_up).to(dtype), mask=mask)

    @triton.jit
    def gated_fwd_fp8_kernel(
        gate_up_ptr,
        row_ptr,
        column_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        M,
        F,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        f = tl.program_id(1) * b_f + tl.arange(0, b_f)
        mask = (m < M)[:, None] & (f < F)[None, :]
        at = m[:, None] * (2 * F) + f[None, :]
        gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + F + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_copy_ptr, scale)
        out, _, _ = gated_tile(gate, up, limit, alpha, name, has_limit)
        q, size, over = in_fp8(out, inverse_of(scale), largest, mantissa, least_exponent)
        tl.store(row_ptr + m[:, None] * F + f[None, :], q, mask=mask)
        # to transposed addresses
        tl.store(column_ptr + f.to(tl.int64)[None, :] * M + m[:, None], q, mask=mask)
        record(
            seen_ptr,
            tl.load(seen_ptr),
            saturated_ptr,
            tl.max(tl.max(size, axis=1), axis=0),
            tl.sum(tl.sum(over.to(tl.int32), axis=1), axis=0),
            has_seen,
        )

    @triton.jit
    def gated_bwd_fp8_kernel(
        grad_ptr,
        gate_up_ptr,
        row_ptr,
        column_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        M,
        F,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
    ):
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        f = tl.program_id(1) * b_f + tl.arange(0, b_f)
        mask = (m < M)[:, None] & (f < F)[None, :]
        at = m[:, None] * (2 * F) + f[None, :]
        grad = tl.load(grad_ptr + m[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + F + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_copy_ptr, scale)
        inverse = inverse_of(scale)
        _, by_gate, by_up = gated_tile(gate, up, limit, alpha, name, has_limit)
        column = f.to(tl.int64)[None, :] * M + m[:, None]
        # masked elements are 0 · something finite
        q, size, over = in_fp8(grad * by_gate, inverse, largest, mantissa, least_exponent)
        tl.store(row_ptr + at, q, mask=mask)
        tl.store(column_ptr + column, q, mask=mask)
        q, size_up, over_up = in_fp8(grad * by_up, inverse, largest, mantissa, least_exponent)
        tl.store(row_ptr + F + at, q, mask=mask)
        tl.store(column_ptr + column + (f * 0 + F).to(tl.int64)[None, :] * M, q, mask=mask)
        record(
            seen_ptr,
            tl.load(seen_ptr),
            saturated_ptr,
            tl.max(tl.max(tl.maximum(size, size_up), axis=1), axis=0),
            tl.sum(tl.sum(over.to(tl.int32) + over_up.to(tl.int32), axis=1), axis=0),
            has_seen,
        )

    @triton.jit
    def outputs_of_pairs(
        pairs_ptr,
        at,
        half_F,
        mask,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        is_even: tl.constexpr,
    ):
        """Of two neighbours each in gate and up, int32 of two bf16 -> both outputs in fp32."""
        gate_low, gate_high = split(load_pairs(pairs_ptr, at, mask, is_even))
        up_low, up_high = split(load_pairs(pairs_ptr, at + half_F, mask, is_even))
        low, _, _ = gated_tile(gate_low, up_low, limit, alpha, name, has_limit)
        high, _, _ = gated_tile(gate_high, up_high, limit, alpha, name, has_limit)
        return low, high

    @triton.jit
    def gradients_of_pairs(
        grad_ptr,
        pairs_ptr,
        grad_at,
        at,
        half_F,
        mask,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        is_even: tl.constexpr,
    ):
        """-> of both gates, and of both of up."""
        grad_low, grad_high = split(load_pairs(grad_ptr, grad_at, mask, is_even))
        gate_low, gate_high = split(load_pairs(pairs_ptr, at, mask, is_even))
        up_low, up_high = split(load_pairs(pairs_ptr, at + half_F, mask, is_even))
        _, gate_low, up_low = gated_tile(gate_low, up_low, limit, alpha, name, has_limit)
        _, gate_high, up_high = gated_tile(gate_high, up_high, limit, alpha, name, has_limit)
        return grad_low * gate_low, grad_high * gate_high, grad_low * up_low, grad_high * up_high

    @triton.jit
    def gated_fwd_fp8_pairs_kernel(
        pairs_ptr,
        row_ptr,
        column_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        half_F,
        quarter_M,
        rows,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
        below: tl.constexpr,
    ):
        """gate_up as int32 [M, F], rows as int16 [M, F / 2], columns as int32 [F, M / 4]: as fp8_cast/triton.py does,
        see its note "Pairs". `rows`: four, which the compiler must not know."""
        tile_m, tile_f = tile_of_program(below)
        if tile_m * (b_m // 4) >= quarter_M:
            return
        # rows 4 i + j, features 2 c and 2 c + 1 of the tile
        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_f // 2)
        mask = (tile_m * (b_m // 4) + i < quarter_M)[:, None] & (tile_f * (b_f // 2) + c < half_F)[None, :]
        F = 2 * half_F
        pairs_ptr += tile_m.to(tl.int64) * b_m * F + tile_f * (b_f // 2)
        row_ptr += tile_m.to(tl.int64) * b_m * half_F + tile_f * (b_f // 2)
        at = i[:, None] * (4 * F) + c[None, :]
        to = i[:, None] * (4 * half_F) + c[None, :]
        # all are loaded before anything is stored
        a_0, b_0 = outputs_of_pairs(pairs_ptr, at, half_F, mask, limit, alpha, name, has_limit, is_even)
        a_1, b_1 = outputs_of_pairs(pairs_ptr, at + F, half_F, mask, limit, alpha, name, has_limit, is_even)
        a_2, b_2 = outputs_of_pairs(pairs_ptr, at + 2 * F, half_F, mask, limit, alpha, name, has_limit, is_even)
        a_3, b_3 = outputs_of_pairs(pairs_ptr, at + 3 * F, half_F, mask, limit, alpha, name, has_limit, is_even)
        scale, inverse, before = load_known(scale_ptr, seen_ptr)
        sizes = size_of_four_rows(at.to(tl.float32) * 0.0, a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3)
        q_0, q_1, q_2, q_3 = four_in_fp8(
            a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four_rows(row_ptr, to, half_F, q_0, q_1, q_2, q_3, mask, is_even)
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        column_ptr += tile_f.to(tl.int64) * b_f * quarter_M + tile_m * (b_m // 4)
        down = c[None, :] * (2 * quarter_M) + i[:, None]
        store_two_columns(column_ptr, down, quarter_M, first, second, mask, is_even)
        top = largest_size(sizes)
        count = 0
        if not (top * inverse <= largest):
            # rare: computed again rather than kept
            size = at.to(tl.float32) * 0.0
            over = at * 0
            for j in range(rows):
                a, b = outputs_of_pairs(pairs_ptr, at + j * F, half_F, mask, limit, alpha, name, has_limit, is_even)
                size, over = recounted(size, over, a, b, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)
        if (tile_m == 0) & (tile_f == 0):
            tl.store(scale_copy_ptr, scale)

    @triton.jit
    def gated_bwd_fp8_pairs_kernel(
        grad_ptr,
        pairs_ptr,
        row_ptr,
        column_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        half_F,
        quarter_M,
        rows,
        limit,
        alpha,
        name: tl.constexpr,
        has_limit: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_f: tl.constexpr,
        below: tl.constexpr,
    ):
        """The gradient as int32 [M, F / 2], gate_up as int32 [M, F], rows as int16 [M, F], columns as int32
        [2 F, M / 4]; see gated_fwd_fp8_pairs_kernel."""
        tile_m, tile_f = tile_of_program(below)
        if tile_m * (b_m // 4) >= quarter_M:
            return
        i = tl.arange(0, b_m // 4)
        c = tl.arange(0, b_f // 2)
        mask = (tile_m * (b_m // 4) + i < quarter_M)[:, None] & (tile_f * (b_f // 2) + c < half_F)[None, :]
        F = 2 * half_F
        begin = tile_m.to(tl.int64) * b_m * F + tile_f * (b_f // 2)
        grad_ptr += tile_m.to(tl.int64) * b_m * half_F + tile_f * (b_f // 2)
        pairs_ptr += begin
        row_ptr += begin
        at = i[:, None] * (4 * F) + c[None, :]
        g = i[:, None] * (4 * half_F) + c[None, :]
        a_0, b_0, u_0, v_0 = gradients_of_pairs(
            grad_ptr, pairs_ptr, g, at, half_F, mask, limit, alpha, name, has_limit, is_even
        )
        a_1, b_1, u_1, v_1 = gradients_of_pairs(
            grad_ptr, pairs_ptr, g + half_F, at + F, half_F, mask, limit, alpha, name, has_limit, is_even
        )
        a_2, b_2, u_2, v_2 = gradients_of_pairs(
            grad_ptr, pairs_ptr, g + 2 * half_F, at + 2 * F, half_F, mask, limit, alpha, name, has_limit, is_even
        )
        a_3, b_3, u_3, v_3 = gradients_of_pairs(
            grad_ptr, pairs_ptr, g + 3 * half_F, at + 3 * F, half_F, mask, limit, alpha, name, has_limit, is_even
        )
        scale, inverse, before = load_known(scale_ptr, seen_ptr)
        sizes = size_of_four_rows(at.to(tl.float32) * 0.0, a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3)
        sizes = size_of_four_rows(sizes, u_0, v_0, u_1, v_1, u_2, v_2, u_3, v_3)
        column_ptr += tile_f.to(tl.int64) * b_f * quarter_M + tile_m * (b_m // 4)
        down = c[None, :] * (2 * quarter_M) + i[:, None]
        q_0, q_1, q_2, q_3 = four_in_fp8(
            a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four_rows(row_ptr, at, F, q_0, q_1, q_2, q_3, mask, is_even)
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_two_columns(column_ptr, down, quarter_M, first, second, mask, is_even)
        # behind all of the gate
        row_ptr += half_F
        column_ptr += F.to(tl.int64) * quarter_M
        q_0, q_1, q_2, q_3 = four_in_fp8(
            u_0, v_0, u_1, v_1, u_2, v_2, u_3, v_3, inverse, largest, mantissa, least_exponent, interpreted
        )
        store_four_rows(row_ptr, at, F, q_0, q_1, q_2, q_3, mask, is_even)
        first, second = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
        store_two_columns(column_ptr, down, quarter_M, first, second, mask, is_even)
        top = largest_size(sizes)
        count = 0
        if not (top * inverse <= largest):
            size = at.to(tl.float32) * 0.0
            over = at * 0
            for j in range(rows):
                a, b, u, v = gradients_of_pairs(
                    grad_ptr,
                    pairs_ptr,
                    g + j * half_F,
                    at + j * F,
                    half_F,
                    mask,
                    limit,
                    alpha,
                    name,
                    has_limit,
                    is_even,
                )
                size, over = recounted(size, over, a, b, inverse, largest)
                size, over = recounted(size, over, u, v, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)
        if (tile_m == 0) & (tile_f == 0):
            tl.store(scale_copy_ptr, scale)


def _grid(M: int, F: int) -> tuple[int, int]:
    return M, ceil_div(F, BLOCK)


@operation("megaspec::gated_forward")
def gated_forward(gate_up: Tensor, code: str) -> Tensor:
    """[..., 2 F] -> [..., F]"""
    assert gate_up.dtype != torch.float64, "the kernel computes in fp32"
    F = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], F)
    if out.numel() == 0:
        return out
    form = decoded(code)
    gated_fwd_kernel[_grid(out.numel() // F, F)](
        gate_up.contiguous(),
        out,
        F,
        form.limit,
        form.alpha,
        form.activation,
        form.has_limit,
        BLOCK,
        num_warps=WARPS,
    )
    return out


@fake_of(gated_forward)
def _(gate_up: Tensor, code: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@operation("megaspec::gated_backward")
def gated_backward(grad: Tensor, gate_up: Tensor, code: str) -> Tensor:
    """[..., F], [..., 2 F] -> [..., 2 F]"""
    grad_gate_up = gate_up.new_empty(gate_up.shape)
    F = grad.shape[-1]
    if grad.numel() == 0:
        return grad_gate_up
    form = decoded(code)
    gated_bwd_kernel[_grid(grad.numel() // F, F)](
        grad.contiguous(),
        gate_up.contiguous(),
        grad_gate_up,
        F,
        form.limit,
        form.alpha,
        form.activation,
        form.has_limit,
        BLOCK,
        num_warps=WARPS,
    )
    return grad_gate_up


@fake_of(gated_backward)
def _(grad: Tensor, gate_up: Tensor, code: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


# Of the kernels that take an element at a time: rows, features, warps.
SMALL_ROWS = 64
SMALL_FEATURES = 64
SMALL_WARPS = 8


def gated_forward_in_fp8(gate_up: Tensor, code: str, *, known: Known, tile: Tile = FORWARD_TILE) -> Written:
    """`gated_forward`, written in fp8 alone, by a scale that is known."""
    F = gate_up.shape[-1] // 2
    M = gate_up.numel() // (2 * F)
    written = empty_pair(gate_up, M, F, known.dtype)
    kernels = Kernels(gated_fwd_fp8_pairs_kernel, gated_fwd_fp8_kernel, tile)
    _write(kernels, (gate_up,), written, M, F, code, known)
    return written


def gated_backward_in_fp8(
    grad: Tensor, gate_up: Tensor, code: str, *, known: Known, tile: Tile = BACKWARD_TILE
) -> Written:
    """`gated_backward`, written in fp8 alone, by a scale that is known."""
    F = grad.shape[-1]
    M = grad.numel() // F
    written = empty_pair(gate_up, M, 2 * F, known.dtype)
    kernels = Kernels(gated_bwd_fp8_pairs_kernel, gated_bwd_fp8_kernel, tile)
    _write(kernels, (grad, gate_up), written, M, F, code, known)
    return written


class Kernels(NamedTuple):
    """Of one direction."""

    of_pairs: Any
    """bf16 in sizes that 16 divides."""
    of_elements: Any
    tile: Tile
    """Of the first."""


def _write(
    kernels: Kernels, inputs: tuple[Tensor, ...], written: Written, M: int, F: int, code: str, known: Known
) -> None:
    assert inputs[-1].dtype != torch.float64, "the kernel computes in fp32"
    form = decoded(code)
    inputs = tuple(x.contiguous() for x in inputs)
    recorded = (
        known.scale,
        written.scale,
        # where nothing is recorded nothing is written: any address serves
        known.scale.view(torch.int32) if known.seen is None else known.seen.view(torch.int32),
        known.saturated,
    )
    what = (form.limit, form.alpha, form.activation, form.has_limit, known.seen is not None)
    in_pairs = M % 16 == 0 and F % 16 == 0
    for x in inputs:
        in_pairs = in_pairs and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0
    if in_pairs:
        tile = kernels.tile
        kernels.of_pairs[grid_of_tiles(ceil_div(M, tile.rows), ceil_div(F, tile.columns), tile.below)](
            *(x.view(torch.int32) for x in inputs),
            written.rows.view(torch.int16),
            written.columns.view(torch.int32),
            *recorded,
            F // 2,
            M // 4,
            M // (M // 4),
            *what,
            *format_constants(known.dtype),
            INTERPRETED,
            M % tile.rows == 0 and F % tile.columns == 0,
            tile.rows,
            tile.columns,
            tile.below,
            num_warps=tile.warps,
            maxnreg=tile.registers,
        )
        return
    kernels.of_elements[(ceil_div(M, SMALL_ROWS), ceil_div(F, SMALL_FEATURES))](
        *inputs,
        written.rows.view(torch.uint8),
        written.columns.view(torch.uint8),
        *recorded,
        M,
        F,
        *what,
        *format_constants(known.dtype),
        SMALL_ROWS,
        SMALL_FEATURES,
        num_warps=SMALL_WARPS,
    )


class GatedOp(torch.autograd.Function):
    """See reference.py."""

    @staticmethod
    def forward(ctx, gate_up, code):
        ctx.save_for_backward(gate_up)
        ctx.code = code
        return gated_forward(gate_up, code)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return gated_backward(grad, gate_up, ctx.code), None


def gated(gate_up: Tensor, *, form: GatedForm) -> Tensor:
    """See reference.py."""
    return GatedOp.apply(gate_up, form.code)
