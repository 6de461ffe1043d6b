"""Rotary position embedding (Su et al. 2021)."""

# B sequences, T tokens, N heads, H head size, R features of a head that turn, C features of a token in the product of
# queries, keys and values

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from megaspec.nn.rope.frequencies import inverse_frequencies
from megaspec.nn.rope.spec import RotarySpec
from megaspec_kernels.registry import REGISTRY, RopeKernel
from megaspec_kernels.rope.form import Heads, Turned
from megaspec_kernels.rope.reference import rotate

Angles = tuple[Tensor, Tensor]
"""Cosine and sine, each [T or B T, R / 2]."""


class Rope(nn.Module):
    """Angles of every position up to max_seq_len, in at least fp32: one table for all layers that turn by them.

    With some scalings, frequencies depend on the length of the sequence. The table holds those of one length.
    """

    def __init__(self, d_rotary: int, max_seq_len: int, spec: RotarySpec):
        super().__init__()
        self.d_rotary = d_rotary
        self.max_seq_len = max_seq_len
        self.spec = spec
        self.effective_length = spec.scaling.effective_length(1)
        """Whose angles the table holds, see RopeScalingSpec."""
        self.register_buffer("cos_TH", torch.empty(max_seq_len, d_rotary // 2), persistent=False)
        self.register_buffer("sin_TH", torch.empty(max_seq_len, d_rotary // 2), persistent=False)
        self.fill_buffers()

    def fill_buffers(self) -> None:
        """Computes the angles, where the module is not on the meta device."""
        if self.cos_TH.is_meta:
            return
        cos, sin = self._computed(torch.arange(self.max_seq_len, device="cpu"), self.effective_length)
        self.cos_TH.copy_(cos)
        self.sin_TH.copy_(sin)

    def _computed(self, positions: Tensor, effective_length: int) -> Angles:
        """Of int64 [...] on the CPU, float64 [..., R / 2] each."""
        factor = self.spec.scaling.angle_factor()
        # whatever device tensors are made on by default: the angles are the same on all
        with torch.device("cpu"):
            inv = inverse_frequencies(self.spec, self.d_rotary, length=effective_length)
        angles = positions.to(torch.float64)[..., None] * inv
        return angles.cos() * factor, angles.sin() * factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `bfloat16` and `to_empty` call: angles are computed anew, for a cast has rounded them, and
        memory from the meta device holds none."""
        super()._apply(fn, recurse)
        wide = torch.promote_types(self.cos_TH.dtype, torch.float32)
        self.cos_TH = torch.empty_like(self.cos_TH, dtype=wide)
        self.sin_TH = torch.empty_like(self.sin_TH, dtype=wide)
        self.fill_buffers()
        return self

    def angles(self, positions: Tensor, *, length: int) -> Angles:
        """int64 [T] or [B, T] -> cosine and sine, each [T or B T, R / 2], in at least fp32.

        `length`: tokens of the whole sequence, of which `positions` may be a part.
        """
        effective_length = self.spec.scaling.effective_length(length)
        if effective_length != self.effective_length:
            # angles that were given out are copies, so that a backward pass under way keeps its own
            self.effective_length = effective_length
            self.fill_buffers()
        return self.cos_TH[positions], self.sin_TH[positions]

    def effective_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Of sequences of so many tokens: those of which it is equal have the same frequencies."""
        return [self.spec.scaling.effective_length(length) for length in lengths]

    def angles_of_rows(self, positions_BT: Tensor, *, lengths: Sequence[int]) -> Angles:
        """As `angles`, each [B, T, R / 2], of sequences that are not equally long: `lengths` of them."""
        effective_lengths = self.effective_lengths(lengths)
        if len(set(effective_lengths)) == 1:
            return self.angles(positions_BT, length=lengths[0])
        cosines = []
        sines = []
        # without the table, which would be filled anew for one row after the other
        for positions_T, effective_length in zip(positions_BT.cpu(), effective_lengths, strict=True):
            cos, sin = self._computed(positions_T, effective_length)
            cosines.append(cos)
            sines.append(sin)
        return torch.stack(cosines).to(self.cos_TH), torch.stack(sines).to(self.sin_TH)


class Rotation(nn.Module):
    """Turns the query and key heads of one layer by the angles of their positions.

    [B, T, N, H], [B, T, K, H] -> the same shapes
    """

    kernel: RopeKernel = REGISTRY["rope"]["reference"]
    """The slot of its implementation, for heads as their product has them."""

    def __init__(self, table: int):
        """`table`: number of the layer's angles among those of the model."""
        super().__init__()
        self.table = table

    def forward(self, q_BTNH: Tensor, k_BTKH: Tensor, angles: tuple[Angles, ...]) -> tuple[Tensor, Tensor]:
        """`angles`: of every table of the model, SequenceContext.angles."""
        cos, sin = self.of(angles)
        return rotate(q_BTNH, cos, sin), rotate(k_BTKH, cos, sin)

    def of_product(self, qkv_BTC: Tensor, heads: Heads, angles: tuple[Angles, ...]) -> Turned:
        """Of heads that nothing has changed since the product that made them."""
        return self.kernel.rope(qkv_BTC, *self.of(angles), heads=heads)

    def of(self, angles: tuple[Angles, ...]) -> Angles:
        """Those that this layer turns by."""
        return angles[self.table]


@dataclass(frozen=True)
class PositionModules:
    """How positions enter a model."""

    added: nn.Module | None = None
    """Adds to the embedding, ([B, T, D], positions) -> [B, T, D]."""
    rope: Rope | None = None
    """Angles for all layers that turn by them."""
    rotation: Callable[[int], Rotation] | None = None
    """Makes what turns the heads of one layer by the angles of the table of this number."""


def rotary(spec: RotarySpec, *, d_model: int, d_head: int, max_seq_len: int) -> PositionModules:
    """Angles that layers share."""
    return PositionModules(rope=Rope(spec.turned(d_head), max_seq_len, spec), rotation=Rotation)
