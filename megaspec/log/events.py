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
    """The update was not applied, since the gradient was not finite."""
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
class CheckpointSaved:
    """A checkpoint that is published."""

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
    """The last event of an attempt that was not killed."""

    step: int
    how: str
    """"done", "failed", or the name of the error that ended it."""


Event = RunStarted | StepDone | RoutersDone | StepsProfiled | EvalDone | CheckpointSaved | Sampled | RunEnded
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
    RoutersDone: "routers",
    StepsProfiled: "profile",
    EvalDone: "eval",
    CheckpointSaved: "checkpoint",
    Sampled: "sample",
    RunEnded: "end",
}
