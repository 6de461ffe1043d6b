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
        if not self.sizes:
            raise ValueError("every axis of sizes must ascend")
        for axis in self.sizes:
            if not axis or list(axis) != sorted(set(axis)):
                raise ValueError("every axis of sizes must ascend")
        points = prod(len(axis) for axis in self.sizes)
        if len(self.seconds) != points:
            raise ValueError(f"{len(self.seconds)} seconds for a grid of {points} points")
        return self

    def at(self, *wanted: float) -> float:
        """Seconds of one piece of work, a positive size for each axis."""
        # logarithm of what sizes above the last point add
        grown = 0.0
        # the points of the grid around the wanted one so far, each with its weight in the mean of logarithms
        corners = [(0, 1.0)]
        for axis, size in zip(self.sizes, wanted, strict=True):
            grown += max(0.0, log(size / axis[-1]))
            left, share = _between(axis, size)
            around = []
            for point, weight in corners:
                neighbour = point * len(axis) + left
                if share < 1:
                    around.append((neighbour, weight * (1 - share)))
                if share > 0:
                    around.append((neighbour + 1, weight * share))
            corners = around
        return exp(grown + sum(weight * log(self.seconds[point]) for point, weight in corners))


def _between(axis: tuple[float, ...], size: float) -> tuple[int, float]:
    """The point of an axis left of a size, and how far the size is on the way to the next one, by logarithms."""
    inside = min(max(size, axis[0]), axis[-1])
    if len(axis) == 1:
        return 0, 0.0
    left = max(0, min(bisect_right(axis, inside) - 1, len(axis) - 2))
    share = log(inside / axis[left]) / log(axis[left + 1] / axis[left])
    return left, share


def never_faster(sizes: tuple[tuple[float, ...], ...], seconds: list[float]) -> list[float]:
    """Measured times in which no point is below a point of smaller sizes, what noise and lucky shapes can make."""
    out = list(seconds)
    # points of the grid between two neighbours on the axis: the last axis is fastest
    stride = len(out)
    for axis in sizes:
        stride //= len(axis)
        for point in range(len(out)):
            if point // stride % len(axis):
                out[point] = max(out[point], out[point - stride])
    return out
