"""Length, batch, evaluation and reproducibility of a run."""

from typing import Annotated, Never

from pydantic import Field

from megaspec.core.frozen import Auto, Fraction, Frozen, NonNegativeCount, NonNegativeFloat, PositiveCount, PositiveInt
from megaspec.core.kinds import Kinds


class BatchRamp(Frozen):
    """A global batch that grows in equal increments (Brown et al. 2020)."""

    start: PositiveInt
    """Global batch in sequences at the first step."""
    increment: PositiveInt
    """Sequences by which it grows each time, until it is train.global_batch."""
    samples: PositiveCount
    """Sequences over which it grows."""
    first_step: Auto[NonNegativeCount] = 0
    """Step from which it grows. auto: the step with which the run begins, that of its checkpoint in a fork, else 0."""


class SampleSpec(Frozen):
    """Text that the model writes at the end of the run. With context parallel, and attention of a plug-in, each token
    takes a forward pass of the whole text; else keys and values are kept."""

    prompt: str
    """Text to go on from."""
    tokens: NonNegativeCount = 64
    """How many tokens to write at most; 0 writes none. The text ends before that where model.max_seq_len does."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0 takes the likeliest token."""
    top_k: PositiveInt | None = None
    """Draw from the so many likeliest tokens. None: from all."""
    top_p: Annotated[Fraction, Field(gt=0)] | None = None
    """Draw from the likeliest tokens whose probabilities sum to this. None: from all."""
    min_p: Annotated[Fraction, Field(gt=0)] | None = None
    """Draw from the tokens at least so many times as likely as the likeliest. None: from all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end it, and are no part of it."""


LOSS_KINDS = Kinds()


class TrainSpec(Frozen):
    """One training run."""

    steps: PositiveCount
    """Optimizer steps."""
    global_batch: PositiveInt
    """Sequences per optimizer step, over all ranks and micro batches."""
    micro_batch: Auto[PositiveInt] = "auto"
    """Sequences that one rank takes through the model at a time. auto: the largest that divides the share of a rank,
    holds at most 8,192 tokens and leaves a micro batch for each pipeline stage."""
    batch_ramp: BatchRamp | None = None
    """Grow the global batch at the start. None: train.global_batch from the first step."""
    seed: NonNegativeCount = 1234
    """Seed of weights, dropout and, unless data.seed says otherwise, of the data order."""
    deterministic: bool = False
    """Use only operations whose result does not change between runs."""
    loss: Annotated[Never, LOSS_KINDS] | None = Field(None, exclude_if=lambda loss: loss is None)
    """A plug-in's loss. None: cross-entropy."""
    trainable: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Shell patterns over names of parameters, as `megaspec checkpoint inspect` prints them without `model/` and
    `router/`: those that one of them fits are trained, all others are frozen. None: all are trained."""
    eval_every: NonNegativeCount = 0
    """Steps between evaluations; the last step is evaluated, too. 0 evaluates never."""
    eval_samples: PositiveCount = 64
    """Sequences of each evaluation set per evaluation; a set that has fewer is read whole, and none of it twice."""
    sample: SampleSpec | None = None
    """Write a text at the end. None: don't."""
