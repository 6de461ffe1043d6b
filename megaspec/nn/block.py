"""The pre-norm transformer blocks that all families share."""

import torch
from torch import Tensor, nn

from megaspec.nn.attention import Attention, SequenceContext
from megaspec.nn.moe import Moe

Options = dict[str, str | int | bool]
"""Of torch.compile."""


class Block(nn.Module):
    """h = x + attn(norm1(x));  h + mlp(norm2(h)), [B, T, D] -> [B, T, D]."""

    def __init__(self, *, norm1: nn.Module, attn: Attention, norm2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        h_BTD = x_BTD + self.attn(self.norm1(x_BTD), context)
        return h_BTD + self.mlp(self.norm2(h_BTD), context.noise)

    def compile_parts(self, *, options: Options | None = None) -> None:
        """Compiles what can be traced: all of it."""
        self.compile(options=options)


class MoeBlock(nn.Module):
    """h = x + attn(norm1(x));  h + moe(norm2(h)), [B, T, D] -> [B, T, D]."""

    def __init__(self, *, norm1: nn.Module, attn: Attention, norm2: nn.Module, moe: Moe):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.moe = norm1, attn, norm2, moe

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        h_BTD, normed_BTD = self.attend(x_BTD, context)
        return h_BTD + self.moe(normed_BTD, context)

    def attend(self, x_BTD: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """-> h and norm2(h)"""
        h_BTD = x_BTD + self.attn(self.norm1(x_BTD), context)
        return h_BTD, self.norm2(h_BTD)

    def compile_parts(self, *, options: Options | None = None) -> None:
        """Compiles what can be traced: attention with both norms, and what Moe.compile_parts says."""
        self.attend = torch.compile(self.attend, options=options)
        self.moe.compile_parts(options=options)
