"""Optimizers, learning-rate and weight-decay schedules."""

from typing import Annotated, Literal

from megaspec.core.frozen import (
    Auto,
    Degree,
    Fraction,
    Frozen,
    NonNegativeCount,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    Probability,
)
from megaspec.core.kinds import Kinds


class PieceSpec(Frozen):
    """A piece of a piecewise schedule. Its rates are absolute (lr, start_lr) or factors of optim.lr, the highest."""

    shape: Literal["constant", "linear", "cosine", "exponential", "minus_sqrt"]
    """How the rate goes from the piece's start to its end, up or down."""
    steps: PositiveCount | None = None
    """Length in steps. Set this or `until`."""
    until: PositiveCount | None = None
    """Step at which it ends, counted as all lengths of the schedule. Set this or `steps`."""
    lr: NonNegativeFloat | None = None
    """Learning rate at its end. Set this or `factor`; a constant piece has neither."""
    factor: Fraction | None = None
    """Learning rate at its end over optim.lr."""
    start_lr: NonNegativeFloat | None = None
    """Learning rate from which it starts, for a jump. With neither this nor start_factor: where the piece before it
    ended; of the first piece optim.lr."""
    start_factor: Fraction | None = None
    """Learning rate from which it starts over optim.lr, for a jump."""


class ScheduleSpec(Frozen):
    """Learning rate over steps. All lengths are in optimizer steps, counted from first_step."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd", "piecewise"] = "cosine"
    """Shape after the warm-up."""
    first_step: Auto[NonNegativeCount] = 0
    """Step from which warmup_steps, decay_steps and pieces are counted. auto: the step with which the run begins, that
    of its checkpoint in a fork (megaspec resume RUN --fork NEW), else 0."""
    warmup_steps: NonNegativeCount = 0
    """Steps over which the rate rises linearly from init_lr to lr."""
    decay_steps: Auto[PositiveCount] = "auto"
    """Steps after first_step at which min_lr is reached. auto: those that train.steps leaves."""
    init_lr: Auto[NonNegativeFloat] = 0.0
    """Learning rate from which the warm-up starts. auto: in a fork the rate of the run that it is forked from, at the
    step of its checkpoint, else 0."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at and after decay_steps."""
    wsd_decay_steps: PositiveCount | None = None
    """Length of the final decay of wsd (warm-up, stable, decay)."""
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the final decay of wsd."""
    pieces: tuple[PieceSpec, ...] = ()
    """What piecewise consists of, one after the other, from the end of the warm-up."""
    after_pieces: Literal["stay"] | None = None
    """What follows the last piece. stay: its last rate. None: the pieces have to reach train.steps."""


class WeightDecayRamp(Frozen):
    """Weight decay that changes over the steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from weight_decay to `end`."""
    end: NonNegativeFloat | None = None
    """Weight decay at and after `steps`. None with constant."""
    steps: PositiveCount | None = None
    """Length of the change in steps. None with constant."""
    first_step: Auto[NonNegativeCount] = 0
    """Step from which `steps` is counted. auto: the step with which the run begins, that of its checkpoint in a fork,
    else 0."""


class StateFormats(Frozen):
    """Number formats of what the optimizer keeps; fp32 means at least fp32."""

    master: Literal["fp32", "fp16"] = "fp32"
    """Master weights. fp16 keeps the remainder of a bf16 weight in 16 bits."""
    exp_avg: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """First moment."""
    exp_avg_sq: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Second moment."""


class OptimizerSpec(Frozen):
    """What every optimizer shares."""

    lr: PositiveFloat
    """Highest learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; norms, biases and other vectors get none."""
    weight_decay_ramp: WeightDecayRamp = WeightDecayRamp()
    """How the weight decay changes over the steps."""
    clip: PositiveFloat | None = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. None: no clipping."""
    schedule: ScheduleSpec = ScheduleSpec()
    """The learning rate over the steps."""

    @property
    def n_moments(self) -> int:
        """Tensors that are kept beside each master weight, of its shape: what a plan counts."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many moments it keeps")


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"]
    beta1: Probability = 0.9
    """Decay of the first moment."""
    beta2: Probability = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    formats: StateFormats = StateFormats()
    """Number formats of master weights and moments."""

    @property
    def n_moments(self) -> int:
        return 2


class SgdSpec(OptimizerSpec):
    """Stochastic gradient descent with momentum, decoupled weight decay."""

    kind: Literal["sgd"]
    momentum: Probability = 0.9
    """Decay of the momentum; 0 keeps no state."""

    @property
    def n_moments(self) -> int:
        return 1 if self.momentum else 0


class MuonSpec(OptimizerSpec):
    """Muon (Jordan et al. 2024; Liu et al. 2025, "Muon is scalable for LLM training").

    Matrices of hidden layers step along their momentum with all singular values brought to about 1. Queries, keys and
    values, gate and up, and experts count as matrices of their own. Everything else (embeddings, the output head,
    routers, vectors) is updated by AdamW at the same rate.
    """

    kind: Literal["muon"]
    momentum: Probability = 0.95
    """Decay of the momentum of matrices."""
    nesterov: bool = True
    """Step along the momentum as it will be with the same gradient once more."""
    ns_steps: Degree = 5
    """Newton-Schulz iterations."""
    coefficients: Literal["simple", "quintic"] = "quintic"
    """Of the iterations' polynomials. simple: the same in each. quintic: five tuned one after the other, whose last one
    goes on."""
    scale: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor on the step of a matrix of O outputs and I inputs.

    spectral: √max(O, I), after which an element's mean square is 1. unit_rms_norm: √(O / I). shape_scaling:
    √max(1, O / I)."""
    extra_scale: PositiveFloat = 0.2
    """Another factor on that step; with spectral, 0.2 is the mean step of AdamW, whose rate and decay then serve."""
    beta1: Probability = 0.9
    """Decay of AdamW's first moment."""
    beta2: Probability = 0.95
    """Decay of AdamW's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""

    @property
    def n_moments(self) -> int:
        """Of a hidden matrix; AdamW keeps two of everything else."""
        return 1


OPTIMIZER_KINDS = Kinds()
OptimSpec = Annotated[AdamWSpec | SgdSpec | MuonSpec, OPTIMIZER_KINDS]


def has_narrow_states(spec: OptimSpec) -> bool:
    """Whether an optimizer keeps anything in fewer than 32 bits."""
    return isinstance(spec, AdamWSpec) and spec.formats != StateFormats()
