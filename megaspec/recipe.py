"""The whole of a recipe, typed."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from megaspec.checkpoint.spec import CheckpointSpec, InitSpec
from megaspec.core.frozen import Auto, Frozen
from megaspec.core.kinds import Kinds
from megaspec.data.spec import DataSource
from megaspec.launcher.spec import LauncherSpec, LocalLauncher
from megaspec.log.spec import LogSpec
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.optim.spec import OptimSpec
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.precision.spec import PrecisionSpec
from megaspec.profiling.spec import ProfileSpec
from megaspec.train.spec import TrainSpec
from megaspec_kernels.spec import KernelsSpec

MODEL_KINDS = Kinds()
ModelSpec = Annotated[DecoderSpec, MODEL_KINDS]


@dataclass(frozen=True)
class Section:
    """Where a section of a recipe is typed and where it is built. conf/<section>/<choice>.yaml holds its choices."""

    typed: tuple[str, ...]
    """Modules of its classes."""
    built: str
    """`module:name` of what turns it into something that runs."""


SECTIONS: dict[str, Section] = {
    "model": Section(("megaspec.model.decoder.spec",), "megaspec.model.builders:MODELS"),
    "parallelism": Section(("megaspec.parallelism.spec",), "megaspec.runtime.build:build"),
    "precision": Section(("megaspec.precision.spec",), "megaspec.precision.scaler:build_scaler"),
    "data": Section(("megaspec.data.spec",), "megaspec.data.loader:SOURCES"),
    "optim": Section(("megaspec.optim.spec",), "megaspec.optim.optimizer:build_optimizer"),
    "kernels": Section(("megaspec_kernels.spec",), "megaspec_kernels.registry:REGISTRY"),
    "train": Section(("megaspec.train.spec",), "megaspec.runtime.loop:Run"),
    "checkpoint": Section(("megaspec.checkpoint.spec",), "megaspec.checkpoint.store:Store"),
    "log": Section(("megaspec.log.spec",), "megaspec.log.sinks:SINKS"),
    "launcher": Section(("megaspec.launcher.spec",), "megaspec_launchers.local:launch"),
}


class AboutSpec(Frozen):
    """What a recipe is for and where its numbers are from. Says nothing to the run."""

    purpose: str = ""
    """One sentence."""
    source: str = ""
    """Paper, model card or article that the numbers are from."""
    hardware: str | None = None
    """GPUs that the source names: a name that `hardware=` knows. None: it names none."""


class Recipe(Frozen):
    """What a user wrote. May say "auto"."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run: letters, digits, dot, dash, underscore."""
    run_dir: Auto[str] = "auto"
    """Folder of the run. auto: runs/<name>, or runs/<name>-2, -3, ... when that exists."""
    about: AboutSpec = AboutSpec()
    """Purpose and provenance."""
    model: ModelSpec
    parallelism: ParallelismSpec = ParallelismSpec()
    precision: PrecisionSpec
    data: DataSource
    optim: OptimSpec
    kernels: KernelsSpec = KernelsSpec()
    train: TrainSpec
    init: InitSpec = InitSpec()
    """The weights that the run starts with."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    log: LogSpec = LogSpec()
    profile: ProfileSpec = ProfileSpec()
    launcher: LauncherSpec = LocalLauncher()
