"""How many tokens each split of one data set has, from its index."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megaspec.data.indexed import read_lengths
from megaspec.data.indices import split_bounds


@dataclass(frozen=True)
class Counts:
    """Of one data set."""

    lengths: np.ndarray
    """int32: tokens of each sequence."""
    tokens: tuple[int, ...]
    """Tokens for training, validation and test."""


def count_tokens(prefix: str, split: tuple[float, float, float]) -> Counts:
    """The counts of `<prefix>.idx`. Raises DataError."""
    lengths = read_lengths(prefix)
    bounds = split_bounds(split, len(lengths))
    tokens = [int(lengths[begin:end].sum(dtype=np.int64)) for begin, end in pairwise(bounds)]
    return Counts(lengths, tuple(tokens))
