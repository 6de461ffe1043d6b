"""Feed-forward layers."""

import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.nn.dropout import Dropout, Noise
from megaspec.nn.linear import Linear


class SwiGlu(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020), [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, *, out: Dropout):
        super().__init__()
        self.w_gate_up = Linear(d_model, d_ffn, d_ffn)
        self.w_down = Linear(d_ffn, d_model, residual=True)
        self.dropout = out

    def activate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 F] -> [..., F]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        return self.dropout(self.w_down(self.activate(self.w_gate_up(x_BTD))), noise)


class GeluMlp(nn.Module):
    """down(gelu(up(x))) with biases, GPT-2's tanh form, [B, T, D] -> [B, T, D]."""

    def __init__(self, d_model: int, d_ffn: int, *, out: Dropout):
        super().__init__()
        self.w_up = Linear(d_model, d_ffn, bias=True)
        self.w_down = Linear(d_ffn, d_model, bias=True, residual=True)
        self.dropout = out

    def activate(self, up: Tensor) -> Tensor:
        """[..., F] -> [..., F]"""
        return F.gelu(up, approximate="tanh")

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        return self.dropout(self.w_down(self.activate(self.w_up(x_BTD))), noise)
