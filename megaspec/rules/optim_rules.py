"""Rules about optimization."""

from megaspec.core.errors import Problem
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out


def warmup_ends_before_decay(case: Case) -> Problem | None:
    """The warm-up is over before the rate has decayed, and before the run is."""
    schedule = case.recipe.optim.schedule
    # those that the schedule counts
    steps = case.recipe.train.steps - schedule.first_step
    warmup = schedule.warmup_steps
    key = "optim.schedule.warmup_steps"
    if steps <= 0:
        # what leaves the schedule no step is told by another rule
        return None
    decays_first = schedule.kind not in ("constant", "piecewise") and warmup >= schedule.decay_steps
    if decays_first and schedule.decay_steps < steps:
        text = f"{key}={warmup} must be below optim.schedule.decay_steps={schedule.decay_steps}"
        longer = Way("optim.schedule.decay_steps", (steps,))
    elif decays_first or warmup > steps:
        bound = "at most"
        if decays_first:
            bound = "below"
        end = f"train.steps={steps}"
        if schedule.first_step:
            end = f"train.steps={case.recipe.train.steps} - optim.schedule.first_step={schedule.first_step} = {steps}"
        text = f"{key}={warmup} must be {bound} {end}, or the rate never reaches optim.lr"
        longer = Way("train.steps", (schedule.first_step + 10 * warmup,))
    else:
        return None
    tenth = min(schedule.decay_steps, steps) // 10
    return Problem(key, f"{text}; {way_out(case, Way(key, (tenth, 0), most=1), longer)}")


def a_constant_rate_stays(case: Case) -> Problem | None:
    """A constant rate and one of pieces have no lowest value and no decay: neither min_lr nor decay_steps is read."""
    schedule = case.recipe.optim.schedule
    lowest = schedule.min_lr
    if schedule.kind not in ("constant", "piecewise"):
        return None
    if lowest > 0:
        key = "optim.schedule.min_lr"
        value = f"{lowest:g}"
        idle = "0"
    elif "optim.schedule.decay_steps" not in case.decided:
        key = "optim.schedule.decay_steps"
        value = f"{schedule.decay_steps}"
        idle = "auto"
    else:
        return None
    return Problem(
        key, f"{key}={value} is not read with optim.schedule.kind={schedule.kind}; set {key}={idle}, or kind=cosine"
    )


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
    steps = schedule.wsd_decay_steps
    if schedule.kind == "wsd":
        return None
    if steps is not None:
        key = "optim.schedule.wsd_decay_steps"
        value = f"{steps}"
    elif schedule.wsd_decay != "linear":
        key = "optim.schedule.wsd_decay"
        value = schedule.wsd_decay
    else:
        return None
    text = f"{key}={value} needs kind=wsd, it is {schedule.kind}"
    return Problem(key, f"{text}; drop it or set optim.schedule.kind=wsd")


def lowest_rate_is_lowest(case: Case) -> Problem | None:
    """min_lr is at most lr."""
    lr = case.recipe.optim.lr
    min_lr = case.recipe.optim.schedule.min_lr
    if min_lr <= lr:
        return None
    text = f"optim.schedule.min_lr={min_lr:g} must be at most optim.lr={lr:g}; try {lr / 10:g}"
    return Problem("optim.schedule.min_lr", text)


def first_rate_is_not_highest(case: Case) -> Problem | None:
    """init_lr is at most lr."""
    lr = case.recipe.optim.lr
    init_lr = case.recipe.optim.schedule.init_lr
    if init_lr <= lr:
        return None
    text = f"optim.schedule.init_lr={init_lr:g} must be at most optim.lr={lr:g}, to which it warms up; try 0"
    return Problem("optim.schedule.init_lr", text)


def weight_decay_ramp_is_whole(case: Case) -> Problem | None:
    """A weight-decay ramp has an end and a length; a constant has neither."""
    ramp = case.recipe.optim.weight_decay_ramp
    values = {"end": ramp.end, "steps": ramp.steps}
    given = [name for name, value in values.items() if value is not None]
    absent = [name for name, value in values.items() if value is None]
    if ramp.kind == "constant" and ramp.first_step and not given:
        # one that was left to the resolver is not read, and is no mistake of the recipe
        given = [] if "optim.weight_decay_ramp.first_step" in case.decided else ["first_step"]
        values["first_step"] = ramp.first_step
    if ramp.kind == "constant" and given:
        key = f"optim.weight_decay_ramp.{given[0]}"
        text = f"{key}={values[given[0]]} needs a ramp, optim.weight_decay_ramp.kind=constant"
        return Problem(key, f"{text}; drop it or set kind=linear or kind=cosine")
    if ramp.kind != "constant" and absent:
        text = f"optim.weight_decay_ramp.kind={ramp.kind} needs optim.weight_decay_ramp.{absent[0]}"
        return Problem("optim.weight_decay_ramp.kind", f"{text}; set it, or kind=constant")
    return None


def fp16_scale_is_in_bounds(case: Case) -> Problem | None:
    """The loss scale starts at or above its lowest value."""
    precision = case.recipe.precision
    if precision.kind != "fp16" or precision.min_scale <= precision.initial_scale:
        return None
    text = f"precision.min_scale={precision.min_scale:g} must be at most initial_scale={precision.initial_scale:g}"
    return Problem("precision.min_scale", f"{text}; try 1")
