"""Gated activations in one kernel for each direction, of which the input alone is kept."""

# M rows, F features

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.tile import Known, Written, empty_pair, format_constants
from megaspec_kernels.gated.form import GatedForm, decoded

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.tile import in_fp8, inverse_of, record
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Features of a row that one program takes, 16 bytes of each part a thread.
BLOCK = 1024
WARPS = 4

if triton is not None:

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
            share = tl.sigmoid(gate)
            value = gate * share
            slope = share * (1 + gate * (1 - share))
        elif name == "quick_gelu":
            share = tl.sigmoid(1.702 * gate)
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
            share = tl.sigmoid(alpha * low)
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
        interpreted: tl.constexpr,
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
        q, size, over = in_fp8(out, inverse_of(scale), largest, mantissa, least_exponent, interpreted)
        tl.store(row_ptr + m[:, None] * F + f[None, :], q, mask=mask)
        # to transposed addresses: tl.trans has corrupted fp8 tiles
        tl.store(column_ptr + f.to(tl.int64)[None, :] * M + m[:, None], q, mask=mask)
        record(
            seen_ptr,
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
        interpreted: tl.constexpr,
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
        q, size, over = in_fp8(grad * by_gate, inverse, largest, mantissa, least_exponent, interpreted)
        tl.store(row_ptr + at, q, mask=mask)
        tl.store(column_ptr + column, q, mask=mask)
        q, size_up, over_up = in_fp8(grad * by_up, inverse, largest, mantissa, least_exponent, interpreted)
        tl.store(row_ptr + F + at, q, mask=mask)
        tl.store(column_ptr + column + (f * 0 + F).to(tl.int64)[None, :] * M, q, mask=mask)
        record(
            seen_ptr,
            saturated_ptr,
            tl.max(tl.max(tl.maximum(size, size_up), axis=1), axis=0),
            tl.sum(tl.sum(over.to(tl.int32) + over_up.to(tl.int32), axis=1), axis=0),
            has_seen,
        )


def _grid(M: int, F: int) -> tuple[int, int]:
    return M, triton.cdiv(F, BLOCK)


@torch.library.custom_op("megaspec::gated_forward", mutates_args=())
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


@gated_forward.register_fake
def _(gate_up: Tensor, code: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("megaspec::gated_backward", mutates_args=())
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


@gated_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, code: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


class Tile(NamedTuple):
    """Of a kernel that writes fp8: of each column it writes as many bytes as rows."""

    rows: int
    features: int
    warps: int


FORWARD_TILE = Tile(rows=64, features=128, warps=8)
BACKWARD_TILE = Tile(rows=64, features=64, warps=8)


def gated_forward_in_fp8(gate_up: Tensor, code: str, *, known: Known) -> Written:
    """`gated_forward`, written in fp8 alone, by a scale that is known."""
    F = gate_up.shape[-1] // 2
    M = gate_up.numel() // (2 * F)
    written = empty_pair(gate_up, M, F, known.dtype)
    _write(gated_fwd_fp8_kernel, (gate_up,), written, M, F, code, known, FORWARD_TILE)
    return written


def gated_backward_in_fp8(grad: Tensor, gate_up: Tensor, code: str, *, known: Known) -> Written:
    """`gated_backward`, written in fp8 alone, by a scale that is known."""
    F = grad.shape[-1]
    M = grad.numel() // F
    written = empty_pair(gate_up, M, 2 * F, known.dtype)
    _write(gated_bwd_fp8_kernel, (grad, gate_up), written, M, F, code, known, BACKWARD_TILE)
    return written


def _write(
    kernel: Any, inputs: tuple[Tensor, ...], written: Written, M: int, F: int, code: str, known: Known, tile: Tile
) -> None:
    assert inputs[-1].dtype != torch.float64, "the kernel computes in fp32"
    form = decoded(code)
    kernel[(triton.cdiv(M, tile.rows), triton.cdiv(F, tile.features))](
        *(x.contiguous() for x in inputs),
        written.rows.view(torch.uint8),
        written.columns.view(torch.uint8),
        known.scale,
        written.scale,
        # where nothing is recorded nothing is written: any address serves
        known.scale.view(torch.int32) if known.seen is None else known.seen.view(torch.int32),
        known.saturated,
        M,
        F,
        form.limit,
        form.alpha,
        form.activation,
        form.has_limit,
        known.seen is not None,
        *format_constants(known.dtype),
        tile.rows,
        tile.features,
        num_warps=tile.warps,
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
