"""Weights that are saved as they are read: of a model that is larger than memory, some rows at a time."""

from functools import partial
from math import prod

import torch

from megaspec.checkpoint.reader import Weights
from megaspec.checkpoint.shard import SavedPiece

PIECE_BYTES = 256 << 20
"""Of a tensor that is streamed from one file to another, what is in memory at once."""


def streamed_pieces(weights: Weights) -> list[SavedPiece]:
    """All of a source's tensors, for a checkpoint: rows of PIECE_BYTES at most, each read when it is written."""
    pieces = []
    for name in weights.names():
        whole = weights.shape(name)
        dtype = weights.dtype(name)
        rows_at_once = max(1, PIECE_BYTES // (prod(whole[1:]) * dtype.itemsize))
        for first in range(0, whole[0], rows_at_once):
            start = (first,) + (0,) * (len(whole) - 1)
            shape = (min(rows_at_once, whole[0] - first), *whole[1:])
            promised = torch.empty(shape, dtype=dtype, device="meta")
            pieces.append(SavedPiece(name, whole, start, promised, partial(weights.read, name, start, shape)))
    return pieces
