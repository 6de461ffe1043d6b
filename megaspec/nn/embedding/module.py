"""Token and position embeddings."""

# B sequences, T tokens, D model, V vocabulary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspec.nn.by_position import ByPosition
from megaspec.nn.embedding.spec import LearnedPositionsSpec, NoPositionsSpec
from megaspec.nn.linear import TableSum
from megaspec.nn.rope.module import PositionModules
from megaspec_kernels.product import add_rows_


def padded(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


class SummedEmbeddingOp(torch.autograd.Function):
    """Rows of a table. Their gradients are added to the table's sum; no gradient of the whole table is made."""

    @staticmethod
    def forward(ctx, weight_VD, tokens_BT, table_sum):
        ctx.save_for_backward(tokens_BT)
        ctx.table_sum = table_sum
        return F.embedding(tokens_BT, weight_VD)

    @staticmethod
    def backward(ctx, grad_BTD):
        (tokens_BT,) = ctx.saved_tensors
        # never deferred: it takes no time, and what it needs takes memory
        ctx.table_sum.add(lambda into, overwrite: add_rows_(into, tokens_BT, grad_BTD, overwrite=overwrite))
        ctx.table_sum.arrived()
        return None, None, None


class Embedding(nn.Module):
    """Rows of a table by token id, times `scale`, int64 [B, T] -> [B, T, D]. Rows past `vocab_size` are padding.

    `table_sum`, when set, is where the table's gradient goes in a step: see linear.py, note "Tables".
    """

    def __init__(self, vocab_size: int, d: int, *, pad_to: int = 1, scale: float = 1.0):
        super().__init__()
        self.vocab_size = vocab_size
        self.pad_to = pad_to
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(padded(vocab_size, pad_to), d))
        self.table_sum: TableSum | None = None

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.scaled(self.rows(tokens_BT))

    def rows(self, places_BT: Tensor) -> Tensor:
        """Of the weight, by their numbers in it."""
        if self.table_sum is not None and self.table_sum.is_open:
            return SummedEmbeddingOp.apply(self.weight, places_BT, self.table_sum)
        return F.embedding(places_BT, self.weight)

    def scaled(self, x_BTD: Tensor) -> Tensor:
        """Times the scale, which is rounded to the model's format, as Gemma's is."""
        if self.scale == 1.0:
            return x_BTD
        return x_BTD * x_BTD.new_tensor(self.scale)


class LearnedPositions(ByPosition):
    """Adds a learned vector for each position, [B, T, D] -> [B, T, D]."""

    def __init__(self, max_seq_len: int, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, d))

    def forward(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        here = self.places_here(positions, x_BTD.shape[1])
        return x_BTD + F.embedding(here, self.weight)


def learned_positions(spec: LearnedPositionsSpec, *, d_model: int, d_head: int, max_seq_len: int) -> PositionModules:
    """A table that is added to the embedding."""
    return PositionModules(added=LearnedPositions(max_seq_len, d_model))


def no_positions(spec: NoPositionsSpec, *, d_model: int, d_head: int, max_seq_len: int) -> PositionModules:
    """Nothing."""
    return PositionModules()
