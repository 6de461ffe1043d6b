"""Feed-forward layers."""

from typing import Annotated, Literal

from megaspec.core.frozen import Frozen
from megaspec.core.kinds import Kinds
from megaspec.core.part_facts import PartFacts
from megaspec.nn.mlp.facts import ActivationFacts, FeedForwardPlace, mlp_facts

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
"""gelu_tanh: GPT-2's form of GELU. relu_squared: So et al. 2021."""


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
        # the activated gate waits for the product with the rest, and a ReLU for its square
        between = 2 if self.activation == "relu_squared" else 1
        activation = ActivationFacts(gates=2, kept_between=between)
        return mlp_facts(activation, into="w_gate_up", bias=self.bias, d_model=d_model, d_ffn=d_ffn, place=place)


class PlainMlpSpec(MlpSpec):
    """down(activation(up(x)))."""

    kind: Literal["plain"]
    activation: Activation = "gelu_tanh"
    """Between both products."""
    bias: bool = False
    """Add learned vectors to the outputs of both products."""

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        # a ReLU needs its own result alone, which waits for the square where there is one
        activation = ActivationFacts(
            keeps_input=not self.activation.startswith("relu"), kept_between=int(self.activation == "relu_squared")
        )
        return mlp_facts(activation, into="w_up", bias=self.bias, d_model=d_model, d_ffn=d_ffn, place=place)


MLP_KINDS = Kinds()
AnyMlp = Annotated[GatedMlpSpec | PlainMlpSpec, MLP_KINDS]
