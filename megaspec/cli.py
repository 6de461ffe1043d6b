"""The command line: parse, call, print. `plan` and everything else before ranks start runs without torch."""

import sys

from megaspec.launcher.stop import leave_on_request

if __name__ == "__main__":
    leave_on_request(sys.argv[1:])  # first of all: what follows takes seconds to import

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from math import inf
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from megaspec import __version__, completion
from megaspec.checkable import PartlyError
from megaspec.checkpoint.lock import RunLock
from megaspec.commands import bench as bench_commands
from megaspec.commands import check as check_commands
from megaspec.commands import checkpoint as checkpoint_commands
from megaspec.commands import diff as diff_commands
from megaspec.commands import explain as explain_commands
from megaspec.commands import from_megatron as from_megatron_commands
from megaspec.commands import plan as plan_commands
from megaspec.commands import recipes as recipes_commands
from megaspec.commands import schema as schema_commands
from megaspec.commands import tune
from megaspec.commands import verify as verify_commands
from megaspec.compose.compose import Composed, recompose
from megaspec.compose.words import compose_words, take, tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, HangError, MegaspecError, Problem, RecipeError, printable
from megaspec.core.problems import did_you_mean
from megaspec.core.terminal import terminal
from megaspec.data import commands as data_commands
from megaspec.data.spec import IndexedSpec
from megaspec.estimate.target import Target, detect_target
from megaspec.launcher import exit_file
from megaspec.log.environment import write_environment
from megaspec.plan.promise import promise_of_change
from megaspec.plan.report import print_plan
from megaspec.plugins import load, loaded, take_flags
from megaspec.recipe import Recipe
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts, planned_run_dir
from megaspec.resolve.resolver import resolve
from megaspec.resolve.resume import fork, resume
from megaspec.run_folder import (
    copy_checkpoint,
    is_run,
    make_folder,
    newest_good,
    newest_step,
    read_run,
    refuse_links,
    write_run,
)
from megaspec.search.fits import MEMORY, memory_warning, start_problems
from megaspec.spec import ForkPoint, Spec
from megaspec.sweep import commands as sweep_commands
from megaspec.sweep.commands import multirun
from megaspec_launchers.environment import rank_from_environment
from megaspec_launchers.local import launch
from megaspec_launchers.signals import end_with

USAGE_EXIT = RecipeError.exit_code
INTERRUPTED_EXIT = 130
_SWEEP = "only `megaspec train` runs several points"
_IN_FOLDER = "megaspec plan shows what is decided; a run keeps recipe.json and spec.json in its folder"
# What users of Hydra reach for.
_HYDRA_FLAGS = {"-m": _SWEEP, "--multirun": _SWEEP, "--cfg": _IN_FOLDER, "-c": _IN_FOLDER}

# Commands that stand in modules of their own: `add_parser(commands)` adds the parser of that name, `run(args)` runs it.
MODULES: dict[str, ModuleType] = {
    "tune": tune,
    "plan": plan_commands,
    "verify": verify_commands,
    "data": data_commands,
    "checkpoint": checkpoint_commands,
    "from-megatron": from_megatron_commands,
    "bench": bench_commands,
    "diff": diff_commands,
    "explain": explain_commands,
    "check": check_commands,
    "recipes": recipes_commands,
    "schema": schema_commands,
    "completion": completion,
    "sweep": sweep_commands,
}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: its folder is written."""

    folder: Path
    spec: Spec
    lock: RunLock | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. -> exit code (core/errors.py); 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a letter shows a question mark
    words = list(sys.argv[1:] if arguments is None else arguments)
    asks_json = "--json" in words[: words.index("--") if "--" in words else None]
    try:
        packages, words = take_flags(words)
        load(packages)
        args = parse(words)
        return args.call(args)
    except MegaspecError as error:
        print(f"megaspec: {error}" if "\n" not in str(error) else f"megaspec:\n{error}", file=sys.stderr)
        if asks_json:
            print(json.dumps({"problems": [problem.as_json() for problem in error.problems]}, indent=1))
        codes = dict.fromkeys(p.code for p in error.problems if p.code)
        if codes and sys.stderr.isatty():
            print(f"more about it: megaspec explain {' | '.join(codes)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megaspec: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED_EXIT
    except BrokenPipeError:
        # whoever read our output has gone; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED_EXIT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise RecipeError(message)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command and its words. Overrides may stand anywhere; an unknown flag is an error. Raises RecipeError."""
    parser = _Parser(prog="megaspec", description="Declarative training of large transformers.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megaspec {__version__}")
    # taken out before: here for the help only
    parser.add_argument("--plugin", action="append", metavar="PACKAGE", help="add what a package offers; anywhere")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    words = words_parser()

    def add(name: str, text: str, call: Callable[[argparse.Namespace], int], **more: object) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **more)
        command.set_defaults(call=call)
        return command

    command = add(
        "train", "train a recipe: recipe=NAME a.b=c ... [resume=auto] [memory=ignore]", train, parents=[words]
    )
    command.add_argument("-m", "--multirun", action="store_true", help="run every point of a.b=1,2; sweep.slots=N ...")
    command = add("resume", "go on with a run, changed where the experiment allows it", resume_run)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("--fork", metavar="NEW", help="start another run from its newest checkpoint; all may change")
    command.add_argument("words", nargs="*", metavar="a.b=c", help="path=value, group=choice or ~path")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups")
    command = add("generate", "write text with the newest checkpoint of a run", generate)
    command.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("text", metavar="TEXT", help="what to go on from")
    command.add_argument("--tokens", type=int, default=64, metavar="N", help="how many tokens to write (64)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest (0.8)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    for name, module in MODULES.items():
        module.add_parser(commands)
        commands.choices[name].set_defaults(call=module.run)
    args, rest = parser.parse_known_args(arguments)
    flags = [r for r in rest if r.startswith("-")]
    if flags or (rest and not hasattr(args, "words")):
        raise RecipeError(_unknown_words(flags or rest, commands.choices[args.command]))
    if rest:
        args.words = [*args.words, *rest]
    return args


def _unknown_words(words: list[str], command: argparse.ArgumentParser) -> str:
    known = sorted(set(re.findall(r"--[a-z][a-z-]*", command.format_help())))
    word = words[0].partition("=")[0]
    near = did_you_mean(word.lstrip("-"), [k.removeprefix("--") for k in known]).replace("mean ", "mean --")
    hint = _HYDRA_FLAGS.get(word) or near
    if command.prog.endswith("from-megatron"):
        hint = "the flags of pretrain_gpt.py stand after --"
    if not hint and "=" in words[0]:
        hint = f"settings have no dashes: {words[0].lstrip('-')}"
    return f"{words[0]}: unknown; {hint or f'see megaspec {command.prog.split()[-1]} --help'}"


def train(args: argparse.Namespace) -> int:
    """Compose, resolve, make the run folder, start the ranks."""
    if args.multirun:
        return multirun(args.words, args.config_dir)
    how, words = take(args.words, "resume", ("never", "auto"))
    memory, words = take(words, "memory", MEMORY)
    try:
        composed = compose_words(words, args.config_dir)
    except PartlyError as error:
        raise with_rules(error, lambda _: detect_target(), is_for_training=True) from None

    def prepare(target: Target) -> Prepared:
        tell_left_out(composed)
        folder = planned_run_dir(composed.recipe)
        if how == "auto" and is_run(folder):
            return _prepare_resume(folder, composed.recipe, composed.origins, target, memory=memory)
        return _prepare_new(composed, target, folder if how == "auto" else None, memory=memory)

    return _start(prepare)


def resume_run(args: argparse.Namespace) -> int:
    """Resolve a run anew with changes, and start its ranks; with --fork, in a folder of its own."""
    saved = read_run(args.run)
    memory, words = take(args.words, "memory", MEMORY)
    try:
        composed = recompose(saved.recipe, str(args.run / "recipe.json"), words, args.config_dir)
    except PartlyError as error:
        raise with_rules(error, lambda _: detect_target(), is_for_training=True) from None
    if composed.origins.get("run_dir") == COMMAND_LINE:
        text = f"run_dir={composed.recipe.run_dir}: a run stays in its folder; drop it, or give --fork NEW"
        raise RecipeError([Problem("run_dir", text, COMMAND_LINE, "resume-folder")])

    def prepare(target: Target) -> Prepared:
        if args.fork is not None:
            return _prepare_fork(args.run, saved.spec, composed, target, args.fork, memory=memory)
        return _prepare_resume(args.run, composed.recipe, composed.origins, target, memory=memory)

    return _start(prepare)


def generate(args: argparse.Namespace) -> int:
    """Print what the newest good checkpoint of a run writes after a text."""
    if args.tokens < 0 or not 0 <= args.temperature < inf or args.seed < 0:
        raise RecipeError("--tokens, --temperature and --seed must be at least 0, and finite")
    if any("\ud800" <= c <= "\udfff" for c in args.text):
        raise RecipeError("TEXT is not valid UTF-8; give it in the encoding of the terminal")
    trained = read_run(args.run).spec
    from megaspec.runtime.generate import generate_text  # torch, only where it is needed

    cuda = detect_target().device == "cuda"
    written = generate_text(
        args.run, trained, args.text, tokens=args.tokens, temperature=args.temperature, seed=args.seed, cuda=cuda
    )
    print(printable(f"{args.text}{written}", keep="\n\t"))
    return 0


def _prepare_new(composed: Composed, target: Target, folder: Path | None, *, memory: str) -> Prepared:
    facts = gather_facts(composed.recipe)
    if folder is not None:
        facts = replace(facts, run_dir=str(folder))
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    spec = resolve(composed.recipe, target, facts, composed.origins, refused=refused)
    _warn(spec, target)
    place = Path(spec.run_dir)
    lock = _lock_new(place, goes_on=folder is not None)
    if lock is None:
        return _prepare_resume(place, composed.recipe, composed.origins, target, memory=memory)
    write_run(place, composed.recipe, target, spec)
    return Prepared(place, spec, lock)


def _lock_new(place: Path, *, goes_on: bool) -> RunLock | None:
    """The lock of a run that is to be made. RecipeError: the folder is in use.

    None with `goes_on` (resume=auto) where another job has made the run since this one looked.
    """
    try:
        make_folder(place)
    except RecipeError:
        if goes_on and is_run(place):
            return None
        raise
    lock = RunLock(place).acquire()
    if not is_run(place):
        return lock
    lock.release()
    if not goes_on:
        make_folder(place)  # raises
    return None


def _prepare_resume(folder: Path, recipe: Recipe, origins: dict[str, str], target: Target, *, memory: str) -> Prepared:
    refuse_links(folder)
    lock = RunLock(folder).acquire()
    with ExitStack() as stack:
        stack.callback(lock.release)
        old = read_run(folder).spec
        done = newest_step(folder)
        refused = partial(start_problems, target=target, origins=origins, memory=memory)
        spec = resume(old, recipe, target, gather_facts(recipe), origins, done_steps=done, refused=refused)
        _warn(spec, target)
        if done == spec.train.steps:
            print(printable(f"{folder}: all {done:,} steps are done; a larger train.steps trains it further"))
        elif done:
            print(printable(f"{folder} after step {done:,} {promise_of_change(old, spec)}"))
        write_run(folder, recipe, target, spec)
        stack.pop_all()
    return Prepared(folder, spec, lock)


def _prepare_fork(source: Path, old: Spec, composed: Composed, target: Target, new: str, *, memory: str) -> Prepared:
    place = Path(new) if "/" in new else source.parent / new
    fields = composed.recipe.model_dump(mode="json") | {"run_dir": str(place)}
    if fields["name"] == old.name:
        fields["name"] = place.name
    recipe = Recipe.model_validate_json(json.dumps(fields))
    good = newest_good(source, old)
    for what in good.passed_over:
        print(f"megaspec: a checkpoint is not good: {what}", file=sys.stderr)
    state = good.manifest.state
    began = ForkPoint(manifest=good.manifest.digest, step=good.manifest.step, tokens=state["tokens"])
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
    _warn(spec, target)
    make_folder(place)
    lock = RunLock(place).acquire()
    copy_checkpoint(good.candidate, good.manifest, place)
    write_run(place, recipe, target, spec)
    print(printable(f"{place} starts from step {began.step} of {source}"))
    return Prepared(place, spec, lock)


def _warn(spec: Spec, target: Target) -> None:
    """On stderr: that a run barely fits the GPUs' memory, and which sources of its data changed since."""
    warning = memory_warning(spec, target)
    if warning:
        print(printable(f"megaspec: {warning}"), file=sys.stderr)
    if isinstance(spec.data, IndexedSpec):
        from megaspec.data.source_sums import changes_at_start  # numpy, only where there are token files

        for part in spec.data.blend:
            for change in changes_at_start(part.prefix):
                print(printable(f"megaspec: {change}"), file=sys.stderr)


def _start(prepare: Callable[[Target], Prepared]) -> int:
    """Prepare the run and train it: in a world that torchrun made, or with ranks of our own."""
    target, place = detect_target(), rank_from_environment(os.environ)
    if place is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(os.getppid())  # torchrun dies of SIGUSR1 and tells nobody: its ranks save then, too
        from megaspec.runtime.join import join  # torch, only where it is needed

        def make() -> str:
            prepared = prepare(target)
            _record(prepared.folder)
            _show(prepared.spec, target)
            if prepared.lock is not None:
                prepared.lock.release()
            return str(prepared.folder)

        return join(make, **vars(place))
    prepared = prepare(target)
    assert prepared.lock is not None, "a run without its lock"
    with ExitStack() as stack:
        stack.callback(prepared.lock.release)
        _record(prepared.folder)
        _show(prepared.spec, target)
        try:
            code = launch(
                str(prepared.folder),
                ranks=prepared.spec.world_size,
                max_restarts=prepared.spec.launcher.max_restarts,
                grace_seconds=prepared.spec.launcher.grace_seconds,
                timeout_seconds=prepared.spec.launcher.timeout_seconds,
                arguments={"lock_token": prepared.lock.token, "plugins": loaded()},
                is_ours=prepared.lock.is_ours,
            )
        except MegaspecError as error:
            _ended(prepared, error.exit_code)
            raise
        code = _ended(prepared, code)
    if code == HangError.exit_code:
        step = newest_step(prepared.folder)
        saved = f"step {step} is saved" if step else "no step was saved yet"
        print(printable(f"megaspec: {saved}; megaspec resume {prepared.folder} goes on"), file=sys.stderr)
    return code


def _ended(prepared: Prepared, code: int) -> int:
    """Writes how this start ended into the run's folder while it is this job's. -> the code to end with."""
    assert prepared.lock is not None, "a run without its lock"
    if not prepared.lock.is_ours():
        return code
    return exit_file.end(prepared.folder, code, step=newest_step(prepared.folder))


def _record(folder: Path) -> None:
    """Keeps what the run is made with in its folder: versions, GPUs, commits, and this command line without secrets.

    That it is under way, too, in place of how it ended before.
    """
    exit_file.begin(folder, step=newest_step(folder))
    words = {"train", "resume", "--fork", "--config-dir", "--plugin", *loaded(), str(folder)}
    write_environment(folder, command=sys.argv, words=words, sections={*Recipe.model_fields, "recipe", "resume"})


def _show(spec: Spec, target: Target) -> None:
    print_plan(spec, target, terminal())


if __name__ == "__main__":
    sys.exit(main())
