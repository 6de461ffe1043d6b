"""The three products of a linear layer as equations: y = x Wᵀ + b, dx = dy W, dW = dyᵀ x."""

# I inputs, O outputs

from torch import Tensor


def forward(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """[..., I] -> [..., O]"""
    y = x @ weight_OI.t()
    if bias_O is None:
        return y
    return y + bias_O


def input_gradient(grad_out: Tensor, weight_OI: Tensor) -> Tensor:
    """[..., O] -> [..., I]"""
    return grad_out @ weight_OI


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    """[..., O], [..., I] -> [O, I]"""
    return grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


def add_weight_gradient(into_OI: Tensor, grad_out: Tensor, x: Tensor, *, overwrite: bool) -> None:
    """into = [into +] dyᵀ x in the format of `into`, which may be wider; `overwrite` leaves the old one out."""
    if into_OI.is_meta:
        return
    wide = into_OI.dtype
    grad_weight = weight_gradient(grad_out.to(wide), x.to(wide))
    if overwrite:
        into_OI.copy_(grad_weight)
    else:
        into_OI.add_(grad_weight)
