"""What strategies have to know of a parameter beside its shape. A model says it, strategies read it, and no name of a
parameter stands in either's way."""

from dataclasses import dataclass
from typing import Literal

Stands = Literal["embedding", "layer", "last norm", "head"]
"""Where in a model a parameter stands. embedding: tokens and positions. head: the output head's matrix and bias."""


@dataclass(frozen=True)
class WeightFacts:
    """Of one parameter of the whole model."""

    stands: Stands = "layer"
    """A tied table stands in the embedding."""
    is_table: bool = False
    """Rows to look up by number: their gradient needs the numbers alone, not the table."""
    is_tied: bool = False
    """The embedding's table, and the output head's weight: used in the first unit of the model and in the last."""
    layer: int | None = None
    """The number of the layer that it stands in; None: it stands in none."""
    is_trained: bool = True
    """False: frozen, so that nobody makes, adds up or keeps a gradient of it."""
    is_expert: bool = False
    """Experts' matrices and biases, which lie on the expert grid of core/axes.py."""
