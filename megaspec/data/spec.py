"""Where tokens come from."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import (
    Auto,
    Count,
    Frozen,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    PositiveInt,
)
from megaspec.core.kinds import Kinds

# Version of the rules that make the training order of token files out of a spec. 1 divided a blend's weights by their
# sum once, and built as much of a single weighted data set as of a bare one; 2 does both as Megatron (data/order.py).
ORDER_VERSION = 2
# Of a stream: what a checkpoint notes of each is a few numbers.
MOST_LANES = 2**14


class DataSpec(Frozen):
    """What every source shares."""

    seq_len: PositiveInt
    """Tokens per training sequence."""
    seed: Auto[NonNegativeCount] = "auto"
    """Seed of the data order. auto: train.seed."""
    document_mask: bool = False
    """Attention and positions stop at document bounds inside a packed sequence, and no loss crosses them."""


class BlendPart(Frozen):
    """One data set of a blend."""

    prefix: str
    """Path of the .bin and .idx files without their ending."""
    weight: PositiveFloat | None = None
    """Share of this data set; the weights are divided by their sum. All data sets of a blend have one, or none has:
    then each counts by its sequences, and the blend is one pass at most. A single data set may have one as well: as in
    Megatron 0.5 % more of it is built then than a run needs, which changes the order near the end of an epoch."""


class IndexedSpec(DataSpec):
    """Megatron's .bin/.idx files, one or a weighted blend."""

    kind: Literal["indexed"]
    blend: tuple[BlendPart, ...] = Field(min_length=1)
    """The data sets."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (969.0, 30.0, 1.0)
    """Shares of documents for training, validation and test."""
    cache: Auto[str] = "auto"
    """Folder for index files. auto: `index-cache` beside the first data set."""

    @property
    def weights(self) -> list[float] | None:
        """The data sets' weights as they were given; None where none has one."""
        given = [part.weight for part in self.blend]
        if all(weight is None for weight in given):
            return None
        assert None not in given, f"a blend where only some data sets have a weight: {given}"
        return given


class SyntheticSpec(DataSpec):
    """A learnable sequence that is made as it is read: identical on every machine."""

    kind: Literal["synthetic"]
    vocab_size: PositiveInt = 256
    """Token ids are below this."""
    order: PositiveInt = 1
    """How many previous tokens the next one depends on."""
    noise: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Probability that a token is drawn at random."""
    masked: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of tokens that count nothing in the loss, uneven among sequences."""


class RandomSpec(DataSpec):
    """Uniform random tokens, for measuring speed."""

    kind: Literal["random"]
    vocab_size: PositiveInt
    """Token ids are below this."""


class StreamFiles(Frozen):
    """Text files of a stream."""

    path: str
    """A .jsonl, .ndjson, .txt, .md or .parquet file, a folder of them, or a pattern such as data/*.jsonl."""
    weight: PositiveFloat | None = None
    """Share of these files in the samples; the weights are divided by their sum. All entries have one, or none has:
    then they are one collection, of which a pass takes every document once."""


class StreamSpec(DataSpec):
    """Text files that are tokenized while the run reads them: nothing is prepared before it."""

    kind: Literal["stream"]
    files: tuple[StreamFiles, ...] = Field(min_length=1)
    """Where the text is."""
    tokenizer: str
    """`byte`, a tokenizer.json or a folder with one."""
    key: str = "text"
    """Key of JSON lines, or column of parquet, that holds the text."""
    window: PositiveCount = 1_000_000
    """Bytes of text within which a lane shuffles documents, over all files; a rank holds as many for each of its lanes.
    The stretches of so many bytes are shuffled among themselves, over all files."""
    lanes: Auto[Annotated[Count, Field(gt=0, le=MOST_LANES)]] = "auto"
    """Rows of documents, each packed for itself: sample i is the next one of lane i modulo lanes. A rank tokenizes the
    lanes that it takes samples of. auto: the largest divisor of every global batch that is at most 256."""
    bad_lines: Literal["refuse", "skip"] = "refuse"
    """What happens at a line that is no document: the run ends, or the line is left out and counted."""
    workers: Annotated[Count, Field(ge=0, le=256)] = 1
    """Processes of each rank that tokenize ahead of it; 0: the rank does it itself. Changes nothing in the order."""


SOURCE_KINDS = Kinds()
DataSource = Annotated[IndexedSpec | SyntheticSpec | RandomSpec | StreamSpec, SOURCE_KINDS]
