"""Normalisations, computed in at least fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / rms(x) · g (Zhang and Sennrich 2019), [..., D] -> [..., D]."""

    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # through a view, so that the gradient of x is summed up in one order, computed again or not
        wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std · g + b (Ba et al. 2016), [..., D] -> [..., D]."""

    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
