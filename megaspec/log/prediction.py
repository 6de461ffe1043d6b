"""What was predicted of a run, for its ranks to report beside what they measure.

Nothing that a rank does depends on it.
"""

from pydantic import Field

from megaspec.core.frozen import Frozen, NonNegativeFloat, NonNegativeInt, PositiveFloat

FILE_NAME = "prediction.json"


class Saving(Frozen):
    """A change of the run that would take less memory."""

    words: str
    """As they are said on the command line."""
    total: NonNegativeInt
    """Bytes of the fullest rank with it."""


class RankWork(Frozen):
    """What one rank of a pipeline stage computes and moves, see estimate/step_kinds.py."""

    product_flops: NonNegativeFloat
    """Of a micro batch."""
    attention_flops: NonNegativeFloat
    """Of a micro batch."""
    element_wise_bytes: NonNegativeFloat
    """Of a micro batch."""
    optimizer_bytes: NonNegativeFloat
    """Of a step."""


class Prediction(Frozen):
    """Written into the run folder whenever a run is started, from the Spec and the machine that it was resolved for."""

    flops_per_token_causal: PositiveFloat
    """Operations of a forward and a backward pass for one token, with half of the attention scores counted."""
    flops_per_token_full: PositiveFloat
    """The same with all attention scores counted."""
    peak_flops: PositiveFloat | None = None
    """Peak of one GPU in FLOP/s in the run's precision, the data sheet's; None where it is not known."""
    no_peak: str | None = None
    """Why it is not known."""
    memory: tuple[dict[str, NonNegativeInt], ...] = Field(min_length=1)
    """Bytes of a rank of each pipeline stage, by what they are for."""
    step_seconds: dict[str, NonNegativeFloat] | None = None
    """Of a step at the full batch by kind (profiling/kinds.py), as the busiest pipeline rank spends it; None: not
    known."""
    no_step_seconds: str | None = None
    """Why not."""
    works: tuple[RankWork, ...] = ()
    """Of a rank of each pipeline stage; empty in a file of an earlier version."""
    savings: tuple[Saving, ...] = ()
    """The single changes that save most, the largest saving first; empty where the GPU is not known."""
