"""Learning rate and weight decay at a step: pure functions of the spec. Torch-free.

The formulas are those of Megatron-LM's parameter scheduler, with lengths in optimizer steps.
"""

from dataclasses import dataclass
from math import cos, pi, sqrt

from megaspec.optim.spec import OptimizerSpec, PieceSpec, ScheduleSpec


def learning_rate(schedule: ScheduleSpec, lr: float, step: int) -> float:
    """The learning rate at `step`, a number of optimizer steps from 0. `lr`: the highest rate, reached after warm-up.

    All lengths are counted from first_step: with s = step - first_step, warm-up is linear from init_lr. Then, with r
    the part of warmup_steps..decay_steps that lies behind:

        constant       lr
        linear         min_lr + (1 - r) (lr - min_lr)
        cosine         min_lr + (cos(pi r) + 1) / 2 (lr - min_lr)
        inverse_sqrt   lr sqrt(max(warmup_steps, 1) / max(s, 1)), at least min_lr
        wsd            lr until the last wsd_decay_steps, then down to min_lr in the shape of wsd_decay
        piecewise      one piece after the other from warmup_steps on, then the last rate of the last one

    Every kind but constant and piecewise is min_lr after decay_steps.
    """
    count = _count(schedule, step)
    warmup = schedule.warmup_steps
    end = schedule.decay_steps
    assert end != "auto", "optim.schedule.decay_steps was left open by the resolver"
    if count <= warmup and warmup > 0:
        init_lr = _init_lr(schedule)
        return init_lr + (lr - init_lr) * count / warmup
    if schedule.kind == "constant":
        return lr
    if schedule.kind == "piecewise":
        return _piecewise(pieces_of(schedule, lr), count)
    if count > end:
        return schedule.min_lr
    if schedule.kind == "inverse_sqrt":
        return max(schedule.min_lr, lr * sqrt(max(warmup, 1)) / sqrt(max(count, 1)))
    return schedule.min_lr + _height(schedule, count) * (lr - schedule.min_lr)


def weight_decay(optim: OptimizerSpec, step: int) -> float:
    """The weight decay at `step`: from optim.weight_decay to weight_decay_ramp.end over weight_decay_ramp.steps, which
    are counted from weight_decay_ramp.first_step."""
    ramp = optim.weight_decay_ramp
    if ramp.kind == "constant":
        return optim.weight_decay
    assert ramp.end is not None, f"optim.weight_decay_ramp has no end: {ramp}"
    assert ramp.steps is not None, f"optim.weight_decay_ramp has no steps: {ramp}"
    assert ramp.first_step != "auto", "optim.weight_decay_ramp.first_step was left open by the resolver"
    count = max(0, step - ramp.first_step)
    if count > ramp.steps:
        return ramp.end
    part = count / ramp.steps
    if ramp.kind == "cosine":
        part = (cos(pi * (1 - part)) + 1) / 2
    return optim.weight_decay + part * (ramp.end - optim.weight_decay)


@dataclass(frozen=True)
class Piece:
    """A part of a schedule in which the rate has one shape, from one step to another."""

    shape: str
    start: int
    """Step at which it begins; the rate there is still that of what lies before it."""
    end: int
    """Step at which it ends."""
    start_lr: float
    end_lr: float


def piece_ends(schedule: ScheduleSpec) -> list[int]:
    """Where each piece ends, in steps after first_step. Each has to say its length in one way."""
    ends = []
    end = schedule.warmup_steps
    for piece in schedule.pieces:
        if piece.until is not None:
            end = piece.until
        else:
            assert piece.steps is not None, f"a piece of optim.schedule.pieces without a length: {piece}"
            end += piece.steps
        ends.append(end)
    return ends


def pieces_of(schedule: ScheduleSpec, lr: float) -> list[Piece]:
    """The pieces of a piecewise schedule, their steps counted from first_step. `lr`: as in `learning_rate`."""
    found = []
    start = schedule.warmup_steps
    rate = lr
    for piece, end in zip(schedule.pieces, piece_ends(schedule), strict=True):
        start_lr = _start_rate(piece, lr, before=rate)
        rate = _end_rate(piece, lr, start=start_lr)
        found.append(Piece(piece.shape, start, end, start_lr, rate))
        start = end
    return found


def outline(schedule: ScheduleSpec, lr: float, *, steps: int) -> list[Piece]:
    """The parts of a schedule up to step `steps`, the warm-up first, with steps counted from the run's first one.

    What lies behind `steps` is left out; the part in which it lies ends there, with the rate of that step.
    """
    first = schedule.first_step
    assert first != "auto", "optim.schedule.first_step was left open by the resolver"
    found = []
    for piece in _parts(schedule, lr, last=max(0, steps - first)):
        end = min(first + piece.end, steps)
        if first + piece.start < end:
            rate = learning_rate(schedule, lr, end)
            found.append(Piece(piece.shape, first + piece.start, end, piece.start_lr, rate))
    return found


def _parts(schedule: ScheduleSpec, lr: float, *, last: int) -> list[Piece]:
    """Warm-up, what follows it and what stays then, until `last` at least; steps counted from first_step."""
    warmup = schedule.warmup_steps
    end = schedule.decay_steps
    lowest = schedule.min_lr
    assert end != "auto", "optim.schedule.decay_steps was left open by the resolver"
    parts = []
    if warmup > 0:
        parts.append(Piece("warm-up", 0, warmup, _init_lr(schedule), lr))
    if schedule.kind == "constant":
        return [*parts, Piece("constant", warmup, last, lr, lr)]
    if schedule.kind == "piecewise":
        parts += pieces_of(schedule, lr)
        end = parts[-1].end
        lowest = parts[-1].end_lr
    elif schedule.kind == "wsd":
        assert schedule.wsd_decay_steps is not None, "optim.schedule.wsd_decay_steps is not set"
        decay = end - schedule.wsd_decay_steps
        parts.append(Piece("constant", warmup, decay, lr, lr))
        parts.append(Piece(schedule.wsd_decay, decay, end, lr, lowest))
    else:
        parts.append(Piece(schedule.kind, warmup, end, lr, lowest))
    return [*parts, Piece("constant", end, last, lowest, lowest)]


def _piecewise(pieces: list[Piece], count: int) -> float:
    """The rate of a step that lies behind the warm-up."""
    for piece in pieces:
        if count <= piece.end:
            part = (count - piece.start) / (piece.end - piece.start)
            return piece.end_lr + _decay(piece.shape, part) * (piece.start_lr - piece.end_lr)
    return pieces[-1].end_lr


def _start_rate(piece: PieceSpec, lr: float, *, before: float) -> float:
    """`before`: the rate at which the piece before it ended."""
    if piece.start_lr is not None:
        return piece.start_lr
    if piece.start_factor is not None:
        return piece.start_factor * lr
    return before


def _end_rate(piece: PieceSpec, lr: float, *, start: float) -> float:
    """`start`: the rate at which it starts, where a constant one stays."""
    if piece.lr is not None:
        return piece.lr
    if piece.factor is not None:
        return piece.factor * lr
    return start


def _count(schedule: ScheduleSpec, step: int) -> int:
    """Steps after first_step."""
    first = schedule.first_step
    assert first != "auto", "optim.schedule.first_step was left open by the resolver"
    assert step >= first, f"step={step} lies before optim.schedule.first_step={first}"
    return step - first


def _init_lr(schedule: ScheduleSpec) -> float:
    init_lr = schedule.init_lr
    assert init_lr != "auto", "optim.schedule.init_lr was left open by the resolver"
    return init_lr


def _height(schedule: ScheduleSpec, count: int) -> float:
    """Where the rate stands between min_lr (0) and lr (1), `count` steps after first_step."""
    warmup = schedule.warmup_steps
    end = schedule.decay_steps
    if schedule.kind == "wsd":
        assert schedule.wsd_decay_steps is not None, "optim.schedule.wsd_decay_steps is not set"
        behind = count - (end - schedule.wsd_decay_steps)
        if behind <= 0:
            return 1.0
        return _decay(schedule.wsd_decay, behind / schedule.wsd_decay_steps)
    # a schedule may end with its warm-up
    part = (count - warmup) / (end - warmup) if end > warmup else 0.0
    return _decay(schedule.kind, part)


def _decay(shape: str, part: float) -> float:
    """From 1 at part=0 to 0 at part=1; a constant one has no difference to take it of."""
    match shape:
        case "constant":
            return 1.0
        case "linear":
            return 1 - part
        case "cosine":
            return (cos(pi * part) + 1) / 2
        case "exponential":
            return 2 * 0.5**part - 1
        case "minus_sqrt":
            return 1 - sqrt(part)
    raise AssertionError(f"no decay has the shape {shape}")
