"""What a run says of itself. Rank 0 hands events to sinks; see sinks.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunStarted:
    """Ranks are up, weights are there."""

    step: int
    """Steps that are done already."""
    steps: int
    """Steps of the whole run."""
    attempt: int
    """How often ranks were started again."""


@dataclass(frozen=True)
class StepDone:
    """One optimizer step."""

    step: int
    """Steps done, this one included."""
    steps: int
    """Steps of the whole run."""
    loss: float
    """Mean over the valid tokens of the global batch."""
    lr: float
    """Learning rate of this step."""
    grad_norm: float
    """Global gradient norm before clipping."""
    tokens: int
    """Valid tokens of this step's batch."""
    samples: int
    """Sequences taken since the start of the run, this step included."""
    first_sample: int
    """Place of this step's first sequence in the order of the run."""
    skipped: bool
    """Whether the update was left out because the gradient was not finite (fp16)."""
    loss_scale: float | None
    """fp16's loss scale; None in other precisions."""
    seconds: float
    """Wall time of the step."""
    sequence_tokens: int
    """Tokens that went through the model, masked ones included: what speed is counted in."""
    memory_bytes: int | None
    """Peak memory of this rank's GPU since the start; None on a CPU."""


@dataclass(frozen=True)
class EvalDone:
    """One evaluation."""

    step: int
    split: str
    loss: float
    """Mean over the valid tokens."""
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was published."""

    step: int
    path: str
    seconds: float


@dataclass(frozen=True)
class Sampled:
    """A text that the model wrote."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class RunEnded:
    """The run is over."""

    step: int
    how: str
    """`done`, or the class of the error that ended it."""


Event = RunStarted | StepDone | EvalDone | CheckpointSaved | Sampled | RunEnded
