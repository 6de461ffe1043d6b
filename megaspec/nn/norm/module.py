"""Normalisations, computed in at least fp32."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megaspec.nn.fp8 import Fp8Input
from megaspec.nn.fp8_producers import Producer, norm_of_stream, norm_of_sum
from megaspec.nn.norm.spec import LayerNormSpec, RmsNormSpec
from megaspec_kernels.norm.form import Normed, NormForm
from megaspec_kernels.norm.reference import add, rms_norm
from megaspec_kernels.registry import REGISTRY, NormKernel


class Norm(nn.Module):
    """A norm over the last dimension, [..., D] -> [..., D]."""

    recompute_parts = frozenset({"norm"})
    term_scale = 1.0

    def of_stream(self, x: Tensor) -> Normed:
        """-> the residual stream as it is, and normed."""
        return x, self(x)

    def of_sum(self, x: Tensor, term: Tensor) -> Normed:
        """-> x + term_scale · term, and normed."""
        total = add(x, term, scale=self.term_scale)
        return total, self(total)

    def set_term_scale(self, scale: float) -> None:
        """What a term counts for `of_sum`."""
        self.term_scale = scale


class KernelNorm(Norm):
    """A norm that an operation of kernels/ computes."""

    kernel: NormKernel = REGISTRY["norm"]["reference"]
    """The slot of its implementation."""
    is_alone = False
    """What is around it is computed apart: it is computed again by itself, or is not what its kernel computes."""
    fp8: Producer | None = None
    """Writes what the layer behind it takes in fp8; None: that layer does."""

    def __init__(self, d: int, form: NormForm, *, bias: bool):
        super().__init__()
        # a plug-in that derives from one of ours and computes something else has that computed
        self.is_alone = type(self).forward not in _BY_KERNEL
        self.form = form
        self.weight = None
        if form.gain != "none":
            self.weight = nn.Parameter(torch.empty(d))
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel.norm(x, self.weight, self.bias, form=self.form)

    def of_stream(self, x: Tensor) -> Normed | tuple[Tensor, Fp8Input]:
        if self.is_alone:
            return super().of_stream(x)
        if self.fp8 is not None:
            return norm_of_stream(x, self.weight, self.bias, form=self.form, into=self.fp8)
        return self.kernel.norm_of_stream(x, self.weight, self.bias, form=self.form)

    def of_sum(self, x: Tensor, term: Tensor) -> Normed | tuple[Tensor, Fp8Input]:
        if self.is_alone:
            return super().of_sum(x, term)
        if self.fp8 is not None:
            return norm_of_sum(x, term, self.weight, self.bias, form=self.form, into=self.fp8)
        return self.kernel.norm_of_sum(x, term, self.weight, self.bias, form=self.form)

    def set_term_scale(self, scale: float) -> None:
        super().set_term_scale(scale)
        self.form = replace(self.form, scale=scale)


class RmsNorm(KernelNorm):
    """x / rms(x) · g (Zhang and Sennrich 2019), with g the weight, 1 plus it, or 1."""

    def __init__(self, d: int, spec: RmsNormSpec):
        super().__init__(d, NormForm("rms", spec.weight, spec.eps), bias=False)

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """`mean_square`, [..., 1]: of the whole row, where `x` is a part of it; None: x is all of it."""
        if mean_square is None:
            return super().forward(x)
        return rms_norm(x, self.weight, form=self.form, mean_square=mean_square)


class LayerNorm(KernelNorm):
    """(x - mean) / std · g + b (Ba et al. 2016), with g the weight, 1 plus it, or 1, and b a bias or nothing."""

    def __init__(self, d: int, spec: LayerNormSpec):
        super().__init__(d, NormForm("layer", spec.weight, spec.eps), bias=spec.bias)


_BY_KERNEL = (KernelNorm.forward, RmsNorm.forward)
# Built by (width, spec).
NORMS: dict[type, type[Norm]] = {RmsNormSpec: RmsNorm, LayerNormSpec: LayerNorm}
