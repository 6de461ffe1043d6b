"""When checkpoints are written and how many are kept, and the weights that a run starts with."""

from typing import Literal

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeCount, PositiveInt


class CheckpointSpec(Frozen):
    """Checkpoints of a run. One is always written at the last step and when the run is asked to stop."""

    every: NonNegativeCount = 0
    """Steps between checkpoints; 0 writes only at the end."""
    keep: PositiveInt | Literal["all"] = 2
    """How many of the newest good checkpoints stay on disk. all: every one; the disk has to hold them."""
    keep_every: NonNegativeCount = 0
    """Beside the newest, those stay whose step is a multiple of this; 0: none."""
    keep_best: NonNegativeCount = 0
    """Beside the newest, so many with the lowest losses stay, of those after whose step the run was evaluated."""
    best_by: str = Field("mean", min_length=1)
    """Whose loss that is: an evaluation set's, by its name in data.valid, or mean, of all sets."""
    saving: Literal["blocking", "async"] = "blocking"
    """Whether training waits while a checkpoint is written. async: the state is copied into the CPU's memory, which
    holds it once, and another process writes it from there; a save that is due before the last one is written waits."""
    retries: NonNegativeCount = 1
    """How often a save that failed is tried again before the run ends: in fallback_dir, or where it failed."""
    fallback_dir: str | None = Field(None, min_length=1)
    """Where a save goes that the run folder did not take, on another disk that all ranks see. The next start moves it
    into the run folder, or goes on from it where it is. None: there is no other place."""
    copy_to: str | None = Field(None, min_length=1)
    """URL to which each published checkpoint is copied, beside training, and read back: `s3://bucket/run`, or another
    scheme of fsspec's. What is deleted in the run folder is deleted there. It is this run's alone; points of a sweep
    copy to `URL/NAME`, each by its name. None: there are no copies."""
    last: Literal["training", "weights"] = "training"
    """What the checkpoint of the last step holds. weights: them alone, without optimizer state, in a fraction of the
    bytes; all before it are whole, so that an interrupted run goes on, a finished one can't be trained further."""


class Renaming(Frozen):
    """Where weights of this run are called otherwise in what they are read from."""

    name: str = Field(min_length=1)
    """Name of a weight of this run, or how several begin: `layers.4.`."""
    source: str = Field(min_length=1)
    """What stands there in its place: `layers.2.`."""


class InitSpec(Frozen):
    """The weights that a run starts with. What says nothing is drawn from train.seed."""

    from_hf: str | None = Field(None, min_length=1)
    """Folder of Hugging Face's with config.json and safetensors files. Each rank reads the slices that it owns."""
    load: str | None = Field(None, min_length=1)
    """Folder of a run, of which the weights alone are taken: steps, optimizer and data order begin anew."""
    step: NonNegativeCount | None = None
    """Checkpoint of that run. None: its newest good one."""
    include: tuple[str, ...] = ("*",)
    """Names of weights of this run that are read, as patterns with * and ?: `layers.*`."""
    exclude: tuple[str, ...] = ()
    """Those that are not, though `include` names them."""
    rename: tuple[Renaming, ...] = ()
    """What is called otherwise there; the first that fits a name counts."""
    missing: Literal["error", "initialise"] = "error"
    """What becomes of weights that are not read: an error, or they are drawn from train.seed."""

    vocab: Literal["same", "resize"] = "same"
    """What becomes of another vocabulary there. same: it is refused. resize: of the embedding's and the output head's
    rows those are taken that both have, rows beyond are left behind, and the rest of this model's are new."""
    new_rows: Literal["drawn", "mean"] = "drawn"
    """What new rows of init.vocab=resize start from. drawn: train.seed, as all rows of a new model. mean: the mean of
    all rows there, each new row the same."""
    upcycle: Literal["none", "copies"] = "none"
    """How experts begin with the weights of a model without any. copies: each is a copy of the feed-forward layer
    there, and routers are drawn from train.seed (Komatsuzaki et al. 2022, arXiv 2212.05055)."""

    @property
    def is_partial(self) -> bool:
        """Whether less may be read than the whole model."""
        return self.missing != "error" or self.include != ("*",) or bool(self.exclude) or bool(self.rename)
