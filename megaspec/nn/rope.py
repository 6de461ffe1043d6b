"""Rotary position embedding (Su et al. 2021), with Llama 3's scaling of the low frequencies."""

# B sequences, T tokens, N heads, H head size

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from megaspec.nn.spec import Llama3RopeScaling, NoRopeScaling


def inverse_frequencies(d_head: int, base: float, scaling: NoRopeScaling | Llama3RopeScaling) -> Tensor:
    """float64 [d_head / 2]: radians per token of each pair of dimensions."""
    inv = 1.0 / base ** (torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    if isinstance(scaling, NoRopeScaling):
        return inv
    wavelength = 2 * math.pi / inv
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inv / scaling.factor + smooth * inv
    return torch.where(wavelength > low, inv / scaling.factor, torch.where(wavelength < high, inv, between))


class Rope(nn.Module):
    """Angles of every position up to max_seq_len, in at least fp32; `rotate` turns queries and keys by them."""

    def __init__(self, d_head: int, max_seq_len: int, base: float, scaling: NoRopeScaling | Llama3RopeScaling):
        super().__init__()
        self.d_head, self.max_seq_len, self.base, self.scaling = d_head, max_seq_len, base, scaling
        self.register_buffer("cos_TH", torch.empty(max_seq_len, d_head // 2), persistent=False)
        self.register_buffer("sin_TH", torch.empty(max_seq_len, d_head // 2), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Computes the angles, where the module is not on the meta device."""
        if self.cos_TH.is_meta:
            return
        # whatever device tensors are made on by default: the angles are the same on all
        with torch.device("cpu"):
            inv = inverse_frequencies(self.d_head, self.base, self.scaling)
            angles = torch.arange(self.max_seq_len, dtype=torch.float64)[:, None] * inv
        self.cos_TH.copy_(angles.cos())
        self.sin_TH.copy_(angles.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `bfloat16` and `to_empty` call: angles are computed anew, for a cast has rounded them, and
        memory from the meta device holds none."""
        super()._apply(fn, recurse)
        wide = torch.promote_types(self.cos_TH.dtype, torch.float32)
        self.cos_TH = torch.empty_like(self.cos_TH, dtype=wide)
        self.sin_TH = torch.empty_like(self.sin_TH, dtype=wide)
        self.fill_buffers()
        return self

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] or [B, T] -> cosine and sine, each [T or B T, H / 2], in at least fp32."""
        return self.cos_TH[positions], self.sin_TH[positions]


def rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + H/2) of each head, the pairing of Hugging Face's Llama, in at least fp32."""
    wide = torch.promote_types(x_BTNH.dtype, torch.float32)
    a, b = x_BTNH.to(wide).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTNH.dtype)
