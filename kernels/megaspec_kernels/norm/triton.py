"""Norms of rows in one kernel for each direction: the sum before a norm is made in its forward pass, and the gradient
that the residual stream has besides is added in its backward pass, so that nothing is read or written twice.

Of a norm its input is kept, and a row's statistics in fp32; the normed input is computed again.

Note "Partial sums". The gradient of the weight is a sum over all rows. Each program sums up its own in fp32, and a
second kernel adds those sums, always in the same order.
"""

# M rows of D features; S statistics of a row, P programs, W vectors that are trained: weight, bias

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.tile import Written, empty_pair, format_constants
from megaspec_kernels.grid import next_power_of_2
from megaspec_kernels.norm.form import Normed, NormForm, decoded
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
        load_pairs,
        record,
        recounted,
        split,
        store_four_rows,
        store_two_columns,
        top_of_four_rows,
    )
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# A row lies in one program's registers.
WIDEST = 65536
# Features that one program of the forward pass takes at least, as rows of a narrow model.
FEATURES = 4096
# Features of a warp: two loads of 16 bytes a thread.
FEATURES_OF_A_WARP = 512
# Programs of the backward pass on each SM, and rows that are being loaded at once.
PROGRAMS = 2
STAGES = 2
# Partial sums that one program of their sum loads at once.
SUMS_ROWS = 128
SUMS_FEATURES = 32

if triton is not None:

    @triton.jit
    def norm_fwd_kernel(
        x_ptr,
        term_ptr,
        weight_ptr,
        bias_ptr,
        total_ptr,
        y_ptr,
        statistics_ptr,
        M,
        D,
        eps,
        scale,
        adds: tl.constexpr,
        is_layer: tl.constexpr,
        gain: tl.constexpr,
        has_bias: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
    ):
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        d = tl.arange(0, b_d)
        mask = (m < M)[:, None] & (d < D)[None, :]
        at = m[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if adds:
            x += scale * tl.load(term_ptr + at, mask=mask, other=0.0).to(tl.float32)
            total = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + at, total, mask=mask)
            # what is kept is what is normed
            x = total.to(tl.float32)
        if is_layer:
            mean = tl.sum(x, axis=1) / D
            tl.store(statistics_ptr + M + m, mean, mask=m < M)
            x = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        tl.store(statistics_ptr + m, rstd, mask=m < M)
        y = x * rstd[:, None]
        if gain != "none":
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
            if gain == "one_plus":
                weight += 1
            y *= weight[None, :]
        if has_bias:
            y += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def norm_bwd_kernel(
        grad_ptr,
        grad_stream_ptr,
        x_ptr,
        weight_ptr,
        statistics_ptr,
        grad_x_ptr,
        grad_term_ptr,
        partial_ptr,
        M,
        D,
        scale,
        has_stream: tl.constexpr,
        has_term: tl.constexpr,
        is_layer: tl.constexpr,
        gain: tl.constexpr,
        sums_weight: tl.constexpr,
        sums_bias: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
        stages: tl.constexpr,
    ):
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        d = tl.arange(0, b_d)
        in_row = d < D
        if gain != "none":
            weight = tl.load(weight_ptr + d, mask=in_row, other=0.0)
        of_weight = tl.zeros([b_m, b_d], dtype=tl.float32)
        of_bias = tl.zeros([b_m, b_d], dtype=tl.float32)
        for first in tl.range(program * b_m, M, programs * b_m, num_stages=stages):
            m = first + tl.arange(0, b_m)
            at = m.to(tl.int64)[:, None] * D + d[None, :]
            mask = (m < M)[:, None] & in_row[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(statistics_ptr + m, mask=m < M, other=0.0)
            if is_layer:
                x -= tl.load(statistics_ptr + M + m, mask=m < M, other=0.0)[:, None]
            normed = x * rstd[:, None]
            if sums_weight:
                of_weight += grad * normed
            if sums_bias:
                of_bias += grad
            if gain == "scale":
                grad *= weight.to(tl.float32)[None, :]
            if gain == "one_plus":
                grad += grad * weight.to(tl.float32)[None, :]
            # behind a row's end the gradient is zero
            grad_x = grad - normed * (tl.sum(grad * normed, axis=1) / D)[:, None]
            if is_layer:
                grad_x -= (tl.sum(grad, axis=1) / D)[:, None]
            grad_x *= rstd[:, None]
            if has_stream:
                grad_x += tl.load(grad_stream_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
            if has_term:
                tl.store(grad_term_ptr + at, (scale * grad_x).to(grad_term_ptr.dtype.element_ty), mask=mask)
        if sums_weight:
            tl.store(partial_ptr + program * D + d, tl.sum(of_weight, axis=0), mask=in_row)
        if sums_bias:
            tl.store(partial_ptr + (programs + program) * D + d, tl.sum(of_bias, axis=0), mask=in_row)

    @triton.jit
    def norm_sums_kernel(partial_ptr, out_ptr, P, D, b_p: tl.constexpr, b_d: tl.constexpr):
        which = tl.program_id(1)
        d = tl.program_id(0) * b_d + tl.arange(0, b_d)
        total = tl.zeros([b_p, b_d], dtype=tl.float32)
        for first in range(0, P, b_p):
            p = first + tl.arange(0, b_p)
            mask = (p < P)[:, None] & (d < D)[None, :]
            total += tl.load(partial_ptr + (which * P + p)[:, None] * D + d[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + which * D + d, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=d < D)

    @triton.jit
    def statistics_of_rows(
        x_ptr,
        term_ptr,
        total_ptr,
        statistics_ptr,
        m,
        M,
        D,
        eps,
        term_scale,
        adds: tl.constexpr,
        is_layer: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
    ):
        """Writes sums and statistics of the rows `m`. -> means, 1 / std"""
        in_rows = m < M
        squares = tl.zeros([b_m, b_d], dtype=tl.float32)
        mean = tl.zeros([b_m], dtype=tl.float32)
        spread = tl.zeros([b_m], dtype=tl.float32)
        for first in range(0, D, b_d):
            d = first + tl.arange(0, b_d)
            at = m[:, None] * D + d[None, :]
            mask = in_rows[:, None] & (d < D)[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if adds:
                x += term_scale * tl.load(term_ptr + at, mask=mask, other=0.0).to(tl.float32)
                total = x.to(total_ptr.dtype.element_ty)
                tl.store(total_ptr + at, total, mask=mask)
                x = total.to(tl.float32)
            if is_layer:
                # a piece's own mean and spread, put together with those before it (Chan et al. 1979)
                n = tl.minimum(D - first, b_d).to(tl.float32)
                here = tl.sum(x, axis=1) / n
                apart = tl.where(mask, x - here[:, None], 0.0)
                share = n / (first + n)
                spread += tl.sum(apart * apart, axis=1) + (here - mean) * (here - mean) * first * share
                mean += (here - mean) * share
            else:
                squares += x * x
        if is_layer:
            tl.store(statistics_ptr + M + m, mean, mask=in_rows)
        else:
            spread = tl.sum(squares, axis=1)
        rstd = tl.rsqrt(spread / D + eps)
        tl.store(statistics_ptr + m, rstd, mask=in_rows)
        return mean, rstd

    @triton.jit
    def normed_pairs(
        pairs_ptr,
        at,
        mask,
        statistics_ptr,
        m,
        M,
        weight,
        bias,
        is_layer: tl.constexpr,
        gain: tl.constexpr,
        has_bias: tl.constexpr,
        is_even: tl.constexpr,
    ):
        """Two neighbours of each of the rows `m`, int32 of two bf16 -> both normed in fp32. `weight`, `bias`: as
        pairs."""
        low, high = split(load_pairs(pairs_ptr, at, mask, is_even))
        if is_layer:
            mean = tl.load(statistics_ptr + M + m, mask=m < M, other=0.0)[:, None]
            low -= mean
            high -= mean
        rstd = tl.load(statistics_ptr + m, mask=m < M, other=0.0)[:, None]
        low *= rstd
        high *= rstd
        if gain != "none":
            weight_low, weight_high = split(weight)
            if gain == "one_plus":
                weight_low += 1
                weight_high += 1
            low *= weight_low
            high *= weight_high
        if has_bias:
            bias_low, bias_high = split(bias)
            low += bias_low
            high += bias_high
        if not is_even:
            low = tl.where(mask, low, 0.0)
            high = tl.where(mask, high, 0.0)
        return low, high

    @triton.jit
    def norm_fwd_fp8_pairs_kernel(
        x_ptr,
        term_ptr,
        total_ptr,
        source_ptr,
        weight_ptr,
        bias_ptr,
        row_ptr,
        column_ptr,
        statistics_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        M,
        D,
        half_D,
        quarter_M,
        rows,
        eps,
        term_scale,
        adds: tl.constexpr,
        is_layer: tl.constexpr,
        gain: tl.constexpr,
        has_bias: tl.constexpr,
        has_columns: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        is_even: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
    ):
        """`source_ptr`: what is normed, as int32 [M, D / 2]; weight and bias as int32 [D / 2], rows as int16
        [M, D / 2], columns as int32 [D, M / 4]: as fp8_cast/triton.py does, see its note "Pairs". `rows`: four, which
        the compiler must not know."""
        statistics_of_rows(
            x_ptr,
            term_ptr,
            total_ptr,
            statistics_ptr,
            tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m),
            M,
            D,
            eps,
            term_scale,
            adds,
            is_layer,
            b_m,
            b_d,
        )
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0:
            tl.store(scale_copy_ptr, scale)
        inverse = inverse_of(scale)
        # rows 4 i + j of the tile
        i = tl.arange(0, b_m // 4)
        m = tl.program_id(0) * b_m + 4 * i
        begin = tl.program_id(0).to(tl.int64) * b_m * half_D
        source_ptr += begin
        row_ptr += begin
        column_ptr += tl.program_id(0) * (b_m // 4)
        in_rows = (m < M)[:, None]
        bits = tl.zeros([b_m // 4, b_d // 2], dtype=tl.int32)
        # what this program wrote is read again, by whichever of its threads
        tl.debug_barrier()
        for first in range(0, half_D, b_d // 2):
            # features 2 c and 2 c + 1
            c = first + tl.arange(0, b_d // 2)
            mask = in_rows & (c < half_D)[None, :]
            at = i[:, None] * (4 * half_D) + c[None, :]
            weight = bits
            if gain != "none":
                weight = tl.load(weight_ptr + c, mask=c < half_D, other=0)[None, :]
            bias = bits
            if has_bias:
                bias = tl.load(bias_ptr + c, mask=c < half_D, other=0)[None, :]
            a_0, b_0 = normed_pairs(
                source_ptr, at, mask, statistics_ptr, m, M, weight, bias, is_layer, gain, has_bias, is_even
            )
            a_1, b_1 = normed_pairs(
                source_ptr, at + half_D, mask, statistics_ptr, m + 1, M, weight, bias, is_layer, gain, has_bias, is_even
            )
            at_2 = at + 2 * half_D
            a_2, b_2 = normed_pairs(
                source_ptr, at_2, mask, statistics_ptr, m + 2, M, weight, bias, is_layer, gain, has_bias, is_even
            )
            at_3 = at + 3 * half_D
            a_3, b_3 = normed_pairs(
                source_ptr, at_3, mask, statistics_ptr, m + 3, M, weight, bias, is_layer, gain, has_bias, is_even
            )
            bits = top_of_four_rows(bits, a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3)
            q_0, q_1, q_2, q_3 = four_in_fp8(
                a_0, b_0, a_1, b_1, a_2, b_2, a_3, b_3, inverse, largest, mantissa, least_exponent, interpreted
            )
            store_four_rows(row_ptr, at, half_D, q_0, q_1, q_2, q_3, mask, is_even)
            if has_columns:
                one, other = columns_of_rows(q_0, q_1, q_2, q_3, interpreted)
                down = c.to(tl.int64)[None, :] * (2 * quarter_M) + i[:, None]
                store_two_columns(column_ptr, down, quarter_M, one, other, mask, is_even)
        top = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
        count = 0
        if not (top * inverse <= largest):
            # rare: computed again rather than kept
            size = bits.to(tl.float32) * 0.0
            over = bits * 0
            for first in range(0, half_D, b_d // 2):
                c = first + tl.arange(0, b_d // 2)
                mask = in_rows & (c < half_D)[None, :]
                at = i[:, None] * (4 * half_D) + c[None, :]
                weight = over
                if gain != "none":
                    weight = tl.load(weight_ptr + c, mask=c < half_D, other=0)[None, :]
                bias = over
                if has_bias:
                    bias = tl.load(bias_ptr + c, mask=c < half_D, other=0)[None, :]
                for j in range(rows):
                    at_j = at + j * half_D
                    low, high = normed_pairs(
                        source_ptr,
                        at_j,
                        mask,
                        statistics_ptr,
                        m + j,
                        M,
                        weight,
                        bias,
                        is_layer,
                        gain,
                        has_bias,
                        is_even,
                    )
                    size, over = recounted(size, over, low, high, inverse, largest)
            top = tl.max(tl.max(size, axis=1), axis=0)
            count = tl.sum(tl.sum(over, axis=1), axis=0)
        record(seen_ptr, saturated_ptr, top, count, has_seen)

    @triton.jit
    def norm_fwd_fp8_kernel(
        x_ptr,
        term_ptr,
        weight_ptr,
        bias_ptr,
        total_ptr,
        row_ptr,
        column_ptr,
        statistics_ptr,
        scale_ptr,
        scale_copy_ptr,
        seen_ptr,
        saturated_ptr,
        M,
        D,
        eps,
        term_scale,
        adds: tl.constexpr,
        is_layer: tl.constexpr,
        gain: tl.constexpr,
        has_bias: tl.constexpr,
        has_columns: tl.constexpr,
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
    ):
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        in_rows = m < M
        mean, rstd = statistics_of_rows(
            x_ptr, term_ptr, total_ptr, statistics_ptr, m, M, D, eps, term_scale, adds, is_layer, b_m, b_d
        )
        scale = tl.load(scale_ptr)
        if tl.program_id(0) == 0:
            tl.store(scale_copy_ptr, scale)
        inverse = inverse_of(scale)
        seen = tl.zeros([b_m, b_d], dtype=tl.float32)
        over = tl.zeros([b_m, b_d], dtype=tl.int32)
        # the sums that this program wrote are read again, by whichever of its threads
        tl.debug_barrier()
        source_ptr = x_ptr
        if adds:
            source_ptr = total_ptr
        for first in range(0, D, b_d):
            d = first + tl.arange(0, b_d)
            at = m[:, None] * D + d[None, :]
            mask = in_rows[:, None] & (d < D)[None, :]
            x = tl.load(source_ptr + at, mask=mask, other=0.0).to(tl.float32)
            y = (x - mean[:, None]) * rstd[:, None]
            if gain != "none":
                weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
                if gain == "one_plus":
                    weight += 1
                y *= weight[None, :]
            if has_bias:
                y += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            q, size, is_over = in_fp8(tl.where(mask, y, 0.0), inverse, largest, mantissa, least_exponent)
            seen = tl.maximum(seen, size)
            over += is_over.to(tl.int32)
            tl.store(row_ptr + at, q, mask=mask)
            if has_columns:
                # to transposed addresses
                tl.store(column_ptr + d.to(tl.int64)[None, :] * M + m[:, None], q, mask=mask)
        record(
            seen_ptr,
            saturated_ptr,
            tl.max(tl.max(seen, axis=1), axis=0),
            tl.sum(tl.sum(over, axis=1), axis=0),
            has_seen,
        )


class Tile(NamedTuple):
    """What one program takes at a time."""

    rows: int
    features: int
    warps: int


def tile_of(D: int, *, least: int) -> Tile:
    """Rows of D features, of at least so many in all."""
    assert D <= WIDEST, f"norms of {D} features, one program takes {WIDEST}: kernels.norm=reference takes any"
    features = next_power_of_2(D)
    rows = max(1, least // features)
    return Tile(rows, features, min(16, max(1, rows * features // FEATURES_OF_A_WARP)))


FP8_TILE = Tile(rows=32, features=256, warps=8)
"""Of the kernel that writes fp8: it goes along its rows twice. Of each column it writes as many bytes as rows."""
FP8_ROWS_TILE = Tile(rows=4, features=1024, warps=4)
"""The same without columns: so few rows that the second time they are in the cache still."""


@cache
def _processors(device: torch.device) -> int:
    """SMs of a GPU. A CPU, in the interpreter, has three programs all the same, whose sums are added."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@operation("megaspec::norm_forward")
def norm_forward(
    x: Tensor,
    term: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """[..., D] -> x + scale · term, empty without a term; that, or x, normed; statistics of its rows in fp32, [S, M]:
    1 / std, and the mean where it is taken off."""
    assert x.dtype != torch.float64, "the kernel computes in fp32"
    x = x.contiguous()
    total, y, statistics = _forward_results(x, term, code)
    form = decoded(code)
    M = statistics.shape[1]
    D = x.shape[-1]
    if x.numel() == 0:
        return total, y, statistics
    tile = tile_of(D, least=FEATURES)
    norm_fwd_kernel[(ceil_div(M, tile.rows),)](
        x,
        # of what there isn't nothing is read: any address serves
        x if term is None else term.contiguous(),
        x if weight is None else weight,
        x if bias is None else bias,
        total,
        y,
        statistics,
        M,
        D,
        form.eps,
        form.scale,
        term is not None,
        form.kind == "layer",
        form.gain,
        bias is not None,
        tile.rows,
        tile.features,
        num_warps=tile.warps,
    )
    return total, y, statistics


@fake_of(norm_forward)
def _(
    x: Tensor,
    term: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    code: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_results(x, term, code)


def _forward_results(x: Tensor, term: Tensor | None, code: str) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of norm_forward's results."""
    total = x.new_empty(0)
    if term is not None:
        total = x.new_empty(x.shape)
    rows = x.numel() // max(1, x.shape[-1])
    return total, x.new_empty(x.shape), x.new_empty(_n_statistics(code), rows, dtype=torch.float32)


def _n_statistics(code: str) -> int:
    return 2 if decoded(code).kind == "layer" else 1


@operation("megaspec::norm_backward")
def norm_backward(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    code: str,
    has_term: bool,
    vectors: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the normed rows -> that of x, `grad_stream` added; that of a term, empty where it is the same; those
    of the first so many `vectors` of weight and bias, [W, D]. `has_term`: x was a sum."""
    grad = grad.contiguous()
    form = decoded(code)
    grad_x, grad_term, grad_vectors = _backward_results(x, code, has_term, vectors)
    D = x.shape[-1]
    M = statistics.shape[1]
    if x.numel() == 0:
        return grad_x, grad_term, grad_vectors.zero_()
    tile = tile_of(D, least=FEATURES)
    programs = min(ceil_div(M, tile.rows), PROGRAMS * _processors(x.device))
    partial = torch.empty(vectors, programs, D, dtype=torch.float32, device=x.device)
    norm_bwd_kernel[(programs,)](
        grad,
        grad if grad_stream is None else grad_stream.contiguous(),
        x.contiguous(),
        x if weight is None else weight,
        statistics,
        grad_x,
        grad_term,
        partial,
        M,
        D,
        form.scale,
        grad_stream is not None,
        has_term and form.scale != 1.0,
        form.kind == "layer",
        form.gain,
        vectors > 0,
        vectors > 1,
        tile.rows,
        tile.features,
        STAGES,
        num_warps=tile.warps,
    )
    if vectors:
        norm_sums_kernel[(ceil_div(D, SUMS_FEATURES), vectors)](
            partial, grad_vectors, programs, D, SUMS_ROWS, SUMS_FEATURES, num_warps=4
        )
    return grad_x, grad_term, grad_vectors


@fake_of(norm_backward)
def _(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    code: str,
    has_term: bool,
    vectors: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_results(x, code, has_term, vectors)


def _backward_results(x: Tensor, code: str, has_term: bool, vectors: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of norm_backward's results."""
    grad_term = x.new_empty(0)
    if has_term and decoded(code).scale != 1.0:
        grad_term = x.new_empty(x.shape)
    return x.new_empty(x.shape), grad_term, x.new_empty(vectors, x.shape[-1])


class NormInFp8(NamedTuple):
    """What norm_forward makes, with the normed rows in fp8."""

    total: Tensor
    written: Written
    statistics: Tensor


def norm_forward_in_fp8(
    x: Tensor,
    term: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    code: str,
    *,
    known: Known,
    columns: bool = True,
) -> NormInFp8:
    """`norm_forward`, whose normed rows are written in fp8 alone, by a scale that is known. `columns`: in both layouts,
    else in rows."""
    assert x.dtype != torch.float64, "the kernel computes in fp32"
    form = decoded(code)
    x = x.contiguous()
    D = x.shape[-1]
    M = x.numel() // D
    # of norm_forward's results, without the rows in the format of x
    adds = term is not None
    total = x.new_empty(0)
    if adds:
        total = x.new_empty(x.shape)
    statistics = x.new_empty(_n_statistics(code), M, dtype=torch.float32)
    written = empty_pair(x, M, D, known.dtype, columns=columns)
    tile = FP8_TILE if columns else FP8_ROWS_TILE
    while tile.rows > 16 and ceil_div(M, tile.rows) < _processors(x.device):
        tile = tile._replace(rows=tile.rows // 2)
    features = min(tile.features, next_power_of_2(D))
    # of what there isn't nothing is read: any address serves
    term = x if term is None else term.contiguous()
    weight = x if weight is None else weight
    has_bias = bias is not None
    bias = bias if has_bias else x
    recorded = (
        known.scale,
        written.scale,
        known.scale.view(torch.int32) if known.seen is None else known.seen.view(torch.int32),
        known.saturated,
    )
    what = (
        adds,
        form.kind == "layer",
        form.gain,
        has_bias,
        columns,
        known.seen is not None,
        *format_constants(known.dtype),
    )
    # what is not asked for is not written: any address serves
    by_columns = written.columns if columns else written.rows
    source = total if adds else x
    in_pairs = M % 16 == 0 and D % 16 == 0
    for one in (source, weight, bias):
        in_pairs = in_pairs and one.dtype == torch.bfloat16 and one.data_ptr() % 16 == 0
    if in_pairs:
        norm_fwd_fp8_pairs_kernel[(ceil_div(M, tile.rows),)](
            x,
            term,
            total,
            source.view(torch.int32),
            weight.view(torch.int32),
            bias.view(torch.int32),
            written.rows.view(torch.int16),
            by_columns.view(torch.int32),
            statistics,
            *recorded,
            M,
            D,
            D // 2,
            M // 4,
            M // (M // 4),
            form.eps,
            form.scale,
            *what,
            INTERPRETED,
            M % tile.rows == 0 and D % features == 0,
            tile.rows,
            features,
            num_warps=tile.warps,
        )
        return NormInFp8(total, written, statistics)
    norm_fwd_fp8_kernel[(ceil_div(M, tile.rows),)](
        x,
        term,
        weight,
        bias,
        total,
        written.rows.view(torch.uint8),
        by_columns.view(torch.uint8),
        statistics,
        *recorded,
        M,
        D,
        form.eps,
        form.scale,
        *what,
        tile.rows,
        features,
        num_warps=tile.warps,
    )
    return NormInFp8(total, written, statistics)


class NormGradients(NamedTuple):
    x: Tensor
    term: Tensor
    """Empty where it is that of x."""
    weight: Tensor | None
    bias: Tensor | None


def gradients(
    grad: Tensor,
    grad_stream: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    code: str,
    *,
    has_term: bool,
    needs: tuple[bool, bool],
) -> NormGradients:
    """`norm_backward`. `needs`: of weight and bias."""
    # the weight's sum comes first, also where there is a bias alone
    vectors = 0
    if needs[0]:
        vectors = 1
    if needs[1]:
        vectors = 2
    grad_x, grad_term, grad_vectors = norm_backward(grad, grad_stream, x, weight, statistics, code, has_term, vectors)
    return NormGradients(
        grad_x,
        grad_term,
        grad_vectors[0] if needs[0] else None,
        grad_vectors[1] if needs[1] else None,
    )


class NormOp(torch.autograd.Function):
    """A norm of which nobody else takes the input."""

    @staticmethod
    def forward(ctx, x, weight, bias, code):
        _, y, statistics = norm_forward(x, None, weight, bias, code)
        ctx.save_for_backward(x, weight, statistics)
        ctx.code = code
        return y

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:3]
        found = gradients(grad, None, *ctx.saved_tensors, ctx.code, has_term=False, needs=needs)
        return found.x, found.weight, found.bias, None


class NormOfStreamOp(torch.autograd.Function):
    """A norm that hands on its input, so that the gradient that the stream has behind it is added in its own."""

    @staticmethod
    def forward(ctx, x, weight, bias, code):
        _, y, statistics = norm_forward(x, None, weight, bias, code)
        ctx.save_for_backward(x, weight, statistics)
        ctx.code = code
        return x.view_as(x), y

    @staticmethod
    def backward(ctx, grad_stream, grad):
        needs = ctx.needs_input_grad[1:3]
        found = gradients(grad, grad_stream, *ctx.saved_tensors, ctx.code, has_term=False, needs=needs)
        return found.x, found.weight, found.bias, None


class NormOfSumOp(torch.autograd.Function):
    """The sum before a norm, and the norm. `is_scaled`: the term counts otherwise than once."""

    @staticmethod
    def forward(ctx, x, term, weight, bias, code, is_scaled):
        total, y, statistics = norm_forward(x, term, weight, bias, code)
        ctx.save_for_backward(total, weight, statistics)
        ctx.code = code
        ctx.is_scaled = is_scaled
        return total, y

    @staticmethod
    def backward(ctx, grad_stream, grad):
        needs = ctx.needs_input_grad[2:4]
        found = gradients(grad, grad_stream, *ctx.saved_tensors, ctx.code, has_term=True, needs=needs)
        grad_term = found.term if ctx.is_scaled else found.x
        return found.x, grad_term, found.weight, found.bias, None, None


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Tensor:
    """See reference.py."""
    return NormOp.apply(x, weight, bias, form.code)


def norm_of_stream(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """See reference.py."""
    return NormOfStreamOp.apply(x, weight, bias, form.code)


def norm_of_sum(x: Tensor, term: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """See reference.py."""
    return NormOfSumOp.apply(x, term, weight, bias, form.code, form.is_scaled)
