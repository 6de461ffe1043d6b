"""Rules about which steps are profiled."""

from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.profiling.spec import ProfileSpec
from megaspec.rules.case import Case

MOST_STEPS = 50
"""A profile holds every kernel of its steps in memory, and becomes one file."""


def profiled_steps_are_in_order(case: Case) -> Problem | None:
    """The first step to profile comes before the last, or is the last."""
    steps = case.recipe.profile.steps
    if steps is None or steps[0] <= steps[1]:
        return None
    text = (
        f"profile.steps={show(list(steps))} must name the first step and then the last; write [{steps[1]}, {steps[0]}]"
    )
    return Problem("profile.steps", text)


def profiled_steps_are_trained(case: Case) -> Problem | None:
    """Steps that are profiled are steps of the run."""
    steps = case.recipe.profile.steps
    last = case.recipe.train.steps
    if steps is None or steps[0] > steps[1] or steps[1] <= last:
        return None
    text = f"profile.steps={show(list(steps))} must end by train.steps={last}"
    # those that are there: earlier ones may be done where a run goes on
    first = max(min(steps[0], last), last - MOST_STEPS + 1)
    return Problem("profile.steps", f"{text}; try [{first}, {last}]")


def profiled_steps_are_few(case: Case) -> Problem | None:
    """At most 50 steps are profiled."""
    steps = case.recipe.profile.steps
    if steps is None or steps[0] > steps[1] or steps[1] - steps[0] < MOST_STEPS:
        return None
    count = steps[1] - steps[0] + 1
    text = (
        f"profile.steps={show(list(steps))} are {count:,} steps, and every kernel of them is kept: at most {MOST_STEPS}"
    )
    return Problem("profile.steps", f"{text}; try [{steps[0]}, {steps[0] + 2}]")


def profiled_ranks_are_ranks(case: Case) -> Problem | None:
    """Ranks that are profiled are ranks of the run, each named once."""
    ranks = case.recipe.profile.ranks
    world = case.recipe.launcher.ranks
    if len(set(ranks)) == len(ranks) and max(ranks) < world:
        return None
    text = f"profile.ranks={show(list(ranks))} must name ranks below launcher.ranks={world}, each once"
    there = sorted({rank for rank in ranks if rank < world})
    return Problem("profile.ranks", f"{text}; try {show(there or [0])}")


def profile_settings_need_steps(case: Case) -> Problem | None:
    """What is said of a profile needs steps to profile."""
    profile = case.recipe.profile
    if profile.steps is not None:
        return None
    for name, field in ProfileSpec.model_fields.items():
        value = getattr(profile, name)
        if name != "steps" and value != field.default:
            text = f"profile.{name}={show(value)} needs profile.steps, which is null"
            return Problem(f"profile.{name}", f"{text}; set profile.steps=[10, 12], or drop profile.{name}")
    return None
