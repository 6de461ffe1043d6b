"""The whole of a recipe, typed."""

from typing import Annotated

from pydantic import Field

from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.core.frozen import Auto, Frozen
from megaspec.data.spec import DataSource
from megaspec.launcher.spec import LauncherSpec
from megaspec.log.spec import LogSpec
from megaspec.model.gpt.spec import GptSpec
from megaspec.model.llama.spec import LlamaSpec
from megaspec.optim.spec import OptimSpec
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.precision.spec import PrecisionSpec
from megaspec.train.spec import TrainSpec
from megaspec_kernels.spec import KernelsSpec

ModelSpec = Annotated[LlamaSpec | GptSpec, Field(discriminator="kind")]

# The sections that are chosen by group: conf/<section>/<choice>.yaml, `section=choice`.
SECTIONS = (
    "model",
    "parallelism",
    "precision",
    "data",
    "optim",
    "kernels",
    "train",
    "checkpoint",
    "log",
    "launcher",
)


class Recipe(Frozen):
    """What a user wrote. May say "auto"."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run: letters, digits, dot, dash, underscore."""
    run_dir: Auto[str] = "auto"
    """Folder of the run. auto: runs/<name>, or runs/<name>-2, -3, ... when that exists."""
    model: ModelSpec
    parallelism: ParallelismSpec = ParallelismSpec()
    precision: PrecisionSpec
    data: DataSource
    optim: OptimSpec
    kernels: KernelsSpec = KernelsSpec()
    train: TrainSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    log: LogSpec = LogSpec()
    launcher: LauncherSpec = LauncherSpec()
