"""Token and position embeddings."""

# B sequences, T tokens, D model, V vocabulary

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def padded(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


class Embedding(nn.Module):
    """Rows of a table by token id, int64 [B, T] -> [B, T, D]. Rows past `vocab_size` are padding."""

    def __init__(self, vocab_size: int, d: int, *, pad_to: int = 1):
        super().__init__()
        self.vocab_size, self.pad_to = vocab_size, pad_to
        self.weight = nn.Parameter(torch.empty(padded(vocab_size, pad_to), d))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class LearnedPositions(nn.Module):
    """Adds a learned vector for each position, [B, T, D] -> [B, T, D].

    `part` is (index, count) when this rank holds one of `count` equal parts of the sequence.
    """

    def __init__(self, max_seq_len: int, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, d))
        self.part = (0, 1)

    def forward(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        T = x_BTD.shape[1]
        here = positions[..., self.part[0] * T : (self.part[0] + 1) * T]
        return x_BTD + F.embedding(here, self.weight)
