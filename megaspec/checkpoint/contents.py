"""What a checkpoint holds, and in what two of them differ, a few rows of a tensor in memory at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megaspec.checkpoint.examine import examine
from megaspec.checkpoint.fallback import (
    fallback_dir_of,
    looked_up_again,
    path_of_step,
    saved_anywhere,
    tell_elsewhere,
)
from megaspec.checkpoint.folders import refuse_gone
from megaspec.checkpoint.format import DTYPE_BYTES, MANIFEST, Manifest
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.rectangles import Rectangle
from megaspec.core.errors import CheckpointError

# Bytes of a tensor that are in memory at a time, in its stored format.
BLOCK_BYTES = 64 << 20


def open_checkpoint(place: Path, step: int | None = None) -> Reader:
    """The checkpoint of a folder: of a checkpoint, or of a run, of which `step` names one, else the newest that is
    whole. Nothing is changed. CheckpointError: there is none."""
    if (place / MANIFEST).exists():
        if step is not None:
            raise CheckpointError(f"{place} is one checkpoint; --step {step} chooses among those of a run")
        return Reader(place)
    fallback_dir = fallback_dir_of(place)
    return looked_up_again(place, fallback_dir, partial(_open_of_run, place, fallback_dir, step))


def _open_of_run(place: Path, fallback_dir: str | None, step: int | None) -> Reader:
    saved = saved_anywhere(place, fallback_dir)
    if not saved.candidates:
        saved.refuse_unseen_newest()
        raise CheckpointError(f"{place} holds no checkpoint; give the folder of a run that has saved one, or of a step")
    if step is not None:
        return Reader(path_of_step(place, fallback_dir, step))
    saved.refuse_unseen_newest()
    for candidate in saved.candidates:
        _, problems = examine(candidate.path, candidate.step, deep=False)
        if not problems:
            reader = Reader(candidate.path)
            tell_elsewhere(place, candidate)
            return reader
        refuse_gone(candidate.path)
    raise CheckpointError(f"{place}: no checkpoint is whole; megaspec checkpoint verify {place} says what is wrong")


@dataclass(frozen=True)
class Section:
    """All tensors whose names begin alike: `model`, `optim/exp_avg`, `router`, `rng/cpu`."""

    name: str
    tensors: int
    elements: int
    bytes: int
    dtypes: tuple[str, ...]


def sections(manifest: Manifest) -> list[Section]:
    """What a checkpoint is made of, in the order of the names."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(manifest.tensors):
        grouped.setdefault(_section(name), []).append(name)
    found = []
    for section, names in grouped.items():
        stored = [manifest.tensors[name] for name in names]
        elements = sum(prod(one.shape) for one in stored)
        size = sum(prod(one.shape) * DTYPE_BYTES[one.dtype] for one in stored)
        dtypes = tuple(sorted({one.dtype for one in stored}))
        found.append(Section(section, len(names), elements, size, dtypes))
    return found


def _section(name: str) -> str:
    first, *rest = name.split("/")
    if first in ("optim", "rng") and len(rest) > 1:
        return f"{first}/{rest[0]}"
    return first


@dataclass(frozen=True)
class Statistics:
    """Of a tensor's numbers, in fp64. `min`, `max` and `rms` are of the finite ones; NaN where none is."""

    min: float
    max: float
    rms: float
    zeros: int
    non_finite: int


def statistics(reader: Reader, name: str) -> Statistics:
    """Raises CheckpointError for damage."""
    least, greatest, squares = math.inf, -math.inf, 0.0
    zeros = non_finite = finite = 0
    for block in _blocks(reader, name):
        numbers = block.double()
        is_finite = numbers.isfinite()
        non_finite += int((~is_finite).sum())
        numbers = numbers[is_finite]
        zeros += int((numbers == 0).sum())
        finite += numbers.numel()
        if numbers.numel():
            least = min(least, numbers.min().item())
            greatest = max(greatest, numbers.max().item())
            squares += numbers.square().sum().item()
    if not finite:
        return Statistics(math.nan, math.nan, math.nan, zeros, non_finite)
    return Statistics(least, greatest, math.sqrt(squares / finite), zeros, non_finite)


@dataclass(frozen=True)
class Difference:
    """Of two tensors of one shape, in fp64. Equal numbers are equal in every bit but for the sign of 0."""

    differing: int
    """Elements; a NaN differs from a number, not from a NaN."""
    elements: int
    greatest: float
    """The greatest absolute difference; inf where one is finite and the other is not."""
    relative: float
    """The root mean square of the differences over that of the first tensor; inf where that is 0 or `greatest` inf."""


def difference(a: Reader, b: Reader, name: str) -> Difference:
    """Between the tensors of one name and one shape. Raises CheckpointError for damage."""
    assert a.shape(name) == b.shape(name), f"{name}: {a.shape(name)} and {b.shape(name)}"
    differing = 0
    greatest = squares = squares_of_a = 0.0
    for rectangle in _rectangles(a, name):
        ours = a.read(name, rectangle.start, rectangle.shape).double()
        theirs = b.read(name, rectangle.start, rectangle.shape).double()
        differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        differing += int(differs.sum())
        apart = (ours[differs] - theirs[differs]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if apart.numel():
            greatest = max(greatest, apart.max().item())
        squares += apart.square().sum().item()
        squares_of_a += ours[ours.isfinite()].square().sum().item()
    relative = 0.0
    if differing:
        relative = math.inf
        if squares_of_a:
            relative = math.sqrt(squares / squares_of_a)
    return Difference(differing, prod(a.shape(name)), greatest, relative)


def _blocks(reader: Reader, name: str) -> Iterator[Tensor]:
    for rectangle in _rectangles(reader, name):
        yield reader.read(name, rectangle.start, rectangle.shape)


def _rectangles(reader: Reader, name: str) -> Iterator[Rectangle]:
    """Rows of a tensor, as many together as BLOCK_BYTES hold, at least one."""
    shape = reader.shape(name)
    if not shape:
        yield Rectangle((), ())
        return
    itemsize = torch.empty((), dtype=reader.dtype(name)).element_size()
    row_bytes = max(1, prod(shape[1:]) * itemsize)
    rows = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, shape[0], rows):
        start = (first, *(0 for _ in shape[1:]))
        yield Rectangle(start, (min(rows, shape[0] - first), *shape[1:]))
