"""Rectangles of index space: what two share, and whether some of them hold every element of a whole once. Torch-free.

Note "Corners". A rectangle of d dimensions is its 2^d corners with alternating signs: its indicator is the sum, over
the corners c, of (-1)^(coordinates of c that are upper ends) times the indicator of all points at or above c. Those of
different corners are linearly independent, so rectangles hold each element of a whole exactly once if and only if
their signed corners add up to those of the whole. That takes d sorts of n·2^d numbers for n rectangles, however they
lie. (Comparing pairs takes n² steps for a staircase.)
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The indices start[d] <= i < start[d] + shape[d] of every dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Behind the last index of every dimension."""
        return tuple(s + n for s, n in zip(self.start, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What it is of a tensor, `tensor[slices]`."""
        return tuple(map(slice, self.start, self.stop))

    def is_within(self, whole: tuple[int, ...]) -> bool:
        """Whether it is a rectangle, with or without elements, of a tensor of shape `whole`."""
        if not len(self.start) == len(self.shape) == len(whole):
            return False
        for start, extent, size in zip(self.start, self.shape, whole, strict=True):
            if start < 0 or extent < 0 or start + extent > size:
                return False
        return True

    def __str__(self) -> str:
        return "[" + ", ".join(map("{}:{}".format, self.start, self.stop)) + "]"


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """What both hold, or None when that is nothing."""
    low = tuple(map(max, one.start, other.start))
    high = tuple(map(min, one.stop, other.stop))
    shape = tuple(stop - start for start, stop in zip(low, high, strict=True))
    if min(shape, default=1) <= 0:
        return None
    return Rectangle(low, shape)


def not_held_once(wholes: Integers, owners: Integers, starts: Integers, shapes: Integers) -> list[int]:
    """Which wholes have elements that none of their rectangles holds, or that several hold.

    `wholes` [m, d] are shapes; rectangle i, at `starts[i]` with `shapes[i]` (both [n, d], the shapes without zeros), is
    one of whole `owners[i]`. See the note "Corners".
    """
    n_wholes, n_dims = wholes.shape
    owner = np.concatenate([owners, np.arange(n_wholes)])
    low = np.concatenate([starts, np.zeros_like(wholes)])
    high = np.concatenate([starts + shapes, wholes])
    # The wholes are taken off what their rectangles add up to.
    sign = np.concatenate([np.ones(len(owners)), -np.ones(n_wholes)])

    # A row per rectangle, a column per corner; `corner` numbers the places where corners of one owner lie.
    corner = owner[:, None]
    signs = sign[:, None]
    for d in range(n_dims):
        ends = np.stack([low[:, d], high[:, d]], axis=1)
        end = np.unique(ends, return_inverse=True)[1].reshape(ends.shape)
        pairs = corner[:, :, None] * (end.max(initial=0) + 1) + end[:, None, :]
        signs = (signs[:, :, None] * np.array([1.0, -1.0])).reshape(len(owner), -1)
        # Numbered anew, so that the products stay far below 2^63.
        corner = np.unique(pairs, return_inverse=True)[1].reshape(signs.shape)
    # Sums of at most a few million ones: exact.
    sums = np.bincount(corner.ravel(), weights=signs.ravel())
    is_left = (sums[corner] != 0).any(axis=1)
    return np.unique(owner[is_left]).tolist()
