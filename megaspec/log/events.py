"""What happens in a run, as plain data. The training loop emits events; sinks show and keep them. Torch-free.

Numbers are Python numbers; seconds are wall time. `step` counts completed optimizer steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """Ranks are up, weights are initialised or loaded."""

    step: int
    """Steps that are done already: 0, or where the run goes on."""
    steps: int
    """Steps of the whole run."""
    attempt: int = 0
    why: str = ""
    """What the attempt before this one ended with, where a supervisor started this one again."""
    world_size: int = 1
    flops_per_token_causal: float | None = None
    """Forward and backward of one token, with half of the attention scores counted. None: not known."""
    flops_per_token_full: float | None = None
    """The same with all attention scores counted."""
    peak_flops: float | None = None
    """Of one GPU, per second, in the run's format: the data sheet's. None: not known, so there is no MFU."""
    no_peak: str | None = None
    """Why `peak_flops` is not known."""


@dataclass(frozen=True)
class StepDone:
    """An optimizer step."""

    step: int
    steps: int
    loss: float
    """Mean over the valid tokens of the global batch."""
    lr: float
    grad_norm: float
    """Of the whole gradient, before clipping, without loss scale."""
    tokens: int
    """Valid tokens of the step: those that the loss counts."""
    samples: int
    """Sequences that the run has taken so far."""
    first_sample: int
    """Position of the step's first sequence in the data order."""
    skipped: bool
    """The update was not applied, since loss or gradient were not finite or spiked."""
    loss_scale: float | None
    seconds: float
    """From the end of the step before to the end of this one: on a GPU as its events tell."""
    sequence_tokens: int
    """All tokens of the step, masked ones too: what the machine worked on."""
    memory_bytes: int | None
    """Most that rank 0's GPU has held; on the CPU what rank 0's process holds now. None: not known."""
    fp8_saturated: int | None = None
    """Elements that were too large for fp8 by delayed scales, over all ranks and micro batches; what several ranks have
    is counted by each. None: none can be."""
    tokens_per_second: float | None = None
    """This and the next five as in `Speed` (log/speed.py)."""
    tokens_per_second_per_gpu: float | None = None
    tflops_per_gpu_causal: float | None = None
    tflops_per_gpu_full: float | None = None
    mfu_causal: float | None = None
    mfu_full: float | None = None
    data_seconds: float | None = None
    """How long rank 0's host waited for the batch. A GPU that is still at the step before does not wait with it."""
    forward_backward_seconds: float | None = None
    """Of rank 0's device: all micro batches, with the communication inside of them and what it waits for stages."""
    reduce_gradients_seconds: float | None = None
    """Of rank 0's device: what is left of summing gradients over ranks once the last backward pass is done."""
    optimizer_seconds: float | None = None
    """Of rank 0's device: gradient norm, clipping, update, and gathering the weights that it made."""


@dataclass(frozen=True)
class UpdateSkipped:
    """Loss or gradient norm were not finite or spiked, and the run goes on without the update; comes before the step's
    StepDone."""

    step: int
    kind: str
    """nonfinite or spike."""
    loss: float
    grad_norm: float
    loss_limit: float
    """Above it the loss is a spike; infinite where it was held to none."""
    grad_norm_limit: float
    where: str
    """Weight, loss or gradient in which it was first seen, and on which rank; of a spike the largest gradient."""
    first_sample: int
    """Position of the step's first sequence in the data order."""
    samples: int
    """Sequences of the step."""
    recent: int
    """Updates that were skipped within the last `within`, this one included."""
    allowed: int
    """How many may be: train.numbers.skips."""
    within: int
    """Steps over which they are counted."""


@dataclass(frozen=True)
class RolledBack:
    """The run goes on from an earlier step, without the data of some steps. What was logged behind `step` is void."""

    step: int
    """Of the checkpoint."""
    from_step: int
    """The last step that is taken back."""
    first_left_out: int
    """The first step whose data is left out."""
    last_left_out: int
    first_sample: int
    """Position of the first sequence that is left out."""
    samples: int
    """Sequences that are left out."""
    kind: str
    """This and the next three: of the step that was too much, as in UpdateSkipped."""
    loss: float
    grad_norm: float
    where: str
    rollbacks: int
    """How often the run went back, this time included."""
    allowed: int
    """How often it may: train.numbers.rollbacks."""


@dataclass(frozen=True)
class DataLeftOut:
    """A step that updates nothing, since its data is left out: train.skip_steps, or the run went back before it."""

    step: int
    steps: int
    first_sample: int
    """Position of the step's first sequence in the data order."""
    samples: int
    """Sequences of the step."""


@dataclass(frozen=True)
class HardwareSuspected:
    """A rank that computes or remembers wrongly; the run ends behind it."""

    step: int
    what: str
    """replicas: copies differ. memory: it changed by itself. recompute: the same step came to other numbers."""
    ranks: list[int]
    """Those that are suspected."""
    hosts: list[str]
    """By suspected rank: its machine."""
    devices: list[str]
    """By suspected rank: its device."""
    tensors: list[str]
    """By suspected rank: the first tensor in which it was seen."""
    is_certain: bool
    """False where two copies differ and nothing says which of them is wrong: both are named."""
    agreed_step: int
    """The last step at which nothing was found."""


@dataclass(frozen=True)
class RoutersDone:
    """What the routers of a model with experts did in a step; comes before the step's StepDone."""

    step: int
    layers: list[str]
    """Those with experts."""
    max_violation: list[float]
    """By layer: how far the most loaded expert is above the even share (Wang et al. 2024)."""
    drops: list[float]
    """By layer: share of choices that found no room."""
    entropy: list[float]
    """By layer: mean entropy of a token's probabilities, in nats."""
    losses: dict[str, list[float]]
    """By kind and layer: mean over micro batches, coefficient included; those that are not zero."""
    loads: list[list[float]] | None = None
    """By layer and expert: tokens over the even share, before drops. None but in the first, the last and every 100th
    step."""


@dataclass(frozen=True)
class EvalDone:
    """An evaluation: of all sets, each on its own."""

    step: int
    loss: float
    """The validation loss of the run: the mean over the sets, each of which counts the same however large it is."""
    sets: dict[str, float]
    """By name: the mean over the valid tokens of a set. `valid` is the share that data.split leaves for it."""
    tokens: dict[str, int]
    """By name: valid tokens that a set's loss is the mean over."""
    seconds: float


@dataclass(frozen=True)
class TimeOfKind:
    """What one kind of work took, of all steps of a profile together."""

    seconds: float
    """Its share of the time: those of all kinds add up to the steps."""
    busy_seconds: float
    """While any of it was under way, beside other work too."""
    count: int
    """Kernels and copies; on a CPU operations."""
    flops: float | None = None
    """That the estimator counts, with what is computed again. None: it counts none."""
    bytes: float | None = None
    """Read and written, as the estimator counts; of copies as the profiler says. None: not known."""
    planned_seconds: float | None = None
    """None: no plan is known."""


@dataclass(frozen=True)
class StepsProfiled:
    """Where the time of some steps went on one rank; comes behind their StepDone."""

    step: int
    """The last of them."""
    first_step: int
    rank: int
    device: str
    """The GPU's name, or `cpu`."""
    seconds: float
    """Of all of them, with what profiling costs the host, without evaluations and saves between them."""
    accounted: float
    """Share of the time whose kind is known: 1 without `other`."""
    kinds: dict[str, TimeOfKind]
    """By the names of profiling/kinds.py."""
    largest_other: dict[str, float]
    """Seconds of what is `other`, by the name of its kernel."""
    no_plan: str | None
    """Why there is no plan to compare with."""
    clock_mhz: float | None
    """Of the GPU's SMs, the mean of ten readings a second. None: not known."""
    clock_mhz_lowest: float | None
    clock_mhz_highest: float | None
    power_watts: float | None
    power_limit_watts: float | None
    """That the GPU may take."""
    no_clock: str | None
    """Why clock and power are not known."""
    unprofiled_seconds: float | None
    """Of one step without a profiler, before it; None in a run, whose other steps say so."""
    files: list[str]
    """That were written, in the run's folder."""

    @property
    def steps(self) -> int:
        """How many steps these are."""
        return self.step - self.first_step + 1

    @classmethod
    def from_plain(cls, content: dict[str, Any]) -> "StepsProfiled":
        """From what dataclasses.asdict made of one."""
        kinds = {kind: TimeOfKind(**one) for kind, one in content["kinds"].items()}
        return cls(**{**content, "kinds": kinds})


@dataclass(frozen=True)
class SlowRank:
    """A rank that has been behind the others for tens of steps, by its time outside of collectives."""

    step: int
    rank: int
    host: str
    device: str
    phase: str
    """In which it loses most: data, forward, backward, reduce_gradients, optimizer, save, or device, a product of
    matrices that is the same on every GPU."""
    seconds: float
    """That it loses in a step, or in a save."""
    usual_seconds: float
    """What that phase takes on the others."""
    share: float
    """`seconds` over what the whole step, or the save, should take."""


@dataclass(frozen=True)
class PhaseOfRanks:
    """How long ranks take for a phase by themselves, in seconds of a step."""

    median: float
    slowest: float
    rank: int
    """The slowest."""


@dataclass(frozen=True)
class PaceMeasured:
    """How long ranks take by themselves, every 50th step."""

    step: int
    phases: dict[str, PhaseOfRanks]
    """By phase, as in SlowRank."""


@dataclass(frozen=True)
class MemoryHeld:
    """What rank 0's tensors take between two steps, once in each start, behind its first step. In bytes of its device.
    What a step needs beside them at its peak is the rest of `memory_bytes`."""

    step: int
    weights: int
    """In the model's format, with the buffers; copies in fp8 are not among them."""
    gradients: int
    """Sums over micro batches."""
    optimizer: int
    """Master weights and states, without what is a weight itself."""


@dataclass(frozen=True)
class AlertRaised:
    """A condition of log.alerts has held for as long as it has to."""

    step: int
    alert: int
    """Its place in log.alerts."""
    metric: str
    comparison: str
    """above or below"""
    limit: float
    value: float
    """Of the metric, at `step`."""
    for_steps: int
    severity: str
    """info, warning or critical"""
    action: str
    """log, webhook or stop"""


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that is published."""

    step: int
    path: str
    seconds: float
    """From its beginning until it was published."""
    stall_seconds: float | None = None
    """Of these, how long rank 0's training stood still for it. None: not measured."""


@dataclass(frozen=True)
class Sampled:
    """A text that the model wrote."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class RunEnded:
    """The last event of an attempt that was not killed."""

    step: int
    how: str
    """"done", "failed", or the name of the error that ended it."""


Event = (
    RunStarted
    | StepDone
    | RoutersDone
    | StepsProfiled
    | SlowRank
    | PaceMeasured
    | MemoryHeld
    | AlertRaised
    | UpdateSkipped
    | RolledBack
    | DataLeftOut
    | HardwareSuspected
    | RoutersDone
    | StepsProfiled
    | EvalDone
    | CheckpointSaved
    | Sampled
    | RunEnded
)
Emit = Callable[[Event], None]

TIMED = (
    "time",
    "seconds",
    "memory_bytes",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu_causal",
    "tflops_per_gpu_full",
    "mfu_causal",
    "mfu_full",
    "data_seconds",
    "forward_backward_seconds",
    "reduce_gradients_seconds",
    "optimizer_seconds",
)
"""Keys of metrics.jsonl that depend on the clock and the machine: what is left is the same whenever a run is repeated
to the bit."""

# How each event is called in metrics.jsonl.
NAMES: dict[type, str] = {
    RunStarted: "start",
    StepDone: "step",
    UpdateSkipped: "skip",
    RolledBack: "rollback",
    DataLeftOut: "left_out",
    HardwareSuspected: "hardware",
    RoutersDone: "routers",
    StepsProfiled: "profile",
    SlowRank: "slow",
    PaceMeasured: "pace",
    MemoryHeld: "memory",
    AlertRaised: "alert",
    EvalDone: "eval",
    CheckpointSaved: "checkpoint",
    Sampled: "sample",
    RunEnded: "end",
}
