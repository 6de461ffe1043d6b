"""Feed-forward layers."""

from typing import Annotated, Literal

from megaspec.core.frozen import Frozen, PositiveFloat
from megaspec.core.kinds import Kinds
from megaspec.core.part_facts import PartFacts
from megaspec.nn.mlp.facts import ActivationFacts, FeedForwardPlace, mlp_facts

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]
"""gelu_tanh: GPT-2's form of GELU. quick_gelu: x · sigmoid(1.702 x), CLIP's form. relu_squared: So et al. 2021."""


class MlpSpec(Frozen):
    """A feed-forward layer: what every kind of it says of itself."""

    def automatic_width(self, d_model: int) -> tuple[int, str]:
        """The width of model.d_ffn=auto, and how it comes about."""
        return 4 * d_model, "4 model.d_model"

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        """Of a layer whose width between its products is `d_ffn`."""
        raise NotImplementedError


class GatedMlpSpec(MlpSpec):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020)."""

    kind: Literal["gated"] = "gated"
    activation: Activation = "silu"
    """Of the gate."""
    bias: bool = False
    """Add learned vectors to the outputs of all three products."""

    def automatic_width(self, d_model: int) -> tuple[int, str]:
        # three matrices of it have 8 d_model² weights, as two of 4 d_model have
        return max(64, 8 * d_model // 3 // 64 * 64), "8/3 model.d_model, rounded down to 64"

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        # the activated gate waits for the product with the rest, a ReLU for its square, a sigmoid for its gate
        between = 2 if self.activation in ("relu_squared", "quick_gelu") else 1
        activation = ActivationFacts(gates=2, kept_between=between, operation="gated")
        return mlp_facts(activation, into="w_gate_up", bias=self.bias, d_model=d_model, d_ffn=d_ffn, place=place)


class PlainMlpSpec(MlpSpec):
    """down(activation(up(x)))."""

    kind: Literal["plain"]
    activation: Activation = "gelu_tanh"
    """Between both products."""
    bias: bool = False
    """Add learned vectors to the outputs of both products."""

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        # a ReLU needs its own result alone, which waits for the square where there is one, as a sigmoid for its factor
        activation = ActivationFacts(
            keeps_input=not self.activation.startswith("relu"),
            kept_between=int(self.activation in ("relu_squared", "quick_gelu")),
        )
        return mlp_facts(activation, into="w_up", bias=self.bias, d_model=d_model, d_ffn=d_ffn, place=place)


class ClampedMlpSpec(MlpSpec):
    """down((up + 1) · gate · sigmoid(alpha · gate)), as in gpt-oss: the gate is at most `limit`, up lies in ± limit."""

    kind: Literal["clamped"]
    limit: PositiveFloat = 7.0
    """Bound of the gate from above, and of what it multiplies from both sides."""
    alpha: PositiveFloat = 1.702
    """Steepness of the gate's sigmoid."""
    bias: bool = False
    """Add learned vectors to the outputs of all three products."""

    def automatic_width(self, d_model: int) -> tuple[int, str]:
        return GatedMlpSpec().automatic_width(d_model)

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        # both after their bounds, the sigmoid, and its product with the gate
        activation = ActivationFacts(gates=2, kept_between=4, operation="gated")
        return mlp_facts(activation, into="w_gate_up", bias=self.bias, d_model=d_model, d_ffn=d_ffn, place=place)


MLP_KINDS = Kinds()
AnyMlp = Annotated[GatedMlpSpec | PlainMlpSpec | ClampedMlpSpec, MLP_KINDS]
