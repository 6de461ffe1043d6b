"""What lies between an expert's two products: the activation, times the weight of the row."""

# R rows, I and F features before and behind the activation

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megaspec.nn.mlp.spec import GatedMlpSpec, MlpSpec
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import WeightedGatedKernel

Activate = Callable[[Tensor], Tensor]
"""[..., I] -> [..., F]"""


@dataclass(frozen=True)
class WeightedActivation:
    """weight · activate(x), computed in the wider format of both, and its gradients."""

    forward: Callable[[Tensor, Tensor], Tensor]
    """[R, I], [R] -> [R, F]"""
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Gradient of the result [R, F], [R, I], [R] -> those of both inputs."""
    is_kernel: bool = False
    """Each is a kernel, in which the compiler has nothing to put together."""
    writer: "Fp8Writer | None" = None
    """Of kernels that can write both in fp8."""


@dataclass(frozen=True)
class Fp8Writer:
    """The same, written in fp8 by a scale that is known: rows, columns with the padding of groups, and the scale."""

    forward_in_fp8: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """([R, I], [R], groups, *, known) -> [R, F], [F, P], [1, 1]"""
    gradients_in_fp8: Callable[..., tuple[tuple[Tensor, Tensor, Tensor], Tensor]]
    """([R, F], [R, I], [R], groups, *, known) -> [R, I], [I, P], [1, 1], and the weights' gradient [R]"""


def weighted_swiglu(gate_up_RF: Tensor, weights_R: Tensor) -> Tensor:
    """weight · silu(gate) · up, computed in the wider of both formats; [R, 2 F], [R] -> [R, F]"""
    gate, up = gate_up_RF.to(weights_R.dtype).chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up * weights_R[:, None]).to(gate_up_RF.dtype)


def weighted_swiglu_gradients(grad_RF: Tensor, gate_up_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up, [R, 2 F], and of the weights, [R]"""
    gate, up = gate_up_RF.to(weights_R.dtype).chunk(2, dim=-1)
    grad = grad_RF.to(weights_R.dtype)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    weighted = grad * weights_R[:, None]
    # silu'(gate) = σ · (1 + gate · (1 - σ))
    grad_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = weighted * silu
    grad_gate_up = torch.cat((grad_gate, grad_up), dim=-1).to(gate_up_RF.dtype)
    return grad_gate_up, (grad * silu * up).sum(-1)


SWIGLU = WeightedActivation(weighted_swiglu, weighted_swiglu_gradients)
"""What most models have, with its gradients written out."""


def weighted_by(kernel: WeightedGatedKernel, form: GatedForm) -> WeightedActivation:
    """Of experts with a gate, by a kernel."""
    writer = Fp8Writer(partial(kernel.forward_in_fp8, form=form), partial(kernel.gradients_in_fp8, form=form))
    return WeightedActivation(
        partial(kernel.forward, form=form), partial(kernel.gradients, form=form), is_kernel=True, writer=writer
    )


def weighted(spec: MlpSpec, activate: Activate) -> WeightedActivation:
    """Of experts that are feed-forward layers of these options, whose activation is `activate`, in plain operations."""
    # every other option is at its default
    if isinstance(spec, GatedMlpSpec) and spec == GatedMlpSpec(bias=spec.bias):
        return SWIGLU

    def forward(x_RI: Tensor, weights_R: Tensor) -> Tensor:
        return (activate(x_RI.to(weights_R.dtype)) * weights_R[:, None]).to(x_RI.dtype)

    def gradients(grad_RF: Tensor, x_RI: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        _, backward = torch.func.vjp(forward, x_RI, weights_R)
        return backward(grad_RF)

    return WeightedActivation(forward, gradients)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any number of rows, which differs from step to step. On first use: the compiler takes
    its time to load."""
    return torch.compile(function, dynamic=True)


class WeightedActivationOp(torch.autograd.Function):
    """A WeightedActivation, of which the inputs alone are kept."""

    @staticmethod
    def forward(ctx, x_RI, weights_R, activation, fused):
        ctx.save_for_backward(x_RI, weights_R)
        ctx.activation = activation
        ctx.fused = fused and not activation.is_kernel
        run = compiled(activation.forward) if ctx.fused else activation.forward
        return run(x_RI, weights_R)

    @staticmethod
    def backward(ctx, grad_RF):
        gradients = ctx.activation.gradients
        if ctx.fused:
            gradients = compiled(gradients)
        return *gradients(grad_RF, *ctx.saved_tensors), None, None


class WeightedRowsOp(torch.autograd.Function):
    """weight · x, computed in the wider format of both, of which the inputs alone are kept; [R, D], [R] -> [R, D]"""

    @staticmethod
    def forward(ctx, x_RD, weights_R):
        ctx.save_for_backward(x_RD, weights_R)
        return (x_RD.to(weights_R.dtype) * weights_R[:, None]).to(x_RD.dtype)

    @staticmethod
    def backward(ctx, grad_RD):
        x_RD, weights_R = ctx.saved_tensors
        wide_RD = grad_RD.to(weights_R.dtype)
        grad_x = (wide_RD * weights_R[:, None]).to(x_RD.dtype)
        return grad_x, (wide_RD * x_RD.to(weights_R.dtype)).sum(-1)
