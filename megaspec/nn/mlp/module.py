"""Feed-forward layers."""

# B sequences, T tokens, D model, F width between both products

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.linear import Linear
from megaspec.nn.mlp.spec import Activation, ClampedMlpSpec, GatedMlpSpec, PlainMlpSpec


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's form of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's form of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu_squared": relu_squared,
}


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


class GatedMlp(FeedForward):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: GatedMlpSpec, *, out: Dropout):
        super().__init__()
        self.w_gate_up = Linear(d_model, d_ffn, d_ffn, bias=spec.bias)
        self.w_down = Linear(d_ffn, d_model, bias=spec.bias, residual=True)
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = out

    def into(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 2 F]"""
        return self.w_gate_up(x_BTD)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up


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


class ClampedMlp(GatedMlp):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with a bounded gate and up, [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, spec: ClampedMlpSpec, *, out: Dropout):
        super().__init__(d_model, d_ffn, GatedMlpSpec(bias=spec.bias), out=out)
        self.limit = spec.limit
        self.alpha = spec.alpha

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


# Built by (width of the model, width between the products, spec, out=dropout).
MLPS: dict[type, type[FeedForward]] = {GatedMlpSpec: GatedMlp, PlainMlpSpec: PlainMlp, ClampedMlpSpec: ClampedMlp}
