"""Which parameters of a model are matrices of hidden layers, and how many of them one parameter holds."""

from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from megaspec.nn.linear import Linear
from megaspec.nn.router import Router


@dataclass(frozen=True)
class Matrix:
    """The rows [first, last) of a global two-dimensional parameter, [O, I]."""

    first: int
    last: int


def consecutive(*sizes: int) -> tuple[Matrix, ...]:
    """Matrices that lie one below the other."""
    ends = list(accumulate(sizes))
    return tuple(Matrix(end - size, end) for size, end in zip(sizes, ends, strict=True))


def matrices_of(model: nn.Module) -> dict[str, tuple[Matrix, ...]]:
    """The hidden matrices of a model that is not split yet, by parameter: each part of a linear layer is one.

    Embeddings, output heads, routers and vectors are none.
    """
    return {
        f"{name}.weight": consecutive(*module.parts)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not isinstance(module, Router)
    }
