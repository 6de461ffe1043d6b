"""What tells gated activations apart."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

GateActivation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]


@dataclass(frozen=True)
class GatedForm:
    """activation(gate) · up, or with a `limit` (up + 1) · gate · sigmoid(alpha · gate), the gate bounded by it from
    above and up from both sides."""

    activation: GateActivation = "silu"
    """Without a limit."""
    limit: float | None = None
    alpha: float = 1.0
    code: str = field(init=False)
    """All of it for operations that torch.compile leaves whole; see NormForm.code."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", f"{self.activation} {self.limit!r} {self.alpha!r}")


class Decoded(NamedTuple):
    """What a code says."""

    activation: str
    has_limit: bool
    limit: float
    alpha: float


def decoded(code: str) -> Decoded:
    """Of GatedForm.code."""
    activation, limit, alpha = code.split()
    if limit == "None":
        return Decoded(activation, False, 0.0, float(alpha))
    return Decoded(activation, True, float(limit), float(alpha))
