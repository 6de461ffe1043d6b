"""`megaspec resume RUN a.b=c ...`: a run goes on, or another one starts from its newest checkpoint."""

import argparse
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.checkable import PartlyError
from megaspec.checkpoint.fallback import tell_elsewhere
from megaspec.commands.planned import refuse_jobs
from megaspec.commands.starting import (
    Prepared,
    lock_new,
    prepare_resume,
    refuse_no_address,
    refuse_other_places,
    refuse_tasks,
    start,
    warn,
)
from megaspec.commands.supervised import SUPERVISE_HELP, supervise
from megaspec.compose.compose import Composed, recompose
from megaspec.compose.words import take
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.estimate.target import Target, detect_target
from megaspec.optim.schedule import learning_rate
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resume import fork
from megaspec.rules.belonging import (
    fork_point,
    holds_weights_alone,
    last_of_weights,
    leaves_histories,
    starts_optimizer_anew,
)
from megaspec.rules.unread import no_longer_read
from megaspec.run_folder import (
    make_fork,
    newest_good,
    read_run,
    refuse_gone_kernels,
    refuse_unfinished_fork,
    refuse_weights_alone,
)
from megaspec.search.fits import MEMORY, start_problems
from megaspec.spec import Spec


def add_parser(commands: Any) -> None:
    """The parser of `resume`."""
    text = "go on with a run, changed where the experiment allows it"
    command = commands.add_parser("resume", help=text, description=text, allow_abbrev=False)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("--fork", metavar="NEW", help="start another run from its newest checkpoint; all may change")
    command.add_argument("words", nargs="*", default=[], metavar="a.b=c", help="path=value, group=choice or ~path")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups")
    command.add_argument("--supervise", action="store_true", help=SUPERVISE_HELP)


def run(args: argparse.Namespace) -> int:
    """Resolve a run anew with changes, and start its ranks; with --fork, in a folder of its own."""
    refuse_tasks()
    saved = read_run(args.run, allows_gone=True)
    refuse_weights_alone(args.run, saved.spec)
    memory, words = take(args.words, "memory", MEMORY)
    try:
        composed = recompose(saved.recipe, str(args.run / "recipe.json"), words, args.config_dir)
    except PartlyError as error:
        goes_on = args.fork is None
        raise with_rules(error, lambda _: detect_target(), is_for_training=True, has_begun=goes_on) from None
    refuse_gone_kernels(saved, composed.recipe, composed.origins, command="resume")
    refuse_jobs(composed.recipe, composed.origins, "resume")
    if composed.origins.get("run_dir") == COMMAND_LINE:
        text = f"run_dir={composed.recipe.run_dir}: a run stays in its folder; drop it, or give --fork NEW"
        raise RecipeError([Problem("run_dir", text, COMMAND_LINE, "resume-folder")])

    def prepare(target: Target, layout: Composed) -> Prepared:
        if args.fork is not None:
            return _prepare_fork(args.run, saved.spec, layout, target, args.fork, memory=memory, kept=composed.recipe)
        recipe = layout.recipe
        return prepare_resume(args.run, recipe, layout.origins, target, memory=memory, kept=composed.recipe)

    if args.supervise:
        place = args.run
        known = saved.spec.remote
        if args.fork is not None:
            place = _place_of_fork(args.run, args.fork)
            known = ()
        return supervise(
            composed,
            lambda target, option: prepare(target, option.composed),
            place=place,
            memory=memory,
            config_dirs=args.config_dir,
            known=known,
        )
    return start(composed, prepare, memory=memory, config_dirs=args.config_dir)


def _place_of_fork(source: Path, new: str) -> Path:
    """The folder of a fork: beside its source, unless the word is a path."""
    if "/" in new:
        return Path(new)
    return source.parent / new


def _recipe_at(recipe: Recipe, place: Path, *, old_name: str) -> Recipe:
    """The recipe of a run in another folder; of a fork, whose name is that of its source, with a name of its own."""
    fields = recipe.model_dump(mode="json") | {"run_dir": str(place)}
    if fields["name"] == old_name:
        fields["name"] = place.name
    return Recipe.model_validate_json(json.dumps(fields))


def _prepare_fork(
    source: Path, old: Spec, composed: Composed, target: Target, new: str, *, memory: str, kept: Recipe
) -> Prepared:
    """A fork, ready to start. `kept`: the recipe that its folder keeps, where `composed` is one of its layouts."""
    place = _place_of_fork(source, new)
    refuse_unfinished_fork(place)
    recipe = _recipe_at(composed.recipe, place, old_name=old.name)
    kept = _recipe_at(kept, place, old_name=old.name)
    good = newest_good(source, old)
    for what in good.passed_over:
        print(printable(f"megaspec: a checkpoint is not good: {what}"), file=sys.stderr)
    tell_elsewhere(source, good.candidate)
    if holds_weights_alone(good.manifest):
        text = f"step {good.manifest.step} of {source} {last_of_weights(source)}"
        raise RecipeError([Problem("", text, code="run-weights")])
    state = good.manifest.state
    began = fork_point(good.manifest)
    facts = gather_facts(recipe)
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    spec = fork(
        old,
        recipe,
        target,
        facts,
        composed.origins,
        done_steps=began.step,
        done_samples=state["samples"],
        forked_from=began,
        refused=refused,
    )
    refuse_no_address(spec)
    refuse_other_places(spec, is_new=True)
    warn(spec, target)
    lock = lock_new(place, goes_on=False)
    assert lock is not None, "a new run without its lock"
    with ExitStack() as stack:
        stack.callback(lock.release)
        make_fork(place, source, good, kept, target, spec)
        stack.pop_all()
    said = f"{place} starts from step {began.step} of {source}; {_rates(old, spec, began.step)}"
    if starts_optimizer_anew(good.manifest, spec):
        said += "; it trains what was frozen there, so that the optimizer's state starts anew"
    for unread in no_longer_read(old, recipe):
        said += f"; {unread}"
    if leaves_histories(good.manifest, spec):
        said += "; what delayed scales remember there stays behind"
    print(printable(said))
    return Prepared(place, spec, lock)


def _rates(old: Spec, new: Spec, step: int) -> str:
    """The learning rate before and behind the step of a fork, and from where its schedule is counted."""
    there = f"learning rate {learning_rate(old.optim.schedule, old.optim.lr, step):.4g} there"
    if step == new.train.steps:
        return there
    here = learning_rate(new.optim.schedule, new.optim.lr, step + 1)
    return f"{there}, {here:.4g} in step {step + 1} here, counted from step {new.optim.schedule.first_step}"
