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
from megaspec_kernels.dependent_launch import has_dependent_launch
from megaspec_kernels.fp8_cast import triton as fp8_cast
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.tile import Written, empty_pair, format_constants
from megaspec_kernels.grid import next_power_of_2
from megaspec_kernels.norm.form import Normed, NormForm, decoded
from megaspec_kernels.operation import fake_of, operation

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.dependent_launch import let_next_begin
    from megaspec_kernels.fp8_cast.tile import INTERPRETED, inverse_of, record, rows_in_fp8, top_of_tile
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
    def norm_fwd_fp8_kernel(
        x_ptr,
        term_ptr,
        weight_ptr,
        bias_ptr,
        total_ptr,
        row_ptr,
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
        has_seen: tl.constexpr,
        largest: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        b_m: tl.constexpr,
        b_d: tl.constexpr,
        overlaps: tl.constexpr,
    ):
        """norm_fwd_kernel, but for what it writes: `row_ptr`, uint8 [M, D]."""
        # which may turn the rows round
        let_next_begin(overlaps)
        m = tl.program_id(0).to(tl.int64) * b_m + tl.arange(0, b_m)
        d = tl.arange(0, b_d)
        mask = (m < M)[:, None] & (d < D)[None, :]
        at = m[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if adds:
            term = tl.load(term_ptr + at, mask=mask, other=0.0).to(tl.float32)
        # ahead of what waits for those loads
        if gain != "none":
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        if has_bias:
            bias = tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr)
        before = tl.load(seen_ptr)
        if adds:
            x += term_scale * term
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
            if gain == "one_plus":
                weight += 1
            y *= weight[None, :]
        if has_bias:
            y += bias[None, :]
        y = tl.where(mask, y, 0.0)
        if tl.program_id(0) == 0:
            tl.store(scale_copy_ptr, scale)
        inverse = inverse_of(scale)
        tl.store(row_ptr + at, rows_in_fp8(y, inverse, largest, mantissa, least_exponent, interpreted), mask=mask)
        top, count = top_of_tile(y, inverse, largest)
        record(seen_ptr, before, saturated_ptr, top, count, has_seen)


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
    else in rows.

    Rows are turned round by a kernel of their own, while they are in the cache: one that writes both layouts takes a
    quarter longer, since it holds tiles of many rows, and so must read each row twice.
    """
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
    written = empty_pair(x, M, D, known.dtype, columns=False)
    tile = tile_of(D, least=FEATURES)
    norm_fwd_fp8_kernel[(ceil_div(M, tile.rows),)](
        x,
        # of what there isn't nothing is read: any address serves
        x if term is None else term.contiguous(),
        x if weight is None else weight,
        x if bias is None else bias,
        total,
        written.rows.view(torch.uint8),
        statistics,
        known.scale,
        written.scale,
        known.scale.view(torch.int32) if known.seen is None else known.seen.view(torch.int32),
        known.saturated,
        M,
        D,
        form.eps,
        form.scale,
        adds,
        form.kind == "layer",
        form.gain,
        bias is not None,
        known.seen is not None,
        *format_constants(known.dtype),
        INTERPRETED,
        tile.rows,
        tile.features,
        has_dependent_launch(),
        num_warps=tile.warps,
    )
    if columns:
        written = written._replace(columns=fp8_cast.columns(written.rows))
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
