"""Where tokens come from."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megaspec.core.document_lengths import Lengths, begun_at_random
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
from megaspec.core.kinds import Kinds, tags_of

# Version of the rules that make the training order of token files out of a spec. 1 divided a blend's weights by their
# sum once, and built as much of a single weighted data set as of a bare one; 2 does both as Megatron (data/order.py).
ORDER_VERSION = 2
# With a document mask, each token of synthetic data begins a new document with this probability.
SYNTHETIC_DOCUMENT_RATE = 1 / 32
# Relative to where a run is started, beside run folders.
DOWNLOADS = "runs/downloads"
# Of a stream: what a checkpoint notes of each is a few numbers.
MOST_LANES = 2**14


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""Name of an evaluation set: a part of dotted paths and of TensorBoard's, so it holds no dot and no slash."""
# What an editor is told of evaluation sets: each may leave out what follows the training data.
_SETS_SCHEMA = {"type": "object", "additionalProperties": {"type": ["object", "string"]}}
KnownLengths = Annotated[Lengths, Field(min_length=1)]
"""A histogram that somebody has counted."""


class DataSpec(Frozen):
    """What every source shares."""

    OWN: ClassVar[frozenset[str]] = frozenset()
    """Fields that say which data it is: an evaluation set of the same kind takes none of them from the training data.
    """
    WHOLE: ClassVar[Mapping[str, Any]] = {}
    """What an evaluation set has in fields that it leaves out, so that all of its data is read as the split `valid`."""

    seq_len: PositiveInt
    """Tokens per training sequence."""
    seed: Auto[NonNegativeCount] = "auto"
    """Seed of the data order. auto: train.seed."""
    document_mask: bool = False
    """Attention and positions stop at document bounds inside a packed sequence, and no loss crosses them."""
    document_lengths: Auto[KnownLengths] | None = "auto"
    """With a document mask: how long documents are, which decides what attention costs in plan and tune, and nothing of
    a run. auto: what `megaspec data inspect` has counted of token files, or what a made source makes of its settings,
    else null. null: not known, a row counts as one document. Bins as `megaspec data inspect --json` prints them."""
    valid: Annotated[dict[SetName, "DataSource"], WithJsonSchema(_SETS_SCHEMA)] = Field(
        {}, exclude_if=lambda sets: not sets
    )
    """Evaluation sets by name, each with a loss of its own: {web: data/web, code: {blend: [{prefix: data/code}]}}. A
    text is the prefix of token files. What a set leaves out follows the training data; it is read whole, in a fixed
    order. Empty: the second share of `split`."""

    @property
    def made_lengths(self) -> Lengths:
        """How long documents are that are made as they are read; (): the settings don't say."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _sets_follow(cls, said: Any, info: ValidationInfo) -> Any:
        """What evaluation sets leave out is said for them."""
        if info.mode == "json":
            # what comes from here is read as Python's, where a list stands for no tuple
            said = _with_tuples(said)
        if not isinstance(said, Mapping) or not isinstance(said.get("valid"), Mapping):
            return said
        sets = {name: _whole_set(one, training=said) for name, one in said["valid"].items()}
        return {**said, "valid": sets}

    @field_validator("valid")
    @classmethod
    def _sets_hold_none(cls, sets: dict[str, "DataSpec"]) -> dict[str, "DataSpec"]:
        """A set is no training data: it has no evaluation sets."""
        for name, one in sets.items():
            if one.valid:
                rule = "sets without evaluation sets of their own"
                raise PydanticCustomError("set_in_set", "{rule}; drop {name}.valid", {"rule": rule, "name": name})
        return sets

    @field_serializer("valid", mode="wrap")
    def _without_what_follows(self, sets: dict[str, "DataSpec"], handler: SerializerFunctionWrapHandler) -> Any:
        """Sets without what they would take from the training data, so that they go on following it."""
        training = {name: getattr(self, name) for name in type(self).model_fields}
        dumped = handler(sets)
        for name, one in sets.items():
            for key, value in _followed(training, type(one)).items():
                if getattr(one, key) == value:
                    dumped[name].pop(key, None)
        return dumped


class BlendPart(Frozen):
    """One data set of a blend."""

    prefix: str
    """Path or URL of the .bin and .idx files without their ending. A URL is s3://bucket/data/web, or has another scheme
    of fsspec's; each host fetches what is there before the run starts."""
    weight: PositiveFloat | None = None
    """Share of this data set; the weights are divided by their sum. All data sets of a blend have one, or none has:
    then each counts by its sequences, and the blend is one pass at most. A single data set may have one as well: as in
    Megatron 0.5 % more of it is built then than a run needs, which changes the order near the end of an epoch."""


class PrepareSpec(Frozen):
    """What the data sets are made from: told to who doesn't have them yet, and read by nothing else."""

    tokenizer: str
    """As `megaspec data prepare --tokenizer` takes it."""
    input: str | None = None
    """The INPUT of `megaspec data prepare`; null where it is the user's own."""


class IndexedSpec(DataSpec):
    """Megatron's .bin/.idx files, one or a weighted blend."""

    OWN: ClassVar[frozenset[str]] = frozenset({"blend", "split", "cache"})
    WHOLE: ClassVar[Mapping[str, Any]] = {"split": (0.0, 1.0, 0.0)}

    kind: Literal["indexed"]
    blend: tuple[BlendPart, ...] = Field(min_length=1)
    """The data sets."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = (969.0, 30.0, 1.0)
    """Shares of documents for training, validation and test."""
    cache: Auto[str] = "auto"
    """Folder for index files. auto: `index-cache` beside the first data set, or in download_dir where that is a URL."""
    download_dir: str = DOWNLOADS
    """Folder into which data that is given as a URL is fetched, once by each host, before a run starts; it stays there
    for other runs. A disk of the host's own is fastest."""

    prepare: PrepareSpec | None = None
    """With what `megaspec data prepare` makes the data sets, for the command that is told where one is missing."""

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

    @property
    def made_lengths(self) -> Lengths:
        return begun_at_random(SYNTHETIC_DOCUMENT_RATE)


class RandomSpec(DataSpec):
    """Uniform random tokens, for measuring speed."""

    kind: Literal["random"]
    vocab_size: PositiveInt
    """Token ids are below this."""
    document_length: PositiveInt | None = Field(None, exclude_if=lambda length: length is None)
    """Tokens of a document on average: each begins with the same probability at every token, for runs with a document
    mask. null: a sequence is one document."""

    @property
    def made_lengths(self) -> Lengths:
        if self.document_length is None:
            return ()
        return begun_at_random(1 / self.document_length)


class StreamFiles(Frozen):
    """Text files of a stream."""

    path: str
    """A .jsonl, .ndjson, .txt, .md or .parquet file, a folder of them, or a pattern such as data/*.jsonl; or a URL of
    one of these, such as s3://bucket/text/*.jsonl, which each host fetches before the run starts."""
    weight: PositiveFloat | None = None
    """Share of these files in the samples; the weights are divided by their sum. All entries have one, or none has:
    then they are one collection, of which a pass takes every document once."""


class StreamSpec(DataSpec):
    """Text files that are tokenized while the run reads them: nothing is prepared before it."""

    OWN: ClassVar[frozenset[str]] = frozenset({"files"})

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
    """What happens at a line that is no document: the run ends, or the line is left out and counted. A run that ended
    at one may go on with skip: all that it has read stays the same."""
    workers: Annotated[Count, Field(ge=0, le=256)] = 1
    """Processes of each rank that tokenize ahead of it; 0: the rank does it itself. Changes nothing in the order."""
    download_dir: str = DOWNLOADS
    """Folder into which data that is given as a URL is fetched, once by each host, before a run starts; it stays there
    for other runs. A disk of the host's own is fastest."""


SOURCE_KINDS = Kinds()
DataSource = Annotated[IndexedSpec | SyntheticSpec | RandomSpec | StreamSpec, SOURCE_KINDS]


def _whole_set(one: Any, *, training: Mapping[str, Any]) -> Any:
    """An evaluation set as it was written, and what it leaves out. `training`: the data that it stands in."""
    if isinstance(one, str):
        one = {"kind": "indexed", "blend": ({"prefix": one},)}
    if not isinstance(one, Mapping):
        return one
    kind = one.get("kind", training.get("kind"))
    for source in (*SOURCE_KINDS.ours, *SOURCE_KINDS.added):
        if kind in tags_of(source):
            return {**source.WHOLE, **_followed(training, source), **one}
    # a kind that there is not: told with its name
    return {"kind": kind, **one}


def _followed(training: Mapping[str, Any], source: type[DataSpec]) -> dict[str, Any]:
    """The fields of the training data that a set of a class takes where it leaves them out."""
    names = set(DataSpec.model_fields)
    if training.get("kind") in tags_of(source):
        names = set(source.model_fields) - source.OWN
    names.discard("valid")
    return {name: training[name] for name in training if name in names}


def _with_tuples(content: Any) -> Any:
    """Plain data with tuples for lists."""
    if isinstance(content, Mapping):
        return {name: _with_tuples(one) for name, one in content.items()}
    if isinstance(content, list | tuple):
        return tuple(_with_tuples(one) for one in content)
    return content


def evaluation_sets(data: DataSpec) -> dict[str, DataSpec]:
    """Name -> what an evaluation reads, as the split `valid`: the sets of `data.valid`, else the share of the data."""
    return dict(data.valid) or {"valid": data}


def shares_documents(training: IndexedSpec, one: IndexedSpec) -> bool:
    """Whether an evaluation set takes documents of a data set that training takes of it, too."""
    if not one.split[1]:
        return False
    # shares of a data set's documents, from its first on
    end_of_training = training.split[0] / (sum(training.split) or 1)
    return one.split[0] / sum(one.split) < end_of_training


# They name DataSource, which is made of them; what a plug-in derives takes the fields of DataSpec as they stand there.
for _source in (DataSpec, IndexedSpec, SyntheticSpec, RandomSpec, StreamSpec):
    _source.model_rebuild()
