"""How a score is made of a query and a key: what a model says to every implementation. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scoring:
    """cap · tanh(scale · q kᵀ / cap), before the mask."""

    scale: float | None = None
    """None: one over the root of the size of a head."""
    cap: float | None = None
    """Scores stay between -cap and cap. None: they are not capped."""

    def scale_of(self, d_head: int) -> float:
        """The factor on q kᵀ of heads of this size."""
        if self.scale is None:
            return d_head**-0.5
        return self.scale


PLAIN = Scoring()
"""q kᵀ / √H."""
