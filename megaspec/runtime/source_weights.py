"""The weights of a source as those of this run: rows that are taken, copied for each expert, or new.

Which rows are which says rules/initial_weights.py. A rank asks for the rectangles that it owns. Beside what it returns,
a read keeps the rows of one tensor of theirs at most, and a mean goes through a tensor slab by slab.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaspec.checkpoint.reader import Weights
from megaspec.core.layout import Layout, Piece
from megaspec.nn.init import initial_value
from megaspec.nn.model_facts import InitialValues
from megaspec.rules.initial_weights import Reading

# Numbers of a slab that a mean is taken of: 32 MiB in fp64.
_SLAB = 1 << 22


class SourceWeights:
    """Weights under our stored names and of our shapes, for `fill`: see Weights in checkpoint/reader.py."""

    def __init__(
        self,
        source: Weights,
        read: Mapping[str, Reading],
        *,
        new_rows: str,
        starts: InitialValues,
        seed: int,
        wide: torch.dtype,
    ):
        """`new_rows`: `drawn` or `mean`, see InitSpec. `starts`: what this model's weights are drawn with, from `seed`.
        `wide`: the format of master weights, in which new rows are made."""
        self.path: Path = source.path
        self._source = source
        self._readings = read
        self._new_rows = new_rows
        self._starts = starts
        self._seed = seed
        self._wide = wide
        self._kept_of = ""
        """The weight of theirs that `_kept` is of."""
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        """Rectangles of it by start and shape: every expert is made of the same ones."""

    def __contains__(self, name: str) -> bool:
        return name in self._readings

    def names(self) -> list[str]:
        """Of all weights that are read."""
        return list(self._readings)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._readings[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored; with new rows that of the master weights, or the wider one."""
        reading = self._readings[name]
        stored = self._source.dtype(reading.source)
        if reading.new:
            return torch.promote_types(stored, self._wide)
        return stored

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """As Weights."""
        reading = self._readings[name]
        if start is None:
            start = (0,) * len(reading.shape)
        if shape is None:
            shape = [whole - begin for whole, begin in zip(reading.shape, start, strict=True)]
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        end = start[0] + shape[0]
        # rows of ours up to which `out` is filled
        done = start[0]
        for span in reading.spans:
            low = max(span.begin, start[0])
            high = min(span.begin + span.count, end)
            if low >= high:
                continue
            self._fill_new(out[done - start[0] : low - start[0]], name, (done, *start[1:]))
            their_start = (span.source_begin + low - span.begin, *start[1:])
            there = self._read_kept(reading, their_start, (high - low, *shape[1:]))
            out[low - start[0] : high - start[0]] = there
            done = high
        self._fill_new(out[done - start[0] :], name, (done, *start[1:]))
        return out

    def _read_kept(self, reading: Reading, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A rectangle of theirs, which is read once where several spans are made of the same rows."""
        if len(reading.spans) == 1:
            return self._source.read(reading.source, start, shape)
        if self._kept_of != reading.source:
            self._kept_of = reading.source
            self._kept.clear()
        key = (start, shape)
        if key not in self._kept:
            self._kept[key] = self._source.read(reading.source, start, shape)
        return self._kept[key]

    def _fill_new(self, out: Tensor, name: str, start: tuple[int, ...]) -> None:
        """Rows of ours that nothing is read for; `out` may have none."""
        if out.shape[0] == 0:
            return
        if self._new_rows == "mean":
            out[:] = self._mean(self._readings[name].source, start[1:], tuple(out.shape[1:]))
            return
        shape = tuple(out.shape)
        weight = name.partition("/")[2]
        piece = Piece(start, (0,) * len(shape), shape)
        out[:] = initial_value(
            Layout(weight, self._readings[name].shape, shape, (piece,)),
            seed=self._seed,
            std=self._starts.stds.get(weight),
            constant=self._starts.constants.get(weight),
            like=out,
        )

    def _mean(self, source: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Of all rows of theirs, in fp64: those columns.

        NumPy adds the rows of a slab in an order of their number alone, so that every rank and number of threads comes
        to the same bits.
        """
        whole = self._source.shape(source)
        rows_at_once = max(1, _SLAB // max(1, int(np.prod(whole[1:], dtype=np.int64))))
        total = np.zeros(shape, dtype=np.float64)
        for first in range(0, whole[0], rows_at_once):
            n_rows = min(rows_at_once, whole[0] - first)
            slab = self._source.read(source, (first, *start), (n_rows, *shape)).to(torch.float64)
            total += slab.numpy().sum(axis=0)
        # a bias has one mean, which NumPy makes a number of
        return torch.from_numpy(np.asarray(total / whole[0]))
