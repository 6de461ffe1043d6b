"""The linear layer whose outputs are split over tensor-parallel ranks, with products in fp8."""

# B sequences, T tokens, I inputs, O outputs, M tokens

import torch

from megaspec.nn.fp8 import columns_of, fp8_backward, fp8_forward
from megaspec.nn.linear import Fp8Factors, bias_gradient, fp8_weight_gradient_into
from megaspec.parallelism.collectives import (
    all_reduce,
    gather_sequence,
    reduce_scatter_sequence,
    wait,
    wait_sequence,
)


class Fp8ColumnLinearOp(torch.autograd.Function):
    """ColumnLinearOp with products in fp8.

    The input is gathered before it is quantised, so that its scales are those of the whole one on every rank without
    asking the others. What is kept and gathered again is fp8, half the bytes.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap):
        part = 0
        parts = 1
        if sequence:
            x = wait_sequence(gather_sequence(x, group))
            part = group.rank()
            parts = group.size()
        y, kept, kept_scale = fp8_forward(x, weight, fp8.ticket, fp8.recipe, weight.requires_grad, part, parts)
        ctx.save_for_backward(kept, kept_scale, weight)
        ctx.main_grad = main_grad
        ctx.fp8 = fp8
        ctx.group = group
        ctx.sequence = sequence
        ctx.overlap = overlap
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad_out):
        kept, kept_scale, weight = ctx.saved_tensors
        fp8 = ctx.fp8
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathers = needs_weight and ctx.sequence
        # as bytes, which every backend moves; beside the input gradient, as in ColumnLinearOp
        gathering = gather_sequence(kept.view(torch.uint8), ctx.group) if gathers else None
        if gathers and not ctx.overlap:
            gathering = wait(gathering)
        grad_x, grad_OM, grad_scale = fp8_backward(
            grad_out, weight, fp8.ticket, fp8.recipe, fp8.gradient_format, needs_x, needs_weight
        )
        reducing = None
        if needs_x:
            reduce = reduce_scatter_sequence if ctx.sequence else all_reduce
            reducing = reduce(grad_x, ctx.group)
            if not ctx.overlap:
                reducing = wait(reducing)
        grad_weight = None
        if needs_weight:
            if gathers:
                kept = columns_of(wait_sequence(gathering).view(kept.dtype))
            factors = Fp8Factors(grad_OM, grad_scale, kept, kept_scale)
            grad_weight = fp8_weight_gradient_into(ctx.main_grad, fp8.ticket, factors, weight)
        grad_bias = bias_gradient(grad_out) if needs_bias else None
        grad_x = None
        if needs_x:
            grad_x = wait_sequence(reducing) if ctx.sequence else wait(reducing)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None
