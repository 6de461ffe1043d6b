"""Rules about bad numbers, and about hardware that computes or remembers wrongly."""

from megaspec.core.divisors import divisors
from megaspec.core.errors import Problem
from megaspec.core.problems import show
from megaspec.precision.spec import fp8_recipe
from megaspec.rules.case import Case
from megaspec.rules.ways import Way, way_out


def going_back_needs_checkpoints(case: Case) -> Problem | None:
    """A run that may go back has checkpoints to go back to."""
    rollbacks = case.recipe.train.numbers.rollbacks
    every = case.recipe.checkpoint.every
    if rollbacks == 0 or every > 0:
        return None
    text = f"train.numbers.rollbacks={rollbacks} goes back to a checkpoint, checkpoint.every={every} writes none"
    return Problem("train.numbers.rollbacks", f"{text}; set checkpoint.every, or train.numbers.rollbacks=0")


def what_lies_before_needs_going_back(case: Case) -> Problem | None:
    """Data before a bad step is left out by going back."""
    numbers = case.recipe.train.numbers
    if numbers.before == 0 or numbers.rollbacks > 0:
        return None
    text = f"train.numbers.before={numbers.before} is of steps that are left out where the run goes back,"
    return Problem("train.numbers.before", f"{text} train.numbers.rollbacks=0; drop it, or set train.numbers.rollbacks")


def skips_are_fewer_than_the_steps_they_are_counted_in(case: Case) -> Problem | None:
    """More updates than may be skipped fit into the steps in which they are counted."""
    numbers = case.recipe.train.numbers
    if numbers.skips < numbers.within:
        return None
    text = f"train.numbers.skips={numbers.skips} must be below train.numbers.within={numbers.within}"
    text += ": no more than that are ever counted, so that a run of nothing but bad numbers would never end"
    ways = [f"set train.numbers.within={max(100, 2 * numbers.skips)}"]
    if numbers.within > 1:
        ways.append(f"train.numbers.skips={numbers.within - 1}")
    else:
        ways.append("train.numbers.skips=0")
    return Problem("train.numbers.skips", f"{text}; {' or '.join(ways)}")


def some_steps_are_trained_on(case: Case) -> Problem | None:
    """Of the steps of a run not all are left out."""
    train = case.recipe.train
    if not train.skip_steps or skipped_steps_are_in_order(case) is not None:
        return None
    to_come = train.steps - case.facts.start.step
    left_out = 0
    for steps in train.skip_steps:
        left_out += steps.last - steps.first + 1
    if left_out < to_come:
        return None
    text = f"train.skip_steps leaves out all {to_come} steps to come, up to train.steps={train.steps}:"
    return Problem("train.skip_steps", f"{text} nothing would be trained; drop some of them, or raise train.steps")


def skipped_steps_are_in_order(case: Case) -> Problem | None:
    """Steps to leave out come in order, apart from each other, and are steps that are still to come."""
    train = case.recipe.train
    done = case.facts.start.step
    for number, steps in enumerate(train.skip_steps):
        key = f"train.skip_steps.{number}"
        said = f"{key}={{first: {steps.first}, last: {steps.last}}}"
        if steps.first > steps.last:
            way = f"write {{first: {steps.last}, last: {steps.first}}}"
            return Problem(key, f"{said} must name the first step and then the last; {way}")
        if steps.last > train.steps:
            return Problem(key, f"{said} must end by train.steps={train.steps}; lower it")
        if steps.first <= done:
            return Problem(key, f"{said}: {done} steps are done, and can't be left out any more; take later ones")
        if number and steps.first <= train.skip_steps[number - 1].last:
            before = train.skip_steps[number - 1]
            text = f"{said} must begin behind those before it, {{first: {before.first}, last: {before.last}}}"
            return Problem(key, f"{text}; put them in order, or make them one")
    return None


def computing_again_needs_determinism(case: Case) -> Problem | None:
    """What is computed twice comes out alike only where operations are deterministic."""
    train = case.recipe.train
    share = train.checks.recompute
    if share == 0 or train.deterministic:
        return None
    text = (
        f"train.checks.recompute={show(share)} compares to the bit, which needs train.deterministic=true, it is false"
    )
    return Problem("train.checks.recompute", f"{text}; set train.deterministic=true, or train.checks.recompute=0")


def sums_are_taken_when_they_are_compared(case: Case) -> Problem | None:
    """Steps in which copies are compared are steps in which they are summed."""
    checks = case.recipe.train.checks
    if checks.replicas_every == 0:
        if checks.sum_every == 1:
            return None
        text = f"train.checks.sum_every={checks.sum_every} is of copies that are compared,"
        return Problem(
            "train.checks.sum_every",
            f"{text} train.checks.replicas_every=0; drop it, or set train.checks.replicas_every",
        )
    if checks.replicas_every % checks.sum_every == 0:
        return None
    text = f"train.checks.sum_every={checks.sum_every} must divide train.checks.replicas_every={checks.replicas_every}"
    way = way_out(case, Way("train.checks.sum_every", divisors(checks.replicas_every), checks.sum_every, most=3))
    return Problem("train.checks.sum_every", f"{text}; {way}")


def comparing_needs_copies(case: Case) -> Problem | None:
    """Copies are compared where several ranks hold some."""
    recipe = case.recipe
    parallelism = recipe.parallelism
    every = recipe.train.checks.replicas_every
    if every == 0 or case.dp_is_open:
        return None
    ranks = recipe.launcher.ranks
    shares_all = parallelism.dp_strategy == "fsdp" and parallelism.tp == 1 and parallelism.pp == 1
    # state of routers and delayed scales is whole on every rank
    has_shared_state = recipe.model.moe is not None or fp8_recipe(recipe.precision) == "delayed"
    if ranks > 1 and (not shares_all or has_shared_state):
        return None
    text = f"train.checks.replicas_every={every} compares what several ranks hold alike,"
    if ranks == 1:
        text += " launcher.ranks=1 is alone"
    else:
        text += " parallelism.dp_strategy=fsdp leaves each rank its own"
    return Problem(
        "train.checks.replicas_every", f"{text}; set train.checks.replicas_every=0 and train.checks.state in its place"
    )
