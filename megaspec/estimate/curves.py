"""Measured times over a grid of sizes. Torch-free."""

from bisect import bisect_right
from math import exp, log, prod
from typing import Annotated, Self

from pydantic import Field, model_validator

from megaspec.core.frozen import Frozen

Size = Annotated[float, Field(ge=1, le=1e18)]
Seconds = Annotated[float, Field(ge=1e-9, le=1e6)]


class Curve(Frozen):
    """Seconds of a piece of work by its sizes.

    Between the points the logarithm of the time is linear in the logarithm of each size, so that the points come out
    as they were measured and work that grows never gets faster. Below the first size of an axis the time is that of
    the first, where starting the work takes longer than doing it; above the last it grows with the size.
    """

    sizes: tuple[tuple[Size, ...], ...]
    """The points of each axis, ascending."""
    seconds: tuple[Seconds, ...]
    """One for each point of the grid, the last axis fastest."""

    @model_validator(mode="after")
    def _is_a_grid(self) -> Self:
        if not self.sizes or any(not axis or list(axis) != sorted(set(axis)) for axis in self.sizes):
            raise ValueError("every axis of sizes must ascend")
        points = prod(len(axis) for axis in self.sizes)
        if len(self.seconds) != points:
            raise ValueError(f"{len(self.seconds)} seconds for a grid of {points} points")
        return self

    def at(self, *wanted: float) -> float:
        """Seconds of one piece of work, a positive size for each axis."""
        grown = 0.0
        corners = [(0, 1.0)]
        for axis, size in zip(self.sizes, wanted, strict=True):
            grown += max(0.0, log(size / axis[-1]))
            inside = min(max(size, axis[0]), axis[-1])
            left = max(0, min(bisect_right(axis, inside) - 1, len(axis) - 2))
            share = log(inside / axis[left]) / log(axis[left + 1] / axis[left]) if len(axis) > 1 else 0.0
            corners = [
                (point * len(axis) + left + step, weight * part)
                for point, weight in corners
                for step, part in ((0, 1 - share), (1, share))
                if part > 0
            ]
        return exp(grown + sum(weight * log(self.seconds[point]) for point, weight in corners))


def never_faster(sizes: tuple[tuple[float, ...], ...], seconds: list[float]) -> list[float]:
    """Measured times in which no point is below a point of smaller sizes, what noise and lucky shapes can make."""
    out = list(seconds)
    stride = len(out)
    for axis in sizes:
        stride //= len(axis)
        for point in range(len(out)):
            if point // stride % len(axis):
                out[point] = max(out[point], out[point - stride])
    return out
