"""`megaspec train recipe=NAME a.b=c ...`: one run, or with -m every point of a sweep."""

import argparse
import os
from typing import Any

from megaspec.checkable import PartlyError
from megaspec.commands.starting import Prepared, prepare_new, prepare_resume, refuse_tasks, start
from megaspec.commands.submitting import launcher_of_points, submit, submit_points
from megaspec.commands.supervised import SUPERVISE_HELP, supervise
from megaspec.compose.compose import Composed
from megaspec.compose.words import compose_words, take, tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError
from megaspec.estimate.target import Target, detect_target
from megaspec.launcher.spec import ClusterLauncher
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import planned_run_dir
from megaspec.run_folder import is_run, read_run, refuse_unfinished_fork
from megaspec.search.fits import MEMORY
from megaspec.sweep.multirun import multirun


def add_parser(commands: Any) -> None:
    """The parser of `train`."""
    text = "train a recipe: recipe=NAME a.b=c ... [resume=auto] [memory=ignore]"
    command = commands.add_parser("train", help=text, description=text, allow_abbrev=False, parents=[words_parser()])
    command.add_argument(
        "--print", action="store_true", help="with launcher=slurm or kubernetes: print the job, and start nothing"
    )
    command.add_argument("-m", "--multirun", action="store_true", help="run every point of a.b=1,2; sweep.slots=N ...")
    command.add_argument("--supervise", action="store_true", help=SUPERVISE_HELP)


def run(args: argparse.Namespace) -> int:
    """Compose, resolve, make the run folder, start the ranks."""
    refuse_tasks()
    if args.multirun and args.supervise:
        text = "--supervise keeps one run alive, and -m starts several; drop one of them"
        raise RecipeError([Problem("", text, COMMAND_LINE, "supervise")])
    if args.multirun:
        launcher = launcher_of_points(args.words, args.config_dir, prints=args.print)
        if launcher is not None:
            return submit_points(args.words, args.config_dir, launcher, prints=args.print)
        if args.print:
            raise _nothing_to_print()
        return multirun(args.words, args.config_dir)
    how, words = take(args.words, "resume", ("never", "auto"))
    memory, words = take(words, "memory", MEMORY)
    try:
        composed = compose_words(words, args.config_dir)
    except PartlyError as error:
        raise with_rules(error, lambda _: detect_target(), is_for_training=True) from None

    launcher = composed.recipe.launcher
    if isinstance(launcher, ClusterLauncher):
        if args.supervise:
            text = "--supervise: the only node of a job supervises its ranks by itself, several are started again by "
            text += f"launcher.kind={launcher.kind}; drop it"
            raise RecipeError([Problem("", text, COMMAND_LINE, "supervise")])
        return submit(composed, launcher, goes_on=how == "auto", memory=memory, prints=args.print)
    if args.print:
        raise _nothing_to_print()

    def prepare(target: Target, layout: Composed) -> Prepared:
        folder = planned_run_dir(composed.recipe)
        if how == "auto":
            refuse_unfinished_fork(folder)
        if how == "auto" and is_run(folder):
            recipe = layout.recipe
            return prepare_resume(folder, recipe, layout.origins, target, memory=memory, kept=composed.recipe)
        return prepare_new(layout, target, folder if how == "auto" else None, memory=memory, kept=composed.recipe)

    if args.supervise:
        tell_left_out(composed)
        known = ()
        if how == "auto" and is_run(planned_run_dir(composed.recipe)):
            known = read_run(planned_run_dir(composed.recipe)).spec.remote
        return supervise(
            composed,
            lambda target, option: prepare(target, option.composed),
            place=planned_run_dir(composed.recipe),
            memory=memory,
            config_dirs=args.config_dir,
            known=known,
        )

    # under torchrun by rank 0 alone
    if os.environ.get("RANK", "0") == "0":
        tell_left_out(composed)
    return start(composed, prepare, memory=memory, config_dirs=args.config_dir)


def _nothing_to_print() -> RecipeError:
    text = "--print: launcher.kind=local starts ranks here and writes no job; set launcher=slurm or kubernetes"
    return RecipeError([Problem("launcher.kind", text, COMMAND_LINE)])
