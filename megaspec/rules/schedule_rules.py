"""Rules about where schedules begin, and about the pieces of a piecewise learning rate."""

from megaspec.core.errors import Problem
from megaspec.optim.schedule import Piece, piece_ends, pieces_of
from megaspec.optim.spec import PieceSpec, ScheduleSpec
from megaspec.rules.case import Case

_KEY = "optim.schedule.pieces"
# A rate that is a factor of lr may come out a rounding error above it.
_ROUNDING = 1e-12


def schedules_begin_with_the_run(case: Case) -> Problem | None:
    """No schedule is counted from a step behind the one with which the run begins."""
    begins = case.facts.start.step
    first_steps = {
        "optim.schedule.first_step": case.recipe.optim.schedule.first_step,
        "optim.weight_decay_ramp.first_step": case.recipe.optim.weight_decay_ramp.first_step,
    }
    ramp = case.recipe.train.batch_ramp
    if ramp is not None:
        first_steps["train.batch_ramp.first_step"] = ramp.first_step
    for key, first in first_steps.items():
        if first > begins:
            text = f"{key}={first} must be at most {begins}, the step with which the run begins; set it to {begins}, "
            text += "or auto, which is that step, in a fork (megaspec resume RUN --fork NEW) the one of its checkpoint"
            return Problem(key, text)
    return None


def the_schedule_has_steps(case: Case) -> Problem | None:
    """The learning rate's schedule begins before the run ends."""
    key = "optim.schedule.first_step"
    first = case.recipe.optim.schedule.first_step
    steps = case.recipe.train.steps
    # one behind the run's first step is told by the rule about that
    if first < steps or first > case.facts.start.step:
        return None
    text = f"{key}={first} leaves the schedule no step of train.steps={steps}, which counts those that are done"
    return Problem(key, f"{text}; set train.steps above {first}")


def a_first_rate_has_a_warmup(case: Case) -> Problem | None:
    """init_lr is set with a warm-up only: without one nothing starts from it."""
    key = "optim.schedule.init_lr"
    schedule = case.recipe.optim.schedule
    if schedule.init_lr == 0 or schedule.warmup_steps > 0:
        return None
    text = f"{key}={schedule.init_lr:g} is not read with optim.schedule.warmup_steps=0"
    return Problem(key, f"{text}; set warmup_steps, or drop it")


def piecewise_has_pieces(case: Case) -> Problem | None:
    """piecewise has pieces, and no other schedule has them or says what follows them."""
    schedule = case.recipe.optim.schedule
    if schedule.kind == "piecewise":
        if schedule.pieces:
            return None
        text = "optim.schedule.kind=piecewise needs optim.schedule.pieces; set them, e.g. to "
        text += "[{shape: constant, steps: 1000}, {shape: linear, steps: 100, factor: 0.1}]"
        return Problem("optim.schedule.kind", text)
    key = _KEY
    value = f"[{len(schedule.pieces)} of them]"
    if not schedule.pieces:
        key = "optim.schedule.after_pieces"
        value = f"{schedule.after_pieces}"
    if not schedule.pieces and schedule.after_pieces is None:
        return None
    text = f"{key}={value} needs kind=piecewise, it is {schedule.kind}"
    return Problem(key, f"{text}; drop it or set optim.schedule.kind=piecewise")


def pieces_have_one_length(case: Case) -> Problem | None:
    """Each piece of a schedule says how long it is, by its length or by its end."""
    for number, piece in enumerate(case.recipe.optim.schedule.pieces):
        if _has_length(piece):
            continue
        key = f"{_KEY}.{number}.steps"
        if piece.steps is None:
            text = f"{key}=null and until=null: nothing says where the piece ends; set steps, its length, or until"
            return Problem(key, text)
        text = f"{key}={piece.steps} beside until={piece.until}: a piece says its length once; drop one of them"
        return Problem(key, text)
    return None


def pieces_ascend(case: Case) -> Problem | None:
    """Each piece of a schedule ends behind the one before it, the first behind the warm-up."""
    schedule = case.recipe.optim.schedule
    if not all(map(_has_length, schedule.pieces)):
        return None
    before = schedule.warmup_steps
    what = "optim.schedule.warmup_steps"
    for number, end in enumerate(piece_ends(schedule)):
        key = f"{_KEY}.{number}.until"
        if end <= before:
            text = f"{key}={end} must be above {before}, where {what} ends; set it higher, or give steps, a length"
            return Problem(key, text)
        before = end
        what = f"{_KEY}.{number}"
    return None


def pieces_say_a_rate_once(case: Case) -> Problem | None:
    """Each piece of a schedule says its rates once: absolute or as a factor, and of a constant one only the start."""
    for number, piece in enumerate(case.recipe.optim.schedule.pieces):
        problem = _rate_problem(f"{_KEY}.{number}", piece)
        if problem is not None:
            return problem
    return None


def pieces_stay_below_the_highest_rate(case: Case) -> Problem | None:
    """No piece of a schedule has a rate above lr."""
    lr = case.recipe.optim.lr
    for number, piece in enumerate(case.recipe.optim.schedule.pieces):
        for name, rate in (("start_lr", piece.start_lr), ("lr", piece.lr)):
            if rate is not None and rate > lr * (1 + _ROUNDING):
                key = f"{_KEY}.{number}.{name}"
                text = f"{key}={rate:g} must be at most optim.lr={lr:g}, the highest rate; lower it, or raise optim.lr"
                return Problem(key, text)
    return None


def pieces_reach_the_end(case: Case) -> Problem | None:
    """The pieces of a schedule reach the end of the run, or it says what follows them."""
    schedule = case.recipe.optim.schedule
    pieces = _whole_pieces(schedule, case.recipe.optim.lr)
    steps = case.recipe.train.steps
    if not pieces or schedule.kind != "piecewise" or schedule.after_pieces == "stay":
        return None
    end = schedule.first_step + pieces[-1].end
    if end >= steps:
        return None
    key = f"{_KEY}.{len(pieces) - 1}.until"
    text = (
        f"{key}={pieces[-1].end} ends the last piece at step {end}, before train.steps={steps}; raise it, add a piece "
    )
    text += f"of {steps - end} steps, or set optim.schedule.after_pieces=stay: the rate stays {pieces[-1].end_lr:g}"
    return Problem(key, text)


def _has_length(piece: PieceSpec) -> bool:
    return (piece.steps is None) != (piece.until is None)


def _whole_pieces(schedule: ScheduleSpec, lr: float) -> list[Piece]:
    """The pieces, where each says its length and they ascend; else none, which is told by other rules."""
    if not all(map(_has_length, schedule.pieces)):
        return []
    pieces = pieces_of(schedule, lr)
    if any(piece.end <= piece.start for piece in pieces):
        return []
    return pieces


def _rate_problem(key: str, piece: PieceSpec) -> Problem | None:
    """What is wrong with the rates of one piece."""
    for absolute, factor in (("start_lr", "start_factor"), ("lr", "factor")):
        rate = getattr(piece, absolute)
        share = getattr(piece, factor)
        if rate is not None and share is not None:
            text = f"{key}.{absolute}={rate:g} beside {factor}={share:g}: a rate is said once; drop one of them"
            return Problem(f"{key}.{absolute}", text)
    name = "lr"
    value = piece.lr
    if piece.lr is None:
        name = "factor"
        value = piece.factor
    if piece.shape == "constant" and value is not None:
        text = f"{key}.{name}={value:g} with shape=constant, which stays as it starts; drop it, or set start_{name} "
        return Problem(f"{key}.{name}", f"{text}to jump there")
    if piece.shape != "constant" and value is None:
        text = f"{key}.shape={piece.shape} needs a rate to end at; set lr, or factor, its share of optim.lr"
        return Problem(f"{key}.shape", text)
    return None
