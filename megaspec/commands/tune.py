"""`megaspec tune`: the best layouts of a recipe for a number of GPUs."""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from megaspec.commands.planned import plan_words
from megaspec.compose.compose import Composed, compose
from megaspec.compose.words import tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, Problem, RecipeError, printable
from megaspec.core.frozen import AUTO
from megaspec.core.problems import as_word, one_of, value_at
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import GIB
from megaspec.data.files import write_text
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.parallelism.stages import stages_of
from megaspec.recipe import Recipe
from megaspec.resolve.fill import plainly_filled
from megaspec.resolve.gather import gather_facts
from megaspec.rules.difference import leaves
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.tune import DIVIDES, SEARCHED, Candidate, Found, Grid, tune

# What goes with a kind of recomputation that a search decides.
_RECOMPUTED = tuple(f"parallelism.recompute.{name}" for name in ("parts", "method", "layers"))
# What follows from the fields that a search decides, unless the command line sets it.
OPEN_WITH_THEM = ("parallelism.dp_replicate", "parallelism.dp_shard", "parallelism.sequence_parallel")


@dataclass(frozen=True)
class Search:
    """A search that was made."""

    composed: Composed
    hardware: Hardware
    grid: Grid
    found: Found


_DESCRIPTION = """Search for the fastest layouts of a recipe that fit. What the command line sets stays as it is.

gpus=N: how many GPUs layouts are searched for; launcher.ranks follows. hardware=NAME: which GPUs. ceilings=FILE:
measured speeds, as `megaspec bench ceilings` writes them."""


def add_parser(commands: Any) -> None:
    """The parser of `tune`."""
    text = "search for the fastest layouts of a recipe: recipe=NAME gpus=N [hardware=H100] a.b=c ..."
    command = commands.add_parser(
        "tune",
        help=text,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[words_parser()],
    )
    command.add_argument("--top", type=int, default=10, metavar="N", help="how many to print (10)")
    command.add_argument("--out", type=Path, metavar="FILE", help="write one as a recipe, e.g. recipes/mine.yaml")
    command.add_argument("--take", type=int, default=1, metavar="N", help="which one --out writes (1, the fastest)")
    command.add_argument("--trainable", action="store_true", help="only what can be trained today")
    command.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search, print, write."""
    if args.top < 1 or args.take < 1:
        raise RecipeError("--top and --take must be at least 1")
    search = find(args)
    tell_left_out(search.composed)
    if not search.found.best:
        world, batch = search.grid.recipe.launcher.ranks, search.grid.recipe.train.global_batch
        text = f"no layout of {world} GPUs keeps the rules at train.global_batch={batch}; try another gpus= or batch"
        raise RecipeError([Problem("parallelism", text, code="tune-none")])
    too_large = _too_large(search)
    if args.out is not None and too_large is None:
        write(args, search)
    if args.json:
        problems = {"problems": [too_large.as_json()]} if too_large else {}
        print(json.dumps(as_json(search) | problems, indent=1))
    else:
        show_found(search)
    if too_large is not None:
        print(f"megaspec: {too_large}", file=sys.stderr)
        return RecipeError.exit_code
    return 0


def _too_large(search: Search) -> Problem | None:
    """Why even the smallest layout does not fit."""
    best, hardware = search.found.best[0], search.hardware
    if best.fits:
        return None
    text = f"no layout fits: the smallest needs {best.memory.total / GIB:.1f} GiB, {hardware.room / GIB:.1f} of"
    text += f" {hardware.name}'s {hardware.memory / GIB:.1f} may be planned with; try more GPUs (gpus=) or a larger one"
    text += " (hardware=)"
    return Problem("parallelism", text, code="tune-large")


def find(args: argparse.Namespace) -> Search:
    """The search that a command line asks for. What it sets itself stays."""
    planned = plan_words(args.words, args.config_dir, searched=(*SEARCHED, *OPEN_WITH_THEM, "launcher.ranks"))
    composed, target = planned.composed, planned.target
    if planned.hardware is None or planned.ceilings is None:
        text = f"hardware={target.gpu or 'cpu'} has nothing to search with; choose {one_of(list(HARDWARE))}"
        raise RecipeError([Problem("hardware", text, COMMAND_LINE, "hardware-unknown")])
    _refuse_other_ranks(composed, target.gpus)
    content = composed.recipe.model_dump(mode="json")
    fixed = {key for key, origin in composed.origins.items() if origin == COMMAND_LINE}
    fixed -= {key for key in fixed if value_at(content, key) == AUTO}
    open_keys = frozenset(SEARCHED) - fixed
    if any(value_at(content, key) for key in fixed.intersection(DIVIDES)):
        open_keys -= {"parallelism.pipeline.layout"}
    content["launcher"]["ranks"] = target.gpus
    for key in OPEN_WITH_THEM:
        if key not in fixed:
            content["parallelism"][key.rpartition(".")[2]] = AUTO
    if "train.micro_batch" in open_keys:
        content["train"]["micro_batch"] = AUTO
    asked = Recipe.model_validate_json(json.dumps(content))
    facts = replace(gather_facts(asked), problems=())
    base = plainly_filled(asked, target, facts)
    grid = Grid(base, target, facts, planned.hardware, planned.ceilings, open_keys, is_for_training=args.trainable)
    return Search(composed, planned.hardware, grid, tune(grid, most=max(args.top, args.take)))


def _refuse_other_ranks(composed: Composed, gpus: int) -> None:
    """RecipeError: launcher.ranks on the command line, and another number of GPUs."""
    ranks = composed.recipe.launcher.ranks
    if composed.origins.get("launcher.ranks") == COMMAND_LINE and ranks not in (AUTO, gpus):
        text = f"launcher.ranks={ranks} differs from gpus={gpus}, for which tune searches; keep one"
        raise RecipeError([Problem("launcher.ranks", text, COMMAND_LINE, "override.twice")])


def words_of(recipe: Recipe) -> str:
    """A layout in short, without what is 1 or off: `tp4 pp4x2/7-9 cp2 zero1:2 mb1`."""
    own, words = recipe.parallelism, []
    for axis in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(own, axis) > 1:
            words.append(f"{axis}{getattr(own, axis)}" + (_stages_in_short(recipe) if axis == "pp" else ""))
    dp = own.dp_replicate * own.dp_shard
    if dp > 1:
        ranks = f"{own.dp_replicate}x{own.dp_shard}" if own.dp_strategy == "hsdp" else str(dp)
        words.append(f"{own.dp_strategy}:{ranks}")
    words.append(f"mb{recipe.train.micro_batch}")
    if own.recompute.kind != "none":
        words.append(f"recompute:{own.recompute.kind}")
    return " ".join(words)


def _stages_in_short(recipe: Recipe) -> str:
    """`:zb_v/6-9`, `x4`: the schedule and how many layers ranks have; nothing of 1f1b over equal stages."""
    own = recipe.parallelism.pipeline
    order = {"1f1b": "", "interleaved": f"x{own.virtual_stages}"}.get(own.schedule, f":{own.schedule}")
    if own.layout is None:
        return order
    stages = stages_of(recipe.model.n_layers, recipe.parallelism)
    layers = [sum(len(chunk.layers) for chunk in chunks) for chunks in stages]
    return f"{order}/{min(layers)}" + (f"-{max(layers)}" if max(layers) > min(layers) else "")


def show_found(search: Search) -> None:
    """The table of the best layouts."""
    out, found, hardware = terminal(), search.found, search.hardware
    recipe = search.grid.recipe
    batch = f"{recipe.train.global_batch} sequences of {recipe.data.seq_len:,}"
    out.print(
        f"{recipe.name} on {recipe.launcher.ranks} x {hardware.name}, {batch} a step: {found.considered:,} layouts, "
        f"pipelines and micro batches considered"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "step", "tok/s/GPU", "MFU", "free GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for number, one in enumerate(found.best, start=1):
        free = (hardware.memory - one.memory.total) / GIB
        table.add_row(
            f"{number}*" if unbuilt_problems(one.recipe) else f"{number}",
            _time(one.time.seconds),
            f"{one.time.tokens_per_second_per_gpu:,.0f}",
            f"{one.time.mfu['causal']:.1%}",
            f"{free:,.1f}",
            one.limit,
            escape(words_of(one.recipe)),
        )
    out.print(table)
    pipelines = [one.recipe.parallelism.pipeline for one in found.best if one.recipe.parallelism.pp > 1]
    if any(one.virtual_stages > 1 for one in pipelines):
        out.print("pp4x2: 2 chunks of layers a rank, interleaved; pp4:zb_v: another schedule")
    if recipe.parallelism.pipeline.layout is None and any(one.layout is not None for one in pipelines):
        out.print(
            "pp4/6-9: ranks have 6 to 9 layers, divided by time (parallelism.pipeline.layout in --json and --out)"
        )
    if any(unbuilt_problems(one.recipe) for one in found.best):
        out.print("* can be planned, not trained yet; --trainable leaves these out")


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.0f} ms"


def as_json(search: Search) -> dict[str, Any]:
    """What a program reads."""
    return {
        "recipe": search.composed.recipe.name,
        "hardware": search.hardware.name,
        "gpus": search.grid.recipe.launcher.ranks,
        "considered": search.found.considered,
        "best": [_candidate(one) for one in search.found.best],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "overrides": [f"{key}={as_word(value)}" for key, value in layout_of(one.recipe).items()],
        "seconds": one.time.seconds,
        "tokens_per_second_per_gpu": one.time.tokens_per_second_per_gpu,
        "mfu": one.time.mfu,
        "memory": one.memory.total,
        "fits": one.fits,
        "limit": one.limit,
        "trainable": not unbuilt_problems(one.recipe),
    }


def layout_of(recipe: Recipe) -> dict[str, Any]:
    """Every field that says the layout, by dotted path."""
    content = recipe.model_dump(mode="json")
    keys = (*SEARCHED, *OPEN_WITH_THEM, "parallelism.pipeline.micro_batch_group", *DIVIDES, *_RECOMPUTED)
    return {key: value_at(content, key) for key in keys} | {"launcher.ranks": recipe.launcher.ranks}


def write(args: argparse.Namespace, search: Search) -> None:
    """One layout as a recipe that inherits from the one that was asked about, and holds all that the words changed."""
    if args.take > len(search.found.best):
        raise RecipeError(f"--take {args.take}: {len(search.found.best)} layouts were found")
    one = search.found.best[args.take - 1]
    parent = next(w.removeprefix("recipe=") for w in args.words if w.startswith("recipe="))
    plain = compose(parent, (), args.config_dir).recipe.model_dump(mode="json")
    asked = search.composed.recipe.model_dump(mode="json")
    changed = {key: value for key, value in leaves(asked) if value != value_at(plain, key)}
    layout = layout_of(one.recipe)
    changed = {
        key: value for key, value in changed.items() if not any(key == k or key.startswith(f"{k}.") for k in layout)
    }
    changed |= {key: value for key, value in layout.items() if value != value_at(plain, key)}
    machine = f"{one.recipe.launcher.ranks} x {search.hardware.name}"
    changed["name"] = args.out.stem if changed.get("name", AUTO) == AUTO else changed["name"]
    changed["about.purpose"] = f"{parent} as megaspec tune lays it out on {machine}."
    nested: dict[str, Any] = {}
    for key, value in changed.items():
        *above, last = key.split(".")
        where = nested
        for part in above:
            where = where.setdefault(part, {})
        where[last] = value
    words = " ".join(args.words)
    text = f"# Number {args.take} of `megaspec tune {words}` on {machine}: predicted to take\n"
    text += f"# {_time(one.time.seconds)} a step and {one.memory.total / GIB:.1f} GiB of the fullest rank.\n"
    text += yaml.safe_dump({"defaults": [parent], **nested}, sort_keys=False)
    write_text(args.out, text)
    print(printable(f"{args.out}: written"), file=sys.stderr)
