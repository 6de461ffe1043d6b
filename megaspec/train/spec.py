"""Length, batch, evaluation and reproducibility of a run."""

from typing import Annotated, Literal, Never

from pydantic import Field

from megaspec.core.frozen import (
    Auto,
    Fraction,
    Frozen,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    PositiveInt,
)
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


class SpikesSpec(Frozen):
    """What counts as a spike of a loss or a gradient norm: more than `threshold` robust standard deviations (1.4826
    times the median absolute deviation, at least 1 % of the median) above the median of the steps before."""

    window: Annotated[PositiveInt, Field(ge=8, le=4096)] = 128
    """Steps that median and deviation are of: those whose update was applied, up to the last but one. No step is judged
    before there are so many."""
    warmup_steps: NonNegativeCount = 0
    """Steps at the start of the run that are not judged."""
    threshold: PositiveFloat = 10.0
    """Robust standard deviations above the median."""
    watch: Literal["both", "loss", "grad_norm"] = "both"
    """What is judged."""


class NumbersSpec(Frozen):
    """What a run does when its loss or gradient norm is NaN or infinite, or spikes. Such an update is never applied.
    What is too much for `skips` goes back to a checkpoint and leaves the data out, what is too much for `rollbacks`
    ends the run with exit code 76. A run that comes to its last step ends so, too, where its last `skips` updates
    (two at least) were all skipped, or no step updated anything. A loss scale of fp16 that is too high is none of this:
    it is lowered."""

    skips: NonNegativeCount = 0
    """Updates that may be skipped within `within` steps before the run goes back; fewer than `within`."""
    within: Annotated[PositiveInt, Field(le=65536)] = 100
    """Steps over which skipped updates are counted."""
    rollbacks: NonNegativeCount = 0
    """How often the run may go back: to the newest good checkpoint before the first of the skipped updates, from where
    it leaves out the data of all steps from that one to the last."""
    before: NonNegativeCount = 0
    """Steps before the first skipped update whose data is left out, too: what spoilt the weights may lie before it."""
    spikes: SpikesSpec | None = None
    """What counts as a spike. None: nothing does."""


class ChecksSpec(Frozen):
    """Looking for ranks that compute or remember wrongly. What is found names the rank, the machine, the device and the
    tensor, and ends the run with exit code 77; nothing is saved after it."""

    replicas_every: NonNegativeCount = 0
    """Steps between comparisons of what several ranks hold alike: weights, master weights, optimizer state, state of
    routers. Before a checkpoint is written it is compared, too. 0: never."""
    sum_every: PositiveInt = 1
    """Steps between the checksums that are compared. 1: a difference is found even where later updates round it away;
    replicas_every: the least reading."""
    state: Fraction = 0.0
    """Share of steps after which weights and optimizer state are read again before the next update, to find memory that
    changed by itself; of shards, too, which no other rank holds."""
    recompute: Fraction = 0.0
    """Share of steps whose forward and backward passes are computed twice, and compared to the bit: loss and gradients.
    Needs train.deterministic=true."""

    @property
    def is_on(self) -> bool:
        return self.replicas_every > 0 or self.state > 0 or self.recompute > 0


class SkippedSteps(Frozen):
    """Steps whose data is not trained on."""

    first: PositiveCount
    """The first of them; steps count from 1."""
    last: PositiveCount
    """The last of them."""


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
    numbers: NumbersSpec = NumbersSpec()
    """What happens at a NaN, an infinity or a spike."""
    checks: ChecksSpec = ChecksSpec()
    """Looking for hardware that computes or remembers wrongly."""
    skip_steps: tuple[SkippedSteps, ...] = Field((), exclude_if=lambda steps: not steps)
    """Steps whose data is left out: they count as steps, and update nothing. In order, apart from each other, and not
    all steps."""
    eval_every: NonNegativeCount = 0
    """Steps between evaluations; the last step is evaluated, too. 0 evaluates never."""
    eval_samples: PositiveCount = 64
    """Sequences of each evaluation set per evaluation; a set that has fewer is read whole, and none of it twice."""
    sample: SampleSpec | None = None
    """Write a text at the end. None: don't."""
