"""What every source of sequences offers, and the streams that the made-up ones draw from. Torch-free."""

# T tokens

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

SPLITS = ("train", "valid", "test")
# Evaluation samples of a source that has no end of its own.
EVALUATION_SAMPLES = 2**20


@dataclass(frozen=True)
class Sample:
    """One sequence."""

    tokens: np.ndarray
    """int64 [T + 1]: inputs are the first T, labels the last T."""
    mask: np.ndarray
    """bool [T]: which labels count in the loss."""
    documents: np.ndarray
    """int32 [T]: number of the document that each input belongs to, from 0."""


class Source(Protocol):
    """Sequences by their place in the order of the run. `read` may be called from any thread, one at a time."""

    def __len__(self) -> int:
        """Sequences of the order; training ends there, evaluation begins again."""
        ...

    def read(self, position: int) -> Sample:
        """The sequence at a position. Raises DataError that names position and file when it can't be used."""
        ...


@runtime_checkable
class CountedSource(Source, Protocol):
    """A source that counts by itself how many of its sequences an evaluation takes, so that none is taken twice."""

    def count(self, most: int) -> int:
        """Sequences of one pass, at most `most`. Raises DataError where there is none."""
        ...


@runtime_checkable
class ResumableSource(Source, Protocol):
    """A source that finds a position only by reading on from an earlier one, so that a checkpoint keeps where it is."""

    def place(self) -> np.ndarray:
        """int64 [rows, columns]: where it stands after what was read. Row by row the first number counts samples, and
        of two places that ranks of a run give the one with more is behind the other in the same order."""
        ...

    def go_to(self, place: np.ndarray) -> None:
        """Reads on from a place, on any layout. Raises CheckpointError for what no place of this source is."""
        ...

    def close(self) -> None:
        """Ends what reads ahead. May be called more than once."""
        ...


def stream(seed: int, *, split: str, position: int) -> np.random.Philox:
    """Random bits that depend on nothing but the arguments, the same with every numpy."""
    return np.random.Philox(key=np.array([seed % 2**64, position * 4 + SPLITS.index(split)], dtype=np.uint64))


def uniform(bits: np.ndarray) -> np.ndarray:
    """uint64 random bits as float64 in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
