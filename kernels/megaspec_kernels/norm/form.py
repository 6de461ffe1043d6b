"""What tells norms apart."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

NormKind = Literal["rms", "layer"]
Gain = Literal["scale", "one_plus", "none"]


@dataclass(frozen=True)
class NormForm:
    """rms: x / rms(x). layer: (x - mean) / std. Times the weight, times 1 plus it, or times nothing; plus a bias where
    there is one."""

    kind: NormKind
    gain: Gain
    eps: float
    scale: float = 1.0
    """Of a term that is added before it."""
    code: str = field(init=False)
    """All of it for operations that torch.compile leaves whole. A constant to the compiler, as text is: it makes an
    input of a number that it has seen change, and autograd's functions take none (torch 2.13)."""

    @property
    def is_scaled(self) -> bool:
        return self.scale != 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", f"{self.kind} {self.gain} {self.eps!r} {self.scale!r}")


class Decoded(NamedTuple):
    """What a code says."""

    kind: str
    gain: str
    eps: float
    scale: float


def decoded(code: str) -> Decoded:
    """Of NormForm.code."""
    kind, gain, eps, scale = code.split()
    return Decoded(kind, gain, float(eps), float(scale))


Normed = tuple[Tensor, Tensor]
"""The stream, and what a norm makes of it."""
