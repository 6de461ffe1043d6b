"""The resolved recipe: what every rank builds and trains, exactly."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megaspec.checkpoint.format import FORMAT_VERSION
from megaspec.core.frozen import AUTO, Frozen, NonNegativeInt, PositiveInt
from megaspec.data.earlier_order import as_now
from megaspec.data.spec import ORDER_VERSION, DataSpec
from megaspec.data.urls import RemoteData
from megaspec.optim.spec import has_narrow_states
from megaspec.recipe import Recipe


class Decision(Frozen):
    """Something that the resolver decided for the user."""

    key: str
    """Dotted path of the field."""
    value: Any
    """What it was set to."""
    reason: str
    """Why."""


UNKNOWN_ORIGIN: Literal["unknown"] = "unknown"
"""Where a file of an earlier version does not note how its run began, or of which run a fork's checkpoint was."""


class ForkPoint(Frozen):
    """The checkpoint of another run with which a fork began."""

    source: str = Field(UNKNOWN_ORIGIN, pattern=r"^([0-9a-f]{64}|unknown)$")
    """Identity of that run (run_identity in rules/belonging.py)."""
    manifest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of its manifest."""
    step: NonNegativeInt
    """Optimizer steps that were done."""
    tokens: NonNegativeInt
    """Tokens that had been learned from."""


Origin = ForkPoint | Literal["unknown"] | None


class WeightsOrigin(Frozen):
    """The weights of another folder with which a run began, or the run that it was forked from."""

    path: str
    """The folder: a run's, or one of Hugging Face's."""
    digest: str = Field(pattern=r"^([0-9a-f]{64})?$")
    """SHA-256 of a checkpoint's manifest, or of all that a folder of Hugging Face's says of weights
    (hf/digest.py); "" in a Spec that was made for a plan alone."""
    step: NonNegativeInt | None = None
    """Of the run's checkpoint; None: it was a folder of Hugging Face's."""
    family: str | None = None
    """Its `model_type`, also where a run had it from there; None: no such folder."""
    vocab_size: PositiveInt | None = None
    """Tokens that its tables have rows for, without padding. None in a file of an earlier version, where they are as
    many as the run has."""


class TakenWeights(Frozen):
    """A checkpoint that a run of weights alone was taken from, or one of those that it is the mean of."""

    path: str
    """Folder of that run."""
    step: NonNegativeInt
    """Of the checkpoint."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of its manifest."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Share in the mean; all together are 1."""
    imported: bool = False
    """No run of ours has trained them: they are as they came."""


class Spec(Recipe):
    """A recipe without anything left open. JSON both ways: `model_dump_json()` and `Spec.model_validate_json(text)`."""

    format_version: int = Field(FORMAT_VERSION, ge=FORMAT_VERSION, le=FORMAT_VERSION)
    """What the file is written in. A run of another version is refused."""
    world_size: int
    """Ranks of the run: the product of the parallel degrees."""
    device: str
    """`cuda` or `cpu`."""
    segments: tuple[int, ...]
    """Sequences of the training order that each index segment holds; a longer run appends one (see data/order)."""
    samples_moved: int = 0
    """Sequences that a fork's checkpoint had taken beyond what the fork's own batch sizes make of its step; negative
    when it had taken fewer. Added to the place of every step in the training order, so that none is skipped or taken
    twice."""
    forked_from: Origin = UNKNOWN_ORIGIN
    """Where a fork began. None: it began with weights from the seed; "unknown" where a file has none: either may be."""
    weights_from: WeightsOrigin | None = None
    """Where its weights began (init.from_hf, init.load). None: they were drawn from train.seed."""
    holds: Literal["training", "weights"] = "training"
    """What its checkpoints hold. "weights": them alone, imported or taken from checkpoints; it is never trained."""
    taken_from: tuple[TakenWeights, ...] = ()
    """Of a run of weights alone: the checkpoints that they are from. (): they were imported."""
    data_order: Literal[1, 2] = 1
    """Version of the rules that make the training order (ORDER_VERSION in data/spec.py); 1 where a file has none."""
    data_fingerprint: str = ""
    """Hash of the data that the run was resolved with; "" for data that is made as it is read."""
    remote: tuple[RemoteData, ...] = Field((), exclude_if=lambda remote: not remote)
    """What lay at the URLs of its data when it was resolved: what ranks read, on this host or another."""
    decisions: tuple[Decision, ...] = ()
    """What was decided for the user, and why."""
    plugins: tuple[str, ...] = ()
    """Packages that it was typed with: a command line that starts it again names them with --plugin."""

    @field_validator("data", mode="before")
    @classmethod
    def _no_lengths_are_null(cls, said: Any) -> Any:
        """A file of the first version that had lengths of documents says [] where nobody knows them."""
        if isinstance(said, dict) and said.get("document_lengths") == []:
            return {**said, "document_lengths": None}
        return said

    @model_validator(mode="after")
    def _names_every_kernel(self) -> Self:
        """A file from before these operations had names is read with what its runs took."""
        fused = "triton" if self.device == "cuda" else "reference"
        adamw = fused if has_narrow_states(self.optim) else "torch"
        absent = {"attention_merge": fused, "unpermute": fused, "adamw": adamw}
        absent |= {"norm": "reference", "gated": "reference", "rope": "reference", "linear": "torch"}
        # no earlier run computed in fp8: none of them is asked for
        absent |= {"fp8_cast": "reference", "scaled_product": "reference", "scaled_grouped": "reference"}
        for name in self.kernels.model_fields_set:
            absent.pop(name, None)
        if not absent:
            return self
        return self.model_copy(update={"kernels": self.kernels.model_copy(update=absent)})

    @model_validator(mode="after")
    def _says_how_long_documents_are(self) -> Self:
        """A file without them, written before they had a name or where nobody knows, says that nobody does."""
        data = _without_unsaid_lengths(self.data)
        if data is self.data:
            return self
        return self.model_copy(update={"data": data})

    @model_validator(mode="after")
    def _nothing_is_open(self) -> Self:
        left = sorted(open_fields(self))
        assert not left, f"fields that the resolver left open: {', '.join(left)}"
        return self

    @model_validator(mode="after")
    def _is_brought_up(self) -> Self:
        """A run of version 1 whose order today's rules make as well is said in their words."""
        if self.data_order != 1:
            return self
        data = as_now(self.data)
        if data is None:
            return self
        return self.model_copy(update={"data": data, "data_order": ORDER_VERSION})


def _without_unsaid_lengths(data: DataSpec) -> DataSpec:
    """Data, and its evaluation sets, with no lengths of documents where none are said."""
    update: dict[str, Any] = {}
    if "document_lengths" not in data.model_fields_set:
        update["document_lengths"] = None
    sets = {name: _without_unsaid_lengths(one) for name, one in data.valid.items()}
    if any(sets[name] is not one for name, one in data.valid.items()):
        update["valid"] = sets
    if not update:
        return data
    return data.model_copy(update=update)


def open_fields(section: Frozen, prefix: str = "") -> list[str]:
    """Dotted paths of the fields that still say "auto"."""
    left = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Frozen):
            left += open_fields(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            for entry, inner in value.items():
                if isinstance(inner, Frozen):  # others are plain values, of names of the user's own
                    left += open_fields(inner, f"{prefix}{name}.{entry}.")
        elif value == AUTO and "auto" in str(type(section).model_fields[name].annotation):
            left.append(f"{prefix}{name}")
    return left
