"""Output head and loss in big pieces: each piece's logits become its gradient in place and are then dropped."""

# M tokens, D model, V rows of the weight on this rank, C tokens of a piece

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.catalog import logits_piece
from megaspec_kernels.cross_entropy.reference import PLAIN_LOGITS, LogitForm, VocabShard, WeightSum
from megaspec_kernels.product import add_product_

Stats = Callable[[Tensor, Tensor, VocabShard, LogitForm], tuple[Tensor, Tensor, Tensor]]
"""(product_CV, labels_C, shard, form) -> this rank's peak, Σ exp(logit − peak) and label's logit (0 where it is not
here), of logits that the form makes of the product"""
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, VocabShard, LogitForm], Tensor]
"""(product_CV, labels_C, top_C, total_C, weights_C, shard, form) -> d loss / d product [C, V], zero in padding; may
reuse it"""


def local_stats(
    product_CV: Tensor, labels_C: Tensor, shard: VocabShard, form: LogitForm
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Stats`."""
    wide = product_CV[:, : shard.valid].to(torch.promote_types(product_CV.dtype, torch.float32))
    wide = form.shaped(wide)
    if shard.valid == 0:
        zero = wide.new_zeros(len(labels_C))
        return torch.full_like(zero, torch.finfo(wide.dtype).min), zero, zero
    peak_C = wide.amax(dim=1)
    total_C = (wide - peak_C[:, None]).exp_().sum(dim=1)
    here = (labels_C >= shard.first) & (labels_C < shard.first + shard.valid)
    column = (labels_C - shard.first).clamp(0, shard.valid - 1)
    return peak_C, total_C, wide.gather(1, column[:, None])[:, 0] * here


def local_gradient(
    product_CV: Tensor,
    labels_C: Tensor,
    top_C: Tensor,
    total_C: Tensor,
    weights_C: Tensor,
    shard: VocabShard,
    form: LogitForm,
) -> Tensor:
    """See `Gradient`."""
    wide = torch.promote_types(product_CV.dtype, torch.float32)
    factor_C1 = (weights_C / total_C)[:, None]
    # logits that are needed again for their slope have a name; plain ones are gone once the gradient is made of them
    if form == PLAIN_LOGITS:
        grad_CV = (product_CV.to(wide) - top_C[:, None]).exp_().mul_(factor_C1)
    else:
        logits_CV = form.shaped(product_CV.to(wide))
        grad_CV = (logits_CV - top_C[:, None]).exp_().mul_(factor_C1)
    grad_CV[:, shard.valid :] = 0
    here = (labels_C >= shard.first) & (labels_C < shard.first + shard.valid)
    column = (labels_C - shard.first).clamp(0, product_CV.shape[1] - 1)
    # one element a row, so that indexing serves; scatter_add has no deterministic form on CUDA
    grad_CV[torch.arange(len(column), device=column.device), column] -= torch.where(here, weights_C, 0)
    if form != PLAIN_LOGITS:
        grad_CV *= form.slope(logits_CV)
        # what padding holds may be anything, infinite slopes too
        grad_CV[:, shard.valid :] = 0
    return grad_CV.to(product_CV.dtype)


def _add_piece(grad_VC: Tensor, x_CD: Tensor, into: Tensor, overwrite: bool) -> None:
    """The weight's gradient of a piece, into its sum."""
    add_product_(into, grad_VC, x_CD, overwrite=overwrite)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss and the gradients that are needed in one pass over the tokens; backward only scales them.

    With a `weight_sum` the weight's is added to it here. Then backward can't scale it, and takes a gradient of 1 alone.
    """

    @staticmethod
    def forward(
        ctx, x_MD, weight_VD, bias_V, labels_M, weights_M, shard, form, weight_sum, stats: Stats, gradient: Gradient
    ):
        M = x_MD.shape[0]
        piece = logits_piece(M, weight_VD.shape[0] * x_MD.element_size())
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        loss = weights_M.new_zeros(())
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.weight_sum = weight_sum if needs_weight else None
        makes_weight = needs_weight and weight_sum is None
        grad_x_MD = torch.empty_like(x_MD) if needs_x else None
        grad_weight_VD = torch.empty_like(weight_VD, dtype=wide) if makes_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias else None
        for first in range(0, M, piece):
            part = slice(first, first + piece)
            product_CV = F.linear(x_MD[part], weight_VD, bias_V)
            peak_C, total_C, target_C = stats(product_CV, labels_M[part], shard, form)
            # over all ranks of the vocabulary: the largest logit, and Σ exp(logit − top)
            top_C = shard.max(peak_C)
            total_C = shard.sum(total_C * (peak_C - top_C).exp())
            # log Σ exp − target without the digits that top + log Σ would lose to a large top
            loss += (weights_M[part] * (total_C.log() + (top_C - shard.sum(target_C)))).sum()
            if not any(ctx.needs_input_grad):
                continue
            grad_CV = gradient(product_CV, labels_M[part], top_C, total_C, weights_M[part], shard, form)
            if needs_x:
                torch.mm(grad_CV, weight_VD, out=grad_x_MD[part])
            if makes_weight:
                add_product_(grad_weight_VD, grad_CV.t(), x_MD[part], overwrite=first == 0)
            elif needs_weight:
                weight_sum.add(partial(_add_piece, grad_CV.t(), x_MD[part]))
            if needs_bias:
                grad_bias_V += grad_CV.sum(0, dtype=wide)
        if makes_weight:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        if needs_bias:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        ctx.save_for_backward(grad_x_MD, grad_weight_VD, grad_bias_V)
        return loss

    @staticmethod
    def backward(ctx, grad_out):
        if ctx.weight_sum is not None:
            # on a GPU the device looks, and no one waits
            torch._assert_async(grad_out == 1, "the gradient of a loss whose weight_sum has its own already is not 1")
            ctx.weight_sum.arrived()
            found = ctx.saved_tensors
        else:
            found = []
            for grad in ctx.saved_tensors:
                found.append(None if grad is None else grad * grad_out.to(grad.dtype))
        # of x, weight and bias; nothing for labels, weights, shard, form, the sum and the two functions
        return *found, None, None, None, None, None, None, None


def without_needless_gradients(*inputs: Tensor | None) -> list[Tensor | None]:
    """The inputs as they are, or within torch.no_grad detached: an autograd.Function is told there, too, that a
    parameter needs a gradient, and ChunkedCrossEntropy makes it in its forward pass."""
    if torch.is_grad_enabled():
        return list(inputs)
    detached = []
    for one in inputs:
        if one is not None:
            one = one.detach()
        detached.append(one)
    return detached


def linear_cross_entropy(
    x_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    shard: VocabShard,
    *,
    bias_V: Tensor | None = None,
    form: LogitForm = PLAIN_LOGITS,
    weight_sum: WeightSum | None = None,
) -> Tensor:
    """See reference.py; logits of two pieces live at a time (catalog.logits_piece). `weight_sum`: takes the gradient of
    the weight, which autograd has none of then."""
    return ChunkedCrossEntropy.apply(
        *without_needless_gradients(x_MD, weight_VD, bias_V),
        labels_M,
        weights_M,
        shard,
        form,
        weight_sum,
        local_stats,
        local_gradient,
    )
