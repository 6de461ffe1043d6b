"""Feed-forward layers."""

# B sequences, T tokens, D model, F width between both products

import torch
from torch import Tensor, nn

from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.spec import ClampedMlpSpec, GatedMlpSpec, PlainMlpSpec
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.gated.reference import ACTIVATIONS
from megaspec_kernels.registry import REGISTRY, GatedKernel


class FeedForward(nn.Module):
    """A layer that looks at each token alone, [B, T, D] -> [B, T, D]: w_down(activate(into(x))), then dropout."""

    recompute_parts = frozenset({"mlp", "activation"})
    w_down: Linear
    dropout: Dropout

    def into(self, x_BTD: Tensor) -> Tensor:
        """The first product, [B, T, D] -> what `activate` takes."""
        raise NotImplementedError

    def activate(self, x: Tensor) -> Tensor:
        """-> [..., F]"""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        return self.dropout(self.w_down(self.activate(self.into(x_BTD))), noise)


class Gated(FeedForward):
    """A layer of two products and a gate between them."""

    kernel: GatedKernel = staticmethod(REGISTRY["gated"]["reference"])
    """The slot of its implementation."""

    def __init__(self, d_model: int, d_ffn: int, form: GatedForm, *, bias: bool, out: Dropout):
        super().__init__()
        self.w_gate_up = Linear(d_model, d_ffn, d_ffn, bias=bias)
        self.w_down = Linear(d_ffn, d_model, bias=bias, residual=True)
        self.form = form
        self.dropout = out

    def into(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 2 F]"""
        return self.w_gate_up(x_BTD)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        return self.kernel(gate_up, form=self.form)


class GatedMlp(Gated):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: GatedMlpSpec, *, out: Dropout):
        super().__init__(d_model, d_ffn, GatedForm(spec.activation), bias=spec.bias, out=out)


class ClampedMlp(Gated):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with a bounded gate and up, [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: ClampedMlpSpec, *, out: Dropout):
        form = GatedForm(limit=spec.limit, alpha=spec.alpha)
        super().__init__(d_model, d_ffn, form, bias=spec.bias, out=out)


class PlainMlp(FeedForward):
    """down(activation(up(x))), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: PlainMlpSpec, *, out: Dropout):
        super().__init__()
        self.w_up = Linear(d_model, d_ffn, bias=spec.bias)
        self.w_down = Linear(d_ffn, d_model, bias=spec.bias, residual=True)
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = out

    def into(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, F]"""
        return self.w_up(x_BTD)

    def activate(self, up: Tensor) -> Tensor:
        """[..., F] -> [..., F]"""
        return self.activation(up)


# Built by (width of the model, width between the products, spec, out=dropout).
MLPS: dict[type, type[FeedForward]] = {GatedMlpSpec: GatedMlp, PlainMlpSpec: PlainMlp, ClampedMlpSpec: ClampedMlp}
