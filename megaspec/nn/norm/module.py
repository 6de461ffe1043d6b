"""Normalisations, computed in at least fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.nn.norm.spec import LayerNormSpec, RmsNormSpec


class Norm(nn.Module):
    """A norm over the last dimension, [..., D] -> [..., D]."""

    recompute_parts = frozenset({"norm"})


class RmsNorm(Norm):
    """x / rms(x) · g (Zhang and Sennrich 2019), with g the weight, 1 plus it, or 1."""

    def __init__(self, d: int, spec: RmsNormSpec):
        super().__init__()
        self.eps = spec.eps
        self.form = spec.weight
        self.weight = None
        if self.form != "none":
            self.weight = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """`mean_square`, [..., 1]: of the whole row, where `x` is a part of it; None: x is all of it."""
        # through a view, so that the gradient of x is summed up in one order, computed again or not
        wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
        if mean_square is None:
            mean_square = wide.square().mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(mean_square + self.eps)
        if self.form == "none":
            return normed.to(x.dtype)
        if self.form == "one_plus":
            # as a sum in the wider format: 1 + weight has too few bits in bf16
            return (normed + normed * self.weight).to(x.dtype)
        return (normed * self.weight).to(x.dtype)


class LayerNorm(Norm):
    """(x - mean) / std · g + b (Ba et al. 2016), with g the weight, 1 plus it, or 1, and b a bias or nothing."""

    def __init__(self, d: int, spec: LayerNormSpec):
        super().__init__()
        self.eps = spec.eps
        self.form = spec.weight
        self.weight = None
        if self.form != "none":
            self.weight = nn.Parameter(torch.empty(d))
        self.bias = None
        if spec.bias:
            self.bias = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor) -> Tensor:
        if self.form != "one_plus":
            # one kernel, which computes in fp32 what is narrower
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.layer_norm(wide, x.shape[-1:], eps=self.eps)
        # as a sum, as in RmsNorm
        scaled = normed + normed * self.weight
        if self.bias is not None:
            scaled = scaled + self.bias
        return scaled.to(x.dtype)


# Built by (width, spec).
NORMS: dict[type, type[Norm]] = {RmsNormSpec: RmsNorm, LayerNormSpec: LayerNorm}
