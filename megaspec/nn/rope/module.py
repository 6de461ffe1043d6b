"""Rotary position embedding (Su et al. 2021), with Llama 3's scaling of the low frequencies."""

# B sequences, T tokens, N heads, H head size

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from megaspec.nn.rope.spec import Llama3RopeScaling, NoRopeScaling, RotarySpec


def inverse_frequencies(d_head: int, base: float, scaling: NoRopeScaling | Llama3RopeScaling) -> Tensor:
    """float64 [d_head / 2]: radians per token of each pair of dimensions."""
    # base^(-2i / d_head)
    inv = 1.0 / base ** (torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    if isinstance(scaling, NoRopeScaling):
        return inv
    # tokens of a whole turn; those longer than `low` slow down by the factor, those shorter than `high` stay
    wavelength = 2 * math.pi / inv
    low = scaling.original_max_seq_len / scaling.low_freq_factor
    high = scaling.original_max_seq_len / scaling.high_freq_factor
    # between both, from one to the other, linear in the frequency
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * inv / scaling.factor + smooth * inv
    scaled = torch.where(wavelength < high, inv, between)
    return torch.where(wavelength > low, inv / scaling.factor, scaled)


class Rope(nn.Module):
    """Angles of every position up to max_seq_len, in at least fp32: one table for all layers."""

    def __init__(self, d_head: int, max_seq_len: int, spec: RotarySpec):
        super().__init__()
        self.d_head = d_head
        self.max_seq_len = max_seq_len
        self.spec = spec
        self.register_buffer("cos_TH", torch.empty(max_seq_len, d_head // 2), persistent=False)
        self.register_buffer("sin_TH", torch.empty(max_seq_len, d_head // 2), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Computes the angles, where the module is not on the meta device."""
        if self.cos_TH.is_meta:
            return
        # whatever device tensors are made on by default: the angles are the same on all
        with torch.device("cpu"):
            inv = inverse_frequencies(self.d_head, self.spec.base, self.spec.scaling)
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
    # the same angles for every head
    cos = cos.unsqueeze(-2)
    sin = sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTNH.dtype)


class Rotation(nn.Module):
    """Turns the query and key heads of one layer by the angles of their positions.

    [B, T, N, H], [B, T, K, H] -> the same shapes
    """

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = angles
        return rotate(q_BTNH, cos, sin), rotate(k_BTKH, cos, sin)


@dataclass(frozen=True)
class PositionModules:
    """How positions enter a model."""

    added: nn.Module | None = None
    """Adds to the embedding, ([B, T, D], positions) -> [B, T, D]."""
    rope: Rope | None = None
    """Angles for all layers."""
    rotation: Callable[[], Rotation] | None = None
    """Makes what turns the heads of one layer by these angles."""


def rotary(spec: RotarySpec, *, d_model: int, d_head: int, max_seq_len: int) -> PositionModules:
    """Angles that all layers share."""
    return PositionModules(rope=Rope(d_head, max_seq_len, spec), rotation=Rotation)
