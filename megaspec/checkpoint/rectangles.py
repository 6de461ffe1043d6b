"""Rectangles of index space: overlap, difference, and whether a set of them covers another exactly. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The indices start[d] <= i < start[d] + shape[d] of every dimension d."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(s + n for s, n in zip(self.start, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{s}:{s + n}" for s, n in zip(self.start, self.shape, strict=True)) + "]"


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """What both hold, or None when that is nothing."""
    low = tuple(map(max, one.start, other.start))
    shape = tuple(min(a, b) - c for a, b, c in zip(one.stop, other.stop, low, strict=True))
    return Rectangle(low, shape) if all(n > 0 for n in shape) else None


def overlapping(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two of the rectangles that share an element, or None. Sweeps along the dimension with the most starts."""
    if len(rectangles) < 2:
        return None
    n_dims = len(rectangles[0].start)
    if n_dims == 0:
        return rectangles[0], rectangles[1]
    dim = max(range(n_dims), key=lambda d: len({r.start[d] for r in rectangles}))
    active: list[Rectangle] = []
    for one in sorted(rectangles, key=lambda r: r.start[dim]):
        active = [r for r in active if r.start[dim] + r.shape[dim] > one.start[dim]]
        for other in active:
            if intersection(one, other):
                return other, one
        active.append(one)
    return None


def uncovered(whole: Rectangle, parts: Sequence[Rectangle]) -> list[Rectangle]:
    """What of `whole` no part holds, as rectangles that don't overlap."""
    holes = [whole] if whole.numel else []
    for part in parts:
        holes = [rest for hole in holes for rest in _without(hole, part)]
    return holes


def _without(hole: Rectangle, part: Rectangle) -> list[Rectangle]:
    cut = intersection(hole, part)
    if cut is None:
        return [hole]
    rest, start, shape = [], list(hole.start), list(hole.shape)
    for d in range(len(start)):
        end = start[d] + shape[d]
        for low, high in ((start[d], cut.start[d]), (cut.stop[d], end)):
            if high > low:
                rest.append(Rectangle((*start[:d], low, *start[d + 1 :]), (*shape[:d], high - low, *shape[d + 1 :])))
        start[d], shape[d] = cut.start[d], cut.shape[d]
    return rest
