"""A plugin: a feed-forward layer with a power of a ReLU, a norm without statistics, a family with fewer attention
layers, Lion, a CSV of losses, and a source that counts. Imports no torch."""

from typing import ClassVar, Literal

from megaspec.core.frozen import Frozen, PositiveFloat, PositiveInt, Probability
from megaspec.core.part_facts import Execution, PartFacts, Vector
from megaspec.data.spec import DataSpec
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.layer.spec import Mixer
from megaspec.nn.mlp.facts import ActivationFacts, FeedForwardPlace, mlp_facts
from megaspec.nn.mlp.spec import MlpSpec
from megaspec.nn.norm.spec import NormSpec
from megaspec.optim.spec import SgdSpec
from megaspec.plugins import Kind, Plugin


class SquaredSpec(MlpSpec):
    """down(relu(up(x)) ^ power) (So et al. 2021)."""

    kind: Literal["squared"]
    power: PositiveInt = 2
    """Exponent of the ReLU."""

    def facts(self, *, d_model: int, d_ffn: int, place: FeedForwardPlace) -> PartFacts:
        # the ReLU's own result is enough for its backward pass, and waits for that of the power
        activation = ActivationFacts(keeps_input=False, kept_between=1)
        return mlp_facts(activation, into="w_up", bias=False, d_model=d_model, d_ffn=d_ffn, place=place)


class TanhSpec(NormSpec):
    """tanh(alpha x) · weight + bias in place of a norm (Zhu et al. 2025)."""

    kind: Literal["tanh"]
    alpha: PositiveFloat = 0.5
    """Where the one factor of the input starts."""

    # nothing is summed over a row
    statistics: ClassVar[int] = 0

    def vectors(self, width: int, *, name: str) -> tuple[Vector, ...]:
        return (
            Vector(f"{name}.alpha", 1, self.alpha),
            Vector(f"{name}.weight", width, 1.0),
            Vector(f"{name}.bias", width, 0.0),
        )

    def wide_copies(self, execution: Execution) -> int:
        # beside the input, the tanh in at least fp32
        return 0 if execution.is_compiled else 2


class SparseSpec(DecoderSpec):
    """A decoder of which only some layers have attention; the others have a feed-forward layer alone."""

    kind: Literal["sparse"]
    every: PositiveInt = 2
    """Layers from one with attention to the next, the first of all included."""

    @property
    def mixers(self) -> tuple[tuple[Mixer, ...], ...]:
        layers = []
        for number in range(self.n_layers):
            layers.append(("attention", "mlp") if number % self.every == 0 else ("mlp",))
        return tuple(layers)


class LionSpec(SgdSpec):
    """Lion (Chen et al. 2023): the sign of a moving average; `momentum` is its second beta."""

    kind: Literal["lion"]
    beta: Probability = 0.9
    """Weight of the moving average in the step that is taken."""


class CsvSpec(Frozen):
    """A line per step: step and loss."""

    kind: Literal["csv"]
    file: str = "loss.csv"
    """Name in the run folder."""


class CountSpec(DataSpec):
    """0, 1, 2, ... from a number that the position in the order chooses."""

    kind: Literal["count"]
    vocab_size: PositiveInt = 16
    """Counts begin again at this."""


PLUGIN = Plugin(
    models=(Kind(SparseSpec, "megaspec.model.decoder.model:decoder"),),
    norms=(Kind(TanhSpec, "tiny_plugin.build:Tanh"),),
    mlps=(Kind(SquaredSpec, "tiny_plugin.build:SquaredMlp"),),
    optimizers=(Kind(LionSpec, "tiny_plugin.build:Lion"),),
    sinks=(Kind(CsvSpec, "tiny_plugin.build:Csv"),),
    sources=(Kind(CountSpec, "tiny_plugin.build:Count"),),
)
