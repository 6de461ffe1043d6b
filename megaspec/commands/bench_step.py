"""`megaspec bench step`: where the time of a training step goes on this machine, beside what the plan says."""

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.checkable import PartlyError
from megaspec.commands.numbers import count, positive
from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.planned import THROUGHPUT, refuse_jobs, split_words
from megaspec.compose.compose import Composed
from megaspec.compose.words import compose_words, take, tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, WriteError, printable
from megaspec.core.problems import show, value_at
from megaspec.data.fetch import bring_here
from megaspec.data.files import write_text
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import read_throughput
from megaspec.launcher.loopback import bind_to_loopback
from megaspec.launcher.run_secret import job_of_parent, take_secret
from megaspec.log.events import StepsProfiled
from megaspec.log.prediction import FILE_NAME
from megaspec.log.profile_table import table_lines
from megaspec.plan.predict import predict
from megaspec.plugins import loaded
from megaspec.profiling.spec import ProfileSpec
from megaspec.resolve.beside import with_rules
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.profile_rules import MOST_STEPS
from megaspec.search.fits import MEMORY, start_problems
from megaspec.spec import Spec
from megaspec_launchers.environment import RankPlace, rank_from_environment
from megaspec_launchers.local import launch
from megaspec_launchers.tasks import refuse_lone_tasks

_ENTRY = "megaspec.runtime.profile_rank:main"
_PROFILES = "profiles.json"
_DESCRIPTION = """Build a run as train does, train some steps to warm up, and tell by kind where the time of the next
ones goes: kernels, what they reach, waiting, and the plan beside it. No run folder is made; weights are drawn from the
seed. On a CPU too.

recipe=NAME a.b=c ... are the words of train, throughput=FILE is that of plan. The ranks are started here, one for each
GPU, or by torchrun: torchrun --nproc-per-node 4 -m megaspec.cli bench step recipe=NAME"""


def add_parser(commands: Any) -> None:
    """Register `bench step`."""
    step = commands.add_parser(
        "step",
        help="where the time of a training step goes: recipe=NAME a.b=c ...",
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
        parents=[words_parser()],
    )
    step.add_argument("--warm", type=count, default=5, metavar="N", help="steps before anything is measured (5)")
    text = f"steps that are timed, and again as many that are profiled (3, at most {MOST_STEPS})"
    step.add_argument("--steps", type=positive, default=3, metavar="N", help=text)
    text = "a rank to profile (0); may be given again"
    step.add_argument("--rank", type=count, action="append", default=[], metavar="N", help=text)
    text = "give every expert as many tokens as any other: new routers have no balance yet"
    step.add_argument("--balanced", action="store_true", help=text)
    step.add_argument("--out", metavar="FILE", help="write a JSON line for each rank that is profiled")


def run(args: argparse.Namespace) -> int:
    """Resolve, start ranks, print what they found. Raises RecipeError, WriteError."""
    refuse_lone_tasks(os.environ, sys.argv[1:])
    if args.steps > MOST_STEPS:
        raise RecipeError(f"--steps {args.steps}: every kernel is kept, take at most {MOST_STEPS}")
    if args.out is not None:
        _check_writable(Path(args.out))
    ranks = sorted(set(args.rank)) or [0]
    arguments = {
        "warm": args.warm,
        "steps": args.steps,
        "ranks": ranks,
        "balanced": args.balanced,
        "plugins": loaded(),
    }
    place = rank_from_environment(os.environ)
    folder = Path(tempfile.mkdtemp(prefix="megaspec-bench-"))
    try:
        if place is None:
            spec = _prepare(args, detect_target(), folder, ranks)
            bring_here(spec.data, spec.remote)
            code = launch(
                str(folder),
                ranks=spec.world_size,
                entry=_ENTRY,
                grace_seconds=spec.launcher.grace_seconds,
                timeout_seconds=spec.launcher.timeout_seconds,
                arguments=arguments,
            )
        else:
            code = _join(args, place, folder, ranks, arguments)
        if code == 0 and (place is None or place.rank == 0):
            _tell(args, folder)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _join(args: argparse.Namespace, place: RankPlace, folder: Path, ranks: list[int], arguments: dict[str, Any]) -> int:
    """Takes part in a world that torchrun has started; rank 0 prepares. -> exit code."""
    from megaspec.runtime.join import join  # torch, only where it is needed
    from megaspec.runtime.profile_rank import main

    def make() -> str:
        _prepare(args, detect_target(), folder, ranks)
        return str(folder)

    secret = take_secret(os.environ, world_size=place.world_size, job=job_of_parent(place.store.prefix))
    bind_to_loopback(os.environ, world_size=place.world_size)
    return join(make, **vars(place), secret=secret, entry=partial(main, **arguments))


def _prepare(args: argparse.Namespace, target: Target, folder: Path, ranks: list[int]) -> Spec:
    """Writes what ranks read. RecipeError: the recipe can't be trained here, or has too few steps or ranks."""
    memory, words = take(args.words, "memory", MEMORY)
    given, words = split_words(words, (THROUGHPUT,))
    try:
        composed = compose_words(words, args.config_dir)
    except PartlyError as error:
        raise with_rules(error, lambda _: target, is_for_training=True) from None
    refuse_jobs(composed.recipe, composed.origins, "bench step")
    tell_left_out(composed)
    facts = gather_facts(composed.recipe)
    refused = partial(start_problems, target=target, origins=composed.origins, memory=memory)
    spec = resolve(composed.recipe, target, facts, composed.origins, refused=refused)
    _refuse(args, composed, spec, ranks)
    measured = None
    if THROUGHPUT in given:
        measured = read_throughput(Path(given[THROUGHPUT]))
    (folder / "spec.json").write_text(spec.model_dump_json())
    (folder / FILE_NAME).write_text(predict(spec, target, throughput=measured).model_dump_json())
    return spec


def _refuse(args: argparse.Namespace, composed: Composed, spec: Spec, ranks: list[int]) -> None:
    needed = args.warm + 2 * args.steps
    problems = []
    if spec.train.steps < needed:
        text = f"train.steps={spec.train.steps} must be at least the {needed} steps that --warm {args.warm} and twice"
        text += f" --steps {args.steps} are; set train.steps={needed}, or give fewer"
        problems.append(Problem("train.steps", text, composed.origins.get("train.steps", "")))
    if ranks[-1] >= spec.world_size:
        text = f"--rank {ranks[-1]} must be below launcher.ranks={spec.world_size}"
        way_out = "try 0"
        if spec.world_size > 1:
            way_out = f"try 0 to {spec.world_size - 1}"
        problems.append(Problem("launcher.ranks", f"{text}; {way_out}"))
    if args.balanced and composed.recipe.model.moe is None:
        text = "--balanced is for experts, and model.moe=null: there are none; drop it"
        problems.append(Problem("model.moe", text, composed.origins.get("model.moe", "")))
    problems += _said_of_profiles(composed)
    if problems:
        raise RecipeError(problems)


def _said_of_profiles(composed: Composed) -> list[Problem]:
    """What the command line says of a run's own profile, which is not made here. A recipe may say it for its runs."""
    instead = {"profile.steps": "--warm and --steps", "profile.ranks": "--rank"}
    problems = []
    for key in (f"profile.{name}" for name in ProfileSpec.model_fields):
        if composed.origins.get(key) == COMMAND_LINE:
            value = show(value_at(composed.recipe.model_dump(mode="json"), key))
            text = f"{key}={value} is of train and resume; drop it"
            if key in instead:
                text += f", bench step takes {instead[key]}"
            problems.append(Problem(key, text, COMMAND_LINE))
    return problems


def _tell(args: argparse.Namespace, folder: Path) -> None:
    """Prints the tables, and writes the JSON lines."""
    spec = Spec.model_validate_json((folder / "spec.json").read_text())
    lines = []
    for content in json.loads((folder / _PROFILES).read_text()):
        event = StepsProfiled.from_plain(content)
        for line in table_lines(event):
            print(printable(line))
        lines.append(json.dumps(_as_json(event, spec)))
    if args.out is not None:
        write_text(Path(args.out), "\n".join(lines) + "\n")
        print(printable(f"written: {args.out}"))


def _as_json(event: StepsProfiled, spec: Spec) -> dict[str, Any]:
    """A profile with what it is of, of one step."""
    content = asdict(event)
    content["name"] = spec.name
    content["world_size"] = spec.world_size
    content["step_seconds"] = event.seconds / event.steps
    return content


def _check_writable(out: Path) -> None:
    """Before minutes are spent on measuring."""
    folder = out.parent
    written = out if out.exists() else folder
    if out.is_dir() or not folder.is_dir() or not os.access(written, os.W_OK):
        raise WriteError(f"{out} can't be written; name another file with --out")
