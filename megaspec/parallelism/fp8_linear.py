"""The linear layer whose outputs are split over tensor-parallel ranks, with products in fp8."""

# B sequences, T tokens, I inputs, O outputs, M tokens

import torch

from megaspec.nn.fp8 import Fp8Slots, columns_of, fp8_backward, fp8_backward_of, fp8_forward, slots_of
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
    def backward(ctx, grad_out, written: Fp8Slots | None = None):
        """`written`: the gradient in fp8, see Fp8SlotsColumnLinearOp."""
        kept, kept_scale, weight = ctx.saved_tensors
        fp8 = ctx.fp8
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathers = needs_weight and ctx.sequence
        # as bytes, which every backend moves; beside the input gradient, as in ColumnLinearOp
        gathering = gather_sequence(kept.view(torch.uint8), ctx.group) if gathers else None
        if gathers and not ctx.overlap:
            gathering = wait(gathering)
        if written is None:
            grad_x, grad_OM, grad_scale = fp8_backward(
                grad_out, weight, fp8.ticket, fp8.recipe, fp8.gradient_format, needs_x, needs_weight
            )
        else:
            grad_OM = written.columns
            grad_scale = written.scale
            if needs_x:
                grad_x = fp8_backward_of(written.rows, written.scale, weight, fp8.ticket, ctx.dtype).view(ctx.shape)
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


# what autograd calls of it, without autograd
_forward = Fp8ColumnLinearOp.forward
_backward = Fp8ColumnLinearOp.backward


class Fp8SlotsColumnLinearOp(torch.autograd.Function):
    """Fp8ColumnLinearOp whose output's gradient arrives in fp8, as that of the slots: see nn/fp8.py, note "Producers".
    It has no bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap):
        # no gradient of y is made up where there is none
        ctx.set_materialize_grads(False)
        y = _forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap)
        ctx.dtype = y.dtype
        # of the whole input
        ctx.shape = (*y.shape[:-1], weight.shape[1])
        return y, *slots_of(y, fp8.gradient_format)

    @staticmethod
    def backward(ctx, grad_out, grad_MO, grad_OM, grad_scale):
        # torch.compile traces this with a gradient for each output, whether there is one or not
        if not torch.compiler.is_compiling():
            assert grad_out is None, "the gradient arrives in the slots; y is handed to one producer alone"
        return _backward(ctx, None, Fp8Slots(grad_MO, grad_OM, grad_scale))
