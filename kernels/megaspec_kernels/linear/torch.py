"""The three products of a linear layer through torch: cuBLAS on GPUs, weight gradients summed inside the product."""

# I inputs, O outputs

import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.linear.reference import input_gradient, weight_gradient
from megaspec_kernels.product import add_product_

__all__ = ["add_weight_gradient", "forward", "input_gradient", "weight_gradient"]


def forward(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """See reference.py."""
    return F.linear(x, weight_OI, bias_O)


def add_weight_gradient(into_OI: Tensor, grad_out: Tensor, x: Tensor, *, overwrite: bool) -> None:
    """See reference.py."""
    add_product_(into_OI, grad_out.flatten(0, -2).t(), x.flatten(0, -2), overwrite=overwrite)
