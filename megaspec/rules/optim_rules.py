"""Rules about optimization and logging."""

from megaspec.core.errors import Problem
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out


def warmup_ends_before_decay(case: Case) -> Problem | None:
    """The warm-up is over before the rate has decayed, and before the run is."""
    schedule, steps = case.recipe.optim.schedule, case.recipe.train.steps
    key, warmup = "optim.schedule.warmup_steps", schedule.warmup_steps
    decays = schedule.kind != "constant" and warmup >= schedule.decay_steps
    if decays and schedule.decay_steps < steps:
        text = f"{key}={warmup} must be below optim.schedule.decay_steps={schedule.decay_steps}"
        others = Way("optim.schedule.decay_steps", (steps,))
    elif decays or warmup > steps:
        bound = "below" if decays else "at most"
        text = f"{key}={warmup} must be {bound} train.steps={steps}, or the rate never reaches optim.lr"
        others = Way("train.steps", (10 * warmup,))
    else:
        return None
    shorter = min(schedule.decay_steps, steps) // 10
    return Problem(key, f"{text}; {way_out(case, Way(key, (shorter, 0), most=1), others)}")


def a_constant_rate_stays(case: Case) -> Problem | None:
    """A constant rate has no lowest value and no decay: neither min_lr nor decay_steps is read."""
    schedule = case.recipe.optim.schedule
    name = "min_lr" if schedule.min_lr > 0 else "decay_steps"
    if schedule.kind != "constant" or (schedule.min_lr == 0 and "optim.schedule.decay_steps" in case.decided):
        return None
    key = f"optim.schedule.{name}"
    value, idle = (f"{schedule.min_lr:g}", "0") if name == "min_lr" else (schedule.decay_steps, "auto")
    text = f"{key}={value} is not read with optim.schedule.kind=constant; set {key}={idle}, or kind=cosine"
    return Problem(key, text)


def wsd_has_a_decay(case: Case) -> Problem | None:
    """wsd says how long its final decay is."""
    schedule = case.recipe.optim.schedule
    if schedule.kind != "wsd" or schedule.wsd_decay_steps is not None:
        return None
    steps = max(1, min(schedule.decay_steps // 10, schedule.decay_steps - schedule.warmup_steps))
    text = f"optim.schedule.kind=wsd needs a final decay; set optim.schedule.wsd_decay_steps, e.g. to {steps}"
    return Problem("optim.schedule.kind", text)


def wsd_decay_fits(case: Case) -> Problem | None:
    """The final decay of wsd starts after the warm-up."""
    schedule = case.recipe.optim.schedule
    room = schedule.decay_steps - schedule.warmup_steps
    if schedule.kind != "wsd" or schedule.wsd_decay_steps is None or schedule.wsd_decay_steps <= max(room, 1):
        return None
    text = f"optim.schedule.wsd_decay_steps={schedule.wsd_decay_steps} must be at most decay_steps - warmup_steps"
    return Problem("optim.schedule.wsd_decay_steps", f"{text} = {room}; try {max(1, room)}")


def only_wsd_has_a_final_decay(case: Case) -> Problem | None:
    """A final decay, its length or shape, is set for wsd only: no other schedule reads it."""
    schedule = case.recipe.optim.schedule
    name = "wsd_decay" if schedule.wsd_decay_steps is None else "wsd_decay_steps"
    if schedule.kind == "wsd" or (name == "wsd_decay" and schedule.wsd_decay == "linear"):
        return None
    text = f"optim.schedule.{name}={getattr(schedule, name)} needs kind=wsd, it is {schedule.kind}"
    return Problem(f"optim.schedule.{name}", f"{text}; drop it or set optim.schedule.kind=wsd")


def lowest_rate_is_lowest(case: Case) -> Problem | None:
    """min_lr is at most lr."""
    lr, low = case.recipe.optim.lr, case.recipe.optim.schedule.min_lr
    if low <= lr:
        return None
    text = f"optim.schedule.min_lr={low:g} must be at most optim.lr={lr:g}; try {lr / 10:g}"
    return Problem("optim.schedule.min_lr", text)


def first_rate_is_not_highest(case: Case) -> Problem | None:
    """init_lr is at most lr."""
    lr, first = case.recipe.optim.lr, case.recipe.optim.schedule.init_lr
    if first <= lr:
        return None
    return Problem("optim.schedule.init_lr", f"optim.schedule.init_lr={first:g} must be at most optim.lr={lr:g}; try 0")


def weight_decay_ramp_is_whole(case: Case) -> Problem | None:
    """A weight-decay ramp has an end and a length; a constant has neither."""
    ramp = case.recipe.optim.weight_decay_ramp
    given = [name for name in ("end", "steps") if getattr(ramp, name) is not None]
    if ramp.kind == "constant" and given:
        key = f"optim.weight_decay_ramp.{given[0]}"
        text = f"{key}={getattr(ramp, given[0])} needs a ramp, optim.weight_decay_ramp.kind=constant"
        return Problem(key, f"{text}; drop it or set kind=linear or kind=cosine")
    if ramp.kind != "constant" and len(given) < 2:
        absent = next(name for name in ("end", "steps") if name not in given)
        text = f"optim.weight_decay_ramp.kind={ramp.kind} needs optim.weight_decay_ramp.{absent}"
        return Problem("optim.weight_decay_ramp.kind", f"{text}; set it, or kind=constant")
    return None


def fp16_scale_is_in_bounds(case: Case) -> Problem | None:
    """The loss scale starts at or above its lowest value."""
    precision = case.recipe.precision
    if precision.kind != "fp16" or precision.min_scale <= precision.initial_scale:
        return None
    text = f"precision.min_scale={precision.min_scale:g} must be at most initial_scale={precision.initial_scale:g}"
    return Problem("precision.min_scale", f"{text}; try 1")


def tensorboard_is_installed(case: Case) -> Problem | None:
    """TensorBoard files are written with the package tensorboard."""
    if not case.recipe.log.tensorboard or "tensorboard" in case.target.versions:
        return None
    text = "log.tensorboard=true needs the package tensorboard; install megaspec[tensorboard] or set it to false"
    return Problem("log.tensorboard", text)
