"""Learning rate and weight decay at a step: pure functions of the spec. Torch-free.

The formulas are those of Megatron-LM's parameter scheduler, with lengths in optimizer steps.
"""

from math import cos, pi, sqrt

from megaspec.optim.spec import OptimizerSpec, ScheduleSpec


def learning_rate(schedule: ScheduleSpec, lr: float, step: int) -> float:
    """The learning rate at `step`, a number of optimizer steps from 0. `lr`: the highest rate, reached after warm-up.

    Warm-up is linear from init_lr. Then, with r the part of warmup_steps..decay_steps that lies behind:

        constant       lr
        linear         min_lr + (1 - r) (lr - min_lr)
        cosine         min_lr + (cos(pi r) + 1) / 2 (lr - min_lr)
        inverse_sqrt   lr sqrt(max(warmup_steps, 1) / max(step, 1)), at least min_lr
        wsd            lr until the last wsd_decay_steps, then down to min_lr in the shape of wsd_decay

    Every kind but constant is min_lr after decay_steps.
    """
    warmup = schedule.warmup_steps
    end = schedule.decay_steps
    assert end != "auto", "optim.schedule.decay_steps was left open by the resolver"
    if step <= warmup and warmup > 0:
        return schedule.init_lr + (lr - schedule.init_lr) * step / warmup
    if schedule.kind == "constant":
        return lr
    if step > end:
        return schedule.min_lr
    if schedule.kind == "inverse_sqrt":
        return max(schedule.min_lr, lr * sqrt(max(warmup, 1)) / sqrt(max(step, 1)))
    return schedule.min_lr + _height(schedule, step) * (lr - schedule.min_lr)


def weight_decay(optim: OptimizerSpec, step: int) -> float:
    """The weight decay at `step`: from optim.weight_decay to weight_decay_ramp.end over weight_decay_ramp.steps."""
    ramp = optim.weight_decay_ramp
    if ramp.kind == "constant":
        return optim.weight_decay
    assert ramp.end is not None, f"optim.weight_decay_ramp has no end: {ramp}"
    assert ramp.steps is not None, f"optim.weight_decay_ramp has no steps: {ramp}"
    if step > ramp.steps:
        return ramp.end
    part = step / ramp.steps
    if ramp.kind == "cosine":
        part = (cos(pi * (1 - part)) + 1) / 2
    return optim.weight_decay + part * (ramp.end - optim.weight_decay)


def _height(schedule: ScheduleSpec, step: int) -> float:
    """Where the rate stands between min_lr (0) and lr (1)."""
    warmup = schedule.warmup_steps
    end = schedule.decay_steps
    if schedule.kind == "wsd":
        assert schedule.wsd_decay_steps is not None, "optim.schedule.wsd_decay_steps is not set"
        behind = step - (end - schedule.wsd_decay_steps)
        if behind <= 0:
            return 1.0
        return _decay(schedule.wsd_decay, behind / schedule.wsd_decay_steps)
    # a schedule may end with its warm-up
    part = (step - warmup) / (end - warmup) if end > warmup else 0.0
    return _decay(schedule.kind, part)


def _decay(shape: str, part: float) -> float:
    """From 1 at part=0 to 0 at part=1."""
    match shape:
        case "linear":
            return 1 - part
        case "cosine":
            return (cos(pi * part) + 1) / 2
        case "exponential":
            return 2 * 0.5**part - 1
        case "minus_sqrt":
            return 1 - sqrt(part)
    raise AssertionError(f"no decay has the shape {shape}")
