"""The linear layers that are split over tensor-parallel ranks, with products in fp8."""

# B sequences, T tokens, I inputs, O outputs, M tokens

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.nn.fp8 import (
    Fp8Input,
    Fp8Slots,
    Fp8Use,
    columns_of_tokens,
    fp8_backward,
    fp8_backward_of,
    fp8_columns,
    fp8_forward,
    fp8_forward_of,
    fp8_tokens,
    fp8_tokens_for_columns,
    slots_of,
)
from megaspec.nn.fp8_layouts import has_one_scale
from megaspec.nn.linear import Fp8Factors, bias_gradient, forward_of_given, fp8_weight_gradient_into
from megaspec.parallelism.collectives import (
    all_reduce,
    gather_sequence,
    reduce_scatter_sequence,
    wait,
    wait_sequence,
)


class _GatheredRows(NamedTuple):
    """All tokens of a matrix whose ranks each quantised their own."""

    values_BTK: Tensor
    scale: Tensor
    """[1, 1], or of each token [M, 1]"""

    @property
    def in_rows(self) -> Tensor:
        """[M, K]"""
        # as bytes: they are moved, not computed with
        return self.values_BTK.view(torch.uint8).flatten(0, -2).view(self.values_BTK.dtype)


def _gathered(values_BTK: Tensor, scale: Tensor, group: dist.ProcessGroup) -> _GatheredRows:
    """A rank's tokens, and the scale of the whole or of each of its tokens [B, T, 1], to all ranks' tokens."""
    # as bytes, which every backend moves
    gathering = gather_sequence(values_BTK.view(torch.uint8), group)
    if scale.dim() == 3:
        scale = wait_sequence(gather_sequence(scale, group)).flatten(0, -2)
    return _GatheredRows(wait_sequence(gathering).view(values_BTK.dtype), scale)


class Fp8ColumnLinearOp(torch.autograd.Function):
    """ColumnLinearOp with products in fp8.

    With sequence parallelism a rank quantises its tokens, and bytes are gathered: see nn/fp8.py, note "Tokens". A
    recipe that can't do so gathers first and quantises the whole. What is kept and gathered again is fp8 in any case.

    `given`: the input, of this rank's tokens, arrives in fp8, and x stands for it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap, given):
        ctx.main_grad = main_grad
        ctx.fp8 = fp8
        ctx.group = group
        ctx.sequence = sequence
        ctx.overlap = overlap
        if sequence and fp8.gathers_bytes:
            y, kept, kept_scale = _forward_of_tokens(x, given, weight, fp8, group)
        elif given is not None:
            assert not sequence, "what is gathered in the model's format does not arrive in fp8"
            y, kept, kept_scale = forward_of_given(given, weight, fp8)
        else:
            part = 0
            parts = 1
            if sequence:
                x = wait_sequence(gather_sequence(x, group))
                part = group.rank()
                parts = group.size()
            y, kept, kept_scale = fp8_forward(x, weight, fp8.ticket, fp8.recipe, weight.requires_grad, part, parts)
        ctx.save_for_backward(kept, kept_scale, weight)
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
                kept = columns_of_tokens(wait_sequence(gathering).view(kept.dtype), fp8, weight.shape[1])
            factors = Fp8Factors(grad_OM, grad_scale, kept, kept_scale)
            grad_weight = fp8_weight_gradient_into(ctx.main_grad, fp8.ticket, factors, weight)
        grad_bias = bias_gradient(grad_out) if needs_bias else None
        grad_x = None
        if needs_x:
            grad_x = wait_sequence(reducing) if ctx.sequence else wait(reducing)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


def _forward_of_tokens(
    x: Tensor, given: Fp8Input | None, weight: Tensor, fp8: Fp8Use, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y of all tokens, and of this rank's tokens what is kept with its scales; of a frozen weight nothing is kept."""
    if given is None:
        values, scale = fp8_tokens(x, fp8.ticket, fp8.recipe, fp8.gradient_format, False)
    else:
        values = given.rows.view(x.shape)
        scale = given.scale
    whole = _gathered(values, scale, group)
    y_MO = fp8_forward_of(whole.in_rows, whole.scale, weight, fp8.ticket, x.dtype)
    y = y_MO.view(*whole.values_BTK.shape[:-1], weight.shape[0])
    if not weight.requires_grad:
        return y, None, None
    if has_one_scale(fp8.recipe):
        return y, values, scale
    return y, *fp8_tokens_for_columns(x, fp8.ticket)


class Fp8ScatterOp(torch.autograd.Function):
    """What `scatter_forward` does of a product's output, with its gradient quantised before it is gathered: it arrives
    in the product's slots, see nn/fp8.py, notes "Tokens" and "Producers"."""

    @staticmethod
    def forward(ctx, y, slot_rows, slot_columns, slot_scale, fp8, group, needs_columns):
        ctx.fp8 = fp8
        ctx.group = group
        ctx.needs_columns = needs_columns
        return wait_sequence(reduce_scatter_sequence(y, group))

    @staticmethod
    def backward(ctx, grad):
        fp8 = ctx.fp8
        values, scale = fp8_tokens(grad, fp8.ticket, fp8.recipe, fp8.gradient_format, True)
        whole = _gathered(values, scale, ctx.group)
        columns = None
        if ctx.needs_columns:
            columns = fp8_columns(whole.values_BTK, fp8.ticket)
        return None, whole.in_rows, columns, scale, None, None, None


def fp8_scatter_forward(y: Tensor, slots: Fp8Slots, *, fp8: Fp8Use, group: dist.ProcessGroup, trains: bool) -> Tensor:
    """Forward: sum, each rank keeps its part of the sequence. Backward: gather the sequence, in fp8. `trains`: the
    product's weight has a gradient."""
    return Fp8ScatterOp.apply(y, *slots, fp8, group, trains)


# what autograd calls of it, without autograd
_forward = Fp8ColumnLinearOp.forward
_backward = Fp8ColumnLinearOp.backward


class Fp8SlotsColumnLinearOp(torch.autograd.Function):
    """Fp8ColumnLinearOp whose output's gradient arrives in fp8, as that of the slots: see nn/fp8.py, note "Producers".
    It has no bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap, given):
        # no gradient of y is made up where there is none
        ctx.set_materialize_grads(False)
        y = _forward(ctx, x, weight, bias, main_grad, fp8, group, sequence, overlap, given)
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
