"""What lies around experts' products and writes what these multiply in fp8 itself: see nn/fp8.py, note "Producers".

Rows of tokens on the way to experts, and rows of gradients on the way back, are gathered and quantised in one pass; the
gate between both products writes what the second one takes, and the gradient of the first one. Each writes both
layouts, in columns with the padding of groups. A scale that is not known before (tensorwise, and the first step of
delayed scales) is found in a pass before the cast, within the same operation.
"""

# M tokens, R rows: tokens sorted by expert, D model, I features before the gate and F behind it, P rows with padding

import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Input, Fp8Slots, carrier_of, layer_of
from megaspec.nn.linear import Linear
from megaspec.nn.moe.activation import WeightedActivation
from megaspec.nn.moe.rows import Rows, to_tokens
from megaspec_kernels.fp8_cast.groups import Groups


class PermuteIntoFp8Op(torch.autograd.Function):
    """The token of each row, in fp8."""

    @staticmethod
    def forward(ctx, x_MD, rows, token_R, groups, ticket):
        # see nn/fp8_producers.py, note "Gradients that are none"; the carrier always has one
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        pair = layer_of(ticket).quantise_rows(x_MD, "input", groups, index_R=token_R, is_full=rows.filled is None)
        written = (pair.rows.values, pair.columns.values, pair.rows.scale)
        ctx.mark_non_differentiable(*written)
        return carrier_of(x_MD, groups.rows, x_MD.shape[1]), *written

    @staticmethod
    def backward(ctx, grad_RD, *_):
        return to_tokens(grad_RD, ctx.rows), None, None, None, None


def permuted(x_MD: Tensor, rows: Rows, token_R: Tensor, groups: Groups, *, into: Linear) -> Fp8Input:
    """[M, D] -> what the layer takes: [R, D], the token of each row, `rows.token`."""
    return Fp8Input(*PermuteIntoFp8Op.apply(x_MD, rows, token_R, groups, into.fp8.ticket))


class UnpermuteBehindFp8Op(torch.autograd.Function):
    """The sum of each token's rows, whose gradient is gathered in fp8 for the layer that made the rows."""

    @staticmethod
    def forward(ctx, y_RD, slot_rows, slot_columns, slot_scale, rows, token_R, groups, ticket):
        ctx.token_R = token_R
        ctx.is_full = rows.filled is None
        ctx.groups = groups
        ctx.ticket = ticket
        return to_tokens(y_RD, rows)

    @staticmethod
    def backward(ctx, grad_MD):
        pair = layer_of(ctx.ticket).quantise_rows(
            grad_MD, "gradient", ctx.groups, index_R=ctx.token_R, is_full=ctx.is_full
        )
        return None, pair.rows.values, pair.columns.values, pair.rows.scale, None, None, None, None


def unpermuted(y_RD: Tensor, slots: Fp8Slots, rows: Rows, token_R: Tensor, groups: Groups, *, behind: Linear) -> Tensor:
    """[R, D] -> [M, D]. `slots`: of the layer that this stands behind, with `y_RD` its output."""
    return UnpermuteBehindFp8Op.apply(y_RD, *slots, rows, token_R, groups, behind.fp8.ticket)


class GateBetweenFp8Op(torch.autograd.Function):
    """weight · gated(x) between two layers, whose gradient for the one before is written in fp8, too."""

    @staticmethod
    def forward(ctx, into_RI, slot_rows, slot_columns, slot_scale, weights_R, groups, activation, before, behind):
        # see nn/fp8_producers.py, note "Gradients that are none"; the carrier always has one
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(into_RI, weights_R)
        ctx.groups = groups
        ctx.activation = activation
        ctx.before = before
        ctx.has_slots = slot_rows is not None
        layer = layer_of(behind)
        known = layer.known("input")
        if known is None:
            pair = layer.quantise_rows(activation.forward(into_RI, weights_R), "input", groups)
            written = (pair.rows.values, pair.columns.values, pair.rows.scale)
        else:
            written = activation.writer.forward_in_fp8(into_RI, weights_R, groups, known=known)
        rows, columns, scale = written
        ctx.mark_non_differentiable(rows, columns, scale)
        return carrier_of(into_RI, *rows.shape), rows, columns, scale

    @staticmethod
    def backward(ctx, grad_RF, *_):
        into_RI, weights_R = ctx.saved_tensors
        layer = layer_of(ctx.before)
        known = layer.known("gradient")
        none = (None, None, None, None)
        if not ctx.has_slots:
            grad_into, grad_weights = ctx.activation.gradients(grad_RF, into_RI, weights_R)
            return grad_into, None, None, None, grad_weights, *none
        if known is None:
            grad_into, grad_weights = ctx.activation.gradients(grad_RF, into_RI, weights_R)
            pair = layer.quantise_rows(grad_into, "gradient", ctx.groups)
            return None, pair.rows.values, pair.columns.values, pair.rows.scale, grad_weights, *none
        written, grad_weights = ctx.activation.writer.gradients_in_fp8(
            grad_RF, into_RI, weights_R, ctx.groups, known=known
        )
        return None, *written, grad_weights, *none


def gated(
    into_RI: Tensor,
    slots: Fp8Slots | None,
    weights_R: Tensor,
    groups: Groups,
    *,
    activation: WeightedActivation,
    before: Linear,
    behind: Linear,
) -> Fp8Input:
    """What the layer `behind` takes, [R, I] -> [R, F]. `slots`: of the layer `before`, with `into_RI` its output; None:
    its gradient is made in the model's format."""
    no_slots = (None, None, None)
    made = GateBetweenFp8Op.apply(
        into_RI,
        *(no_slots if slots is None else slots),
        weights_R,
        groups,
        activation,
        before.fp8.ticket,
        behind.fp8.ticket,
    )
    return Fp8Input(*made)
