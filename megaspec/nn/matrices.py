"""Which parameters of a model are matrices of hidden layers, and how many of them one parameter holds."""

from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from megaspec.nn.linear import Linear


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
    """The hidden matrices of a model that is not split yet, by parameter.

    Those of every Linear, each of its parts one; a module of another kind tells its own in `matrices()`, by the name of
    the parameter inside it. Embeddings, output heads and vectors are none.
    """
    found: dict[str, tuple[Matrix, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[f"{name}.weight"] = consecutive(*module.parts)
        elif callable(getattr(module, "matrices", None)):
            found |= {f"{name}.{parameter}": held for parameter, held in module.matrices().items()}
    return found
