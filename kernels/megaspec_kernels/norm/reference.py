"""Norms of rows in plain PyTorch: RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), computed in at
least fp32, alone or with the residual stream around them."""

# D features of a row

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.norm.form import Normed, NormForm


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Tensor:
    """[..., D] -> [..., D]"""
    if form.kind == "layer":
        return layer_norm(x, weight, bias, form=form)
    return rms_norm(x, weight, form=form)


def rms_norm(x: Tensor, weight: Tensor | None, *, form: NormForm, mean_square: Tensor | None = None) -> Tensor:
    """x / rms(x) · g. `mean_square`, [..., 1]: of the whole row, where `x` is a part of it; None: x is all of it."""
    # through a view, so that the gradient of x is summed up in one order, computed again or not
    wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
    if mean_square is None:
        mean_square = wide.square().mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square + form.eps)
    if form.gain == "none":
        return normed.to(x.dtype)
    if form.gain == "one_plus":
        # as a sum in the wider format: 1 + weight has too few bits in bf16
        return (normed + normed * weight).to(x.dtype)
    return (normed * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Tensor:
    """(x - mean) / std · g + b"""
    if form.gain != "one_plus":
        # one kernel, which computes in fp32 what is narrower
        return F.layer_norm(x, x.shape[-1:], weight, bias, form.eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = F.layer_norm(wide, x.shape[-1:], eps=form.eps)
    # as a sum, as in rms_norm
    scaled = normed + normed * weight
    if bias is not None:
        scaled = scaled + bias
    return scaled.to(x.dtype)


def norm_of_stream(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """-> the stream as it is, and normed. Both are used, so that gradients of both come together here."""
    return x, norm(x, weight, bias, form=form)


def norm_of_sum(x: Tensor, term: Tensor, weight: Tensor | None, bias: Tensor | None, *, form: NormForm) -> Normed:
    """-> x + scale · term, and normed."""
    total = add(x, term, scale=form.scale)
    return total, norm(total, weight, bias, form=form)


def add(x: Tensor, term: Tensor, *, scale: float = 1.0) -> Tensor:
    """x + scale · term"""
    if scale == 1.0:
        return x + term
    # in one kernel, and rounded once
    return torch.add(x, term, alpha=scale)
