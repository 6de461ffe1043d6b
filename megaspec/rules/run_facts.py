"""What the resolver has to know about data and run folders, gathered before it so that it stays pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaspec.core.document_lengths import Lengths
from megaspec.core.errors import Problem
from megaspec.data.urls import RemoteData
from megaspec.recipe import ModelSpec


@dataclass(frozen=True)
class SourceFacts:
    """The folder with whose weights a run is to begin."""

    key: str
    """`init.from_hf` or `init.load`."""
    path: str
    """As it was given."""
    problem: str = ""
    """Why it can't be read; "" where it can."""
    model: ModelSpec | None = None
    """None: it can't be read."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of its weights, by the names under which a checkpoint keeps them."""
    digest: str = ""
    """As in WeightsOrigin; of a folder of Hugging Face's "" until a run begins, since all of it is read for it."""
    step: int | None = None
    """Of the checkpoint; None: a folder of Hugging Face's."""
    family: str | None = None
    """Its `model_type`, also where a run had it from there."""


@dataclass(frozen=True)
class RunStart:
    """With what a run begins."""

    step: int = 0
    """Optimizer steps that are done: in a fork those of its checkpoint."""
    lr: float = 0.0
    """Learning rate at that step, of the run that a fork is from; 0 in a run that is none."""


@dataclass(frozen=True)
class SetFacts:
    """Of one evaluation set of `data.valid`."""

    vocab_size: int | None = None
    """Token ids are below it; None where nothing says so."""
    samples: int | None = None
    """Whole sequences in one pass; None for sources without end."""


@dataclass(frozen=True)
class Facts:
    """Plain data. `gather_facts` in gather.py reads it from disk."""

    run_dir: str
    """A folder for the run that is free, for run_dir=auto."""
    started_in: str = ""
    """The folder from which relative paths are meant; "" where nobody knows it."""
    vocab_size: int | None = None
    """Of the data's tokenizer; None where the data does not say or is not there."""
    train_tokens: int | None = None
    """Tokens of the training split in one pass; None for sources without end."""
    train_samples: int | None = None
    """Whole sequences of the training split in one pass; None for sources without end."""
    valid_tokens: int | None = None
    """Tokens of the validation split; None for sources without end."""
    valid_sets: Mapping[str, SetFacts] = field(default_factory=dict)
    """By name, of the sets of data.valid that can be read."""
    document_lengths: Lengths = ()
    """Of training data with a document mask, see DataFacts; (): not known."""
    how_lengths: str = ""
    """Where they are from, or how they can be known."""
    fingerprint: str = ""
    """Changes with the content of the data; "" for data that is made as it is read, or not there."""
    weights: SourceFacts | None = None
    """Where the weights begin; None: nowhere but in train.seed."""
    problems: tuple[Problem, ...] = ()
    """Data that is missing or damaged."""
    remote: tuple[RemoteData, ...] = ()
    """What lies at the URLs of data, of those that could be read."""
    start: RunStart = RunStart()
    """With what the run begins. Of a fork the resolver knows it, since the run that it is from is one of its inputs."""
