"""Rows that are packed with documents of random length, the same for every side of a comparison. Numpy alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedRow:
    """`seq_len` inputs and one label more, without padding."""

    tokens: np.ndarray
    """int64 [seq_len + 1]"""
    starts: tuple[int, ...]
    """The first input of each document, and seq_len behind the last."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document in the row."""
        return np.diff(self.starts).tolist()


def packed_rows(*, mean: int, rows: int, seq_len: int, vocab_size: int, seed: int) -> list[PackedRow]:
    """Rows cut from one stream of documents, whose lengths are of the geometric distribution with this mean; a
    document that a row's end cuts goes on in the next row."""
    draw = np.random.RandomState(seed)
    made = []
    # of the document that is being read
    left = int(draw.geometric(1 / mean))
    for _ in range(rows):
        starts = [0]
        while starts[-1] + left < seq_len:
            starts.append(starts[-1] + left)
            left = int(draw.geometric(1 / mean))
        left -= seq_len - starts[-1]
        if left == 0:
            left = int(draw.geometric(1 / mean))
        tokens = draw.randint(0, vocab_size, seq_len + 1).astype(np.int64)
        made.append(PackedRow(tokens, (*starts, seq_len)))
    return made
