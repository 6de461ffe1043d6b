"""How many tokens each split of one data set has, from its index."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megaspec.data.indices import split_bounds


@dataclass(frozen=True)
class Counts:
    """Of one data set."""

    lengths: np.ndarray
    """int32: tokens of each sequence."""
    tokens: tuple[int, ...]
    """Tokens for training, validation and test."""


def count_tokens(lengths: np.ndarray, split: tuple[float, float, float]) -> Counts:
    """The counts of a data set with these sequences (int32: tokens of each)."""
    bounds = split_bounds(split, len(lengths))
    tokens = [int(lengths[begin:end].sum(dtype=np.int64)) for begin, end in pairwise(bounds)]
    return Counts(lengths, tuple(tokens))
