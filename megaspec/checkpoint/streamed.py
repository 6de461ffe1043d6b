"""Weights that are read as they are saved, some rows at a time: a checkpoint's, rounded, or the mean of several's."""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from megaspec.checkpoint.reader import Reader, Weights
from megaspec.checkpoint.shard import SavedPiece
from megaspec.core.errors import CheckpointError

PIECE_BYTES = 256 << 20
"""Of a tensor that is streamed from one file to another, what is in memory at once."""
SLAB_BYTES = 16 << 20
"""Of a sum in fp64, what is in memory at once."""
WEIGHTS = ("model/", "router/")
"""How the names of weights begin, and of what routers keep from step to step."""


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


class WeightsOf:
    """The weights alone of a checkpoint, without optimizer and generators. `dtype`: what they are rounded to; None: as
    they are stored.

    What routers choose experts by beside their scores stays as it is stored: rounded, it would choose others.
    """

    def __init__(self, source: Reader, dtype: torch.dtype | None = None):
        self.path = source.path
        self._source = source
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name.startswith(WEIGHTS) and name in self._source

    def names(self) -> list[str]:
        """Of all weights, sorted."""
        return [name for name in self._source.names() if name.startswith(WEIGHTS)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Number format that they are read in."""
        return _rounded_to(name, self._source.dtype(name), self._dtype)

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """As Weights. CheckpointError: NaN or infinities are stored, or a number is too large for `dtype`."""
        stored = self._source.read(name, start, shape)
        _refuse_non_finite(stored, self.path, name)
        value = stored.to(self.dtype(name))
        _refuse_overflow(value, self.path, name)
        return value


class MeanWeights:
    """The mean of the weights of several checkpoints, Σ share · weight, summed in fp64 and rounded once.

    The sources have the same names and shapes. `shares`: one for each source; together 1. `dtype`: what the mean is
    rounded to; None: the widest format in which it is stored. What routers keep is averaged too, in its own format.
    """

    def __init__(self, sources: Sequence[Reader], shares: Sequence[float], dtype: torch.dtype | None = None):
        assert len(sources) == len(shares) > 0, f"{len(sources)} sources, {len(shares)} shares"
        self.path = sources[0].path
        self._sources = [WeightsOf(source) for source in sources]
        self._shares = tuple(shares)
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._sources[0]

    def names(self) -> list[str]:
        """Of all weights, sorted."""
        return self._sources[0].names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[0].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Number format that the mean is rounded to."""
        widest = self._sources[0].dtype(name)
        for source in self._sources[1:]:
            widest = torch.promote_types(widest, source.dtype(name))
        return _rounded_to(name, widest, self._dtype)

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """As Weights. CheckpointError: a source holds NaN or infinities, or the mean is too large for `dtype`."""
        if start is None:
            start = (0,) * len(self.shape(name))
        if shape is None:
            shape = [whole - begin for whole, begin in zip(self.shape(name), start, strict=True)]
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        rows_at_once = max(1, SLAB_BYTES // (prod(shape[1:]) * torch.float64.itemsize))
        for first in range(0, shape[0], rows_at_once):
            rows = min(rows_at_once, shape[0] - first)
            at = (start[0] + first, *start[1:])
            out[first : first + rows] = self._sum(name, at, (rows, *shape[1:]))
        _refuse_overflow(out, self.path, name)
        return out

    def _sum(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A rectangle of the mean, in fp64."""
        total: Tensor | None = None
        for source, share in zip(self._sources, self._shares, strict=True):
            term = source.read(name, start, shape).double().mul_(share)
            # not from zeros, which would make 0 of -0
            total = term if total is None else total.add_(term)
        assert total is not None, "no sources"
        return total


def _rounded_to(name: str, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is None or name.startswith("router/"):
        return stored
    return asked


def _refuse_non_finite(value: Tensor, where: object, name: str) -> None:
    if not torch.isfinite(value).all():
        raise CheckpointError(f"{where}: {name} holds NaN or infinities, so it is no trained weight")


def _refuse_overflow(value: Tensor, where: object, name: str) -> None:
    """Of numbers that were finite before they were rounded."""
    if not torch.isfinite(value).all():
        text = f"{where}: {name} holds numbers that {str(value.dtype).removeprefix('torch.')} has no room for"
        raise CheckpointError(f"{text}; take --dtype bf16 or fp32")
