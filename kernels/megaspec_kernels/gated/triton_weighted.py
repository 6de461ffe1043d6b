"""Gated activations of experts times the weight of each row, in one kernel for each direction; inputs alone are kept.

The compiler's kernel for the gradients, which puts those of gates and of the rest beside each other, moves 0.6 of the
4.2 TB/s of an H200.
"""

# R rows, F features

import torch
from torch import Tensor

from megaspec_kernels.gated.form import GatedForm, decoded

try:
    import triton
    import triton.language as tl

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


def forward(gate_up_RF: Tensor, weights_R: Tensor, *, form: GatedForm) -> Tensor:
    """[R, 2 F], [R] -> weight · gated, [R, F], computed in fp32 and rounded once."""
    R, width = gate_up_RF.shape
    F = width // 2
    out = gate_up_RF.new_empty(R, F)
    if out.numel() and not out.is_meta:
        said = decoded(form.code)
        weighted_fwd_kernel[(R, triton.cdiv(F, BLOCK))](
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
