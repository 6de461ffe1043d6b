"""Gated activations in plain PyTorch (Shazeer 2020)."""

# F features

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.gated.form import GateActivation, GatedForm


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's form of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's form of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[GateActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu_squared": relu_squared,
}


def gated(gate_up: Tensor, *, form: GatedForm) -> Tensor:
    """[..., 2 F], the gates first -> [..., F]"""
    gate, up = gate_up.chunk(2, dim=-1)
    if form.limit is None:
        return ACTIVATIONS[form.activation](gate) * up
    gate = gate.clamp(max=form.limit)
    up = up.clamp(-form.limit, form.limit)
    return (up + 1) * (gate * torch.sigmoid(form.alpha * gate))
