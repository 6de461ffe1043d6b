"""A plugin: a model whose feed-forward layer squares its ReLU, Lion, a CSV of losses, and a source
that counts."""

from typing import Literal

from megaspec.core.frozen import Frozen, PositiveInt, Probability
from megaspec.data.spec import DataSpec
from megaspec.model.gpt.spec import GptSpec
from megaspec.optim.spec import SgdSpec
from megaspec.plugins import Part, Plugin


class SquaredSpec(GptSpec):
    """GPT-2 with a squared ReLU (So et al. 2021)."""

    kind: Literal["squared"]
    power: PositiveInt = 2
    """Exponent of the ReLU."""


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
    models=(Part(SquaredSpec, "tiny_plugin.build:squared"),),
    optimizers=(Part(LionSpec, "tiny_plugin.build:Lion"),),
    sinks=(Part(CsvSpec, "tiny_plugin.build:Csv"),),
    sources=(Part(CountSpec, "tiny_plugin.build:Count"),),
)
