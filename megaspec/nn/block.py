"""The pre-norm transformer block that all families share."""

from torch import Tensor, nn

from megaspec.nn.attention import Attention, SequenceContext


class Block(nn.Module):
    """h = x + attn(norm1(x));  h + mlp(norm2(h)), [B, T, D] -> [B, T, D]."""

    def __init__(self, *, norm1: nn.Module, attn: Attention, norm2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def forward(self, x_BTD: Tensor, context: SequenceContext) -> Tensor:
        h_BTD = x_BTD + self.attn(self.norm1(x_BTD), context)
        return h_BTD + self.mlp(self.norm2(h_BTD), context.noise)
