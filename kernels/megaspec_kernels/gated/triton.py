"""Gated activations in one kernel for each direction, of which the input alone is kept."""

# M rows, F features

import torch
from torch import Tensor

from megaspec_kernels.gated.form import GatedForm, decoded

try:
    import triton
    import triton.language as tl
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
