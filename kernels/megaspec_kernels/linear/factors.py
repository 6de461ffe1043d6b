"""Matrices in fp8, as what casts hand to products."""

from typing import Literal, NamedTuple

from torch import Tensor

Layout = Literal["TN", "NN", "NT"]
"""Of the three products of a layer, in this order: see te.py, note "Layouts"."""


class Factor(NamedTuple):
    """A matrix in fp8 in one layout."""

    values: Tensor
    scale: Tensor


class Cast(NamedTuple):
    """A matrix in fp8. None: a layout that was not asked for."""

    rows: Factor | None
    columns: Factor | None
