"""Which norm a model has."""

from typing import Annotated, ClassVar, Literal

from megaspec.core.frozen import Frozen, PositiveFloat
from megaspec.core.kinds import Kinds
from megaspec.core.part_facts import Execution, PartFacts, Vector
from megaspec.nn.norm.facts import gain_and_bias, norm_facts

WeightForm = Literal["scale", "one_plus", "none"]


class NormSpec(Frozen):
    """A norm: what every kind of them says of itself."""

    statistics: ClassVar[int]
    """Sums of a row that wait for the backward pass."""
    has_kernel: ClassVar[bool] = False
    """The operation `norm` of kernels/ computes it, but for norms of heads."""

    @property
    def head_eps(self) -> float:
        """What a norm of query and key heads without a weight adds to their mean square."""
        return 1e-5

    def vectors(self, width: int, *, name: str) -> tuple[Vector, ...]:
        """Its parameters over `width` features. `name`: of its module."""
        raise NotImplementedError

    def wide_copies(self, execution: Execution) -> int:
        """How often plain operations keep the input in at least fp32, in place of the input itself."""
        raise NotImplementedError

    def facts(self, width: int, *, name: str, acts_on_heads: bool = False, feeds_product: bool = True) -> PartFacts:
        """Of a norm over `width` features. `name`: of its module. `acts_on_heads`: on each head, not on each token.
        `feeds_product`: a matrix product takes and keeps its output."""
        return norm_facts(self, width, name=name, acts_on_heads=acts_on_heads, feeds_product=feeds_product)


class RmsNormSpec(NormSpec):
    """x / rms(x) · weight (Zhang and Sennrich 2019)."""

    kind: Literal["rms"] = "rms"
    eps: PositiveFloat = 1e-5
    """Added to the mean square."""
    weight: WeightForm = "scale"
    """What the normed input is multiplied by. scale: a weight that starts at 1. one_plus: 1 plus a weight that starts
    at 0, as Gemma has it, so that weight decay pulls toward 1. none: nothing."""

    # the root of the mean square
    statistics: ClassVar[int] = 1
    has_kernel: ClassVar[bool] = True

    @property
    def head_eps(self) -> float:
        return self.eps

    def vectors(self, width: int, *, name: str) -> tuple[Vector, ...]:
        return gain_and_bias(self.weight, width, name=name)

    def wide_copies(self, execution: Execution) -> int:
        if execution.is_compiled:
            return 0
        # before it is divided, and where a weight multiplies it afterwards, divided
        return 1 if self.weight == "none" else 2


class LayerNormSpec(NormSpec):
    """(x - mean) / std · weight + bias (Ba et al. 2016)."""

    kind: Literal["layer"]
    eps: PositiveFloat = 1e-5
    """Added to the variance."""
    weight: WeightForm = "scale"
    """What the normed input is multiplied by. scale: a weight that starts at 1. one_plus: 1 plus a weight that starts
    at 0. none: nothing."""
    bias: bool = True
    """Add a learned vector that starts at 0."""

    # the mean, and what the rest is divided by
    statistics: ClassVar[int] = 2
    has_kernel: ClassVar[bool] = True

    @property
    def head_eps(self) -> float:
        return self.eps

    def vectors(self, width: int, *, name: str) -> tuple[Vector, ...]:
        return gain_and_bias(self.weight, width, name=name, bias=self.bias)

    def wide_copies(self, execution: Execution) -> int:
        return 2 if self.weight == "one_plus" and not execution.is_compiled else 0


NORM_KINDS = Kinds()
AnyNorm = Annotated[RmsNormSpec | LayerNormSpec, NORM_KINDS]
