"""`megaspec tune`: the best layouts of a recipe for a number of GPUs."""

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from megaspec.commands.paragraphs import Paragraphs
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
from megaspec.parallelism.spec import ParallelismSpec
from megaspec.parallelism.stages import stages_of
from megaspec.recipe import Recipe
from megaspec.resolve.beside import broken_by_all
from megaspec.resolve.fill import documents_in_words, plainly_drafted
from megaspec.resolve.gather import gather_facts
from megaspec.rules.difference import leaves
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.tune import DIVIDES, SEARCHED, Candidate, Found, Grid, tune

# What goes with a kind of recomputation that a search decides.
_RECOMPUTED = tuple(f"parallelism.recompute.{name}" for name in ("parts", "method", "layers"))
# What follows from the fields that a search decides, unless the command line sets it.
OPEN_WITH_THEM = ("parallelism.dp_replicate", "parallelism.dp_shard", "parallelism.sequence_parallel")
# What the command line may fix of layouts for all of them.
_CONTEXT_PARALLEL = ("parallelism.cp", "parallelism.context")


@dataclass(frozen=True)
class Search:
    """A search that was made."""

    composed: Composed
    hardware: Hardware
    grid: Grid
    found: Found
    documents: str
    """By which lengths of documents layouts are weighed, in words; "" without a document mask."""


_DESCRIPTION = """Search for the fastest layouts of a recipe that fit. What the command line sets stays as it is.

gpus=N: how many GPUs layouts are searched for; launcher.ranks follows. hardware=NAME: which GPUs. throughput=FILE:
measured speeds, as `megaspec bench throughput` writes them."""


def add_parser(commands: Any) -> None:
    """The parser of `tune`."""
    text = "search for the fastest layouts of a recipe: recipe=NAME gpus=N [hardware=H100] a.b=c ..."
    command = commands.add_parser(
        "tune",
        help=text,
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
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
        world = search.grid.recipe.launcher.ranks
        batch = search.grid.recipe.train.global_batch
        text = f"no layout of {world} GPUs keeps the rules at train.global_batch={batch}; try another gpus= or batch"
        raise RecipeError([Problem("parallelism", text, code="tune-none")])
    too_large = _too_large(search)
    if args.out is not None and too_large is None:
        write(args, search)
    if args.json:
        content = as_json(search)
        if too_large is not None:
            content["problems"] = [too_large.as_json()]
        print(json.dumps(content, indent=1))
    else:
        show_found(search)
    if too_large is not None:
        print(f"megaspec: {too_large}", file=sys.stderr)
        return RecipeError.exit_code
    return 0


def _too_large(search: Search) -> Problem | None:
    """Why even the smallest layout does not fit."""
    best = search.found.best[0]
    if best.fits:
        return None
    hardware = search.hardware
    text = f"no layout fits: the smallest needs {best.memory.total / GIB:.1f} GiB, {hardware.room / GIB:.1f} of"
    text += f" {hardware.name}'s {hardware.memory / GIB:.1f} may be planned with; try more GPUs (gpus=) or a larger one"
    text += " (hardware=)"
    return Problem("parallelism", text, code="tune-large")


def find(args: argparse.Namespace) -> Search:
    """The search that a command line asks for. What it sets itself stays."""
    planned = plan_words(args.words, args.config_dir, searched=(*SEARCHED, *OPEN_WITH_THEM, "launcher.ranks"))
    composed = planned.composed
    target = planned.target
    if planned.hardware is None or planned.throughput is None:
        text = f"hardware={target.gpu or 'cpu'} has nothing to search with; choose {one_of(list(HARDWARE))}"
        raise RecipeError([Problem("hardware", text, COMMAND_LINE, "hardware-unknown")])
    _refuse_other_ranks(composed, target.gpus)
    content = composed.recipe.model_dump(mode="json")
    fixed = _fixed_keys(composed, content)
    open_keys = frozenset(SEARCHED) - fixed
    # layers that are divided by the command line are not divided anew
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
    searched = _may_differ(open_keys)
    problems = broken_by_all(asked, composed.origins, target, facts, searched=searched, is_for_training=args.trainable)
    if problems:
        raise RecipeError(problems)
    draft = plainly_drafted(asked, target, facts)
    grid = Grid(
        draft.filled,
        target,
        facts,
        planned.hardware,
        planned.throughput,
        open_keys,
        is_for_training=args.trainable,
        decided=draft.decided,
    )
    found = tune(grid, most=max(args.top, args.take))
    return Search(composed, planned.hardware, grid, found, documents_in_words(draft))


def _may_differ(open_keys: Collection[str]) -> list[str]:
    """What layouts may differ in: with a field that is searched goes all that is said of it."""
    found = ["train.micro_batch", "launcher.ranks"]
    for name in ParallelismSpec.model_fields:
        key = f"parallelism.{name}"
        if key not in _CONTEXT_PARALLEL or "parallelism.cp" in open_keys:
            found.append(key)
    return found


def _fixed_keys(composed: Composed, content: dict[str, Any]) -> set[str]:
    """What the command line sets; a key that it sets to auto is left to the search."""
    fixed = set()
    for key, origin in composed.origins.items():
        if origin == COMMAND_LINE and value_at(content, key) != AUTO:
            fixed.add(key)
    return fixed


def _refuse_other_ranks(composed: Composed, gpus: int) -> None:
    """RecipeError: launcher.ranks on the command line, and another number of GPUs."""
    ranks = composed.recipe.launcher.ranks
    if composed.origins.get("launcher.ranks") == COMMAND_LINE and ranks not in (AUTO, gpus):
        text = f"launcher.ranks={ranks} differs from gpus={gpus}, for which tune searches; keep one"
        raise RecipeError([Problem("launcher.ranks", text, COMMAND_LINE, "override.twice")])


def words_of(recipe: Recipe) -> str:
    """A layout in short, without what is 1 or off: `tp4 pp4x2/7-9 cp2 zero1:2 mb1`."""
    parallelism = recipe.parallelism
    words = []
    for axis in ("tp", "pp", "cp", "ep", "etp"):
        degree = getattr(parallelism, axis)
        if degree == 1:
            continue
        word = f"{axis}{degree}"
        if axis == "pp":
            word += _stages_in_short(recipe)
        words.append(word)
    dp = parallelism.dp_replicate * parallelism.dp_shard
    if dp > 1:
        ranks = str(dp)
        if parallelism.dp_strategy == "hsdp":
            ranks = f"{parallelism.dp_replicate}x{parallelism.dp_shard}"
        words.append(f"{parallelism.dp_strategy}:{ranks}")
    words.append(f"mb{recipe.train.micro_batch}")
    if parallelism.recompute.kind != "none":
        words.append(f"recompute:{parallelism.recompute.kind}")
    return " ".join(words)


def _stages_in_short(recipe: Recipe) -> str:
    """`:zb_v/6-9`, `x4`: the schedule and how many layers ranks have; nothing of 1f1b over equal stages."""
    pipeline = recipe.parallelism.pipeline
    # schedules whose name goes without saying
    in_short = {"1f1b": "", "interleaved": f"x{pipeline.virtual_stages}"}
    text = in_short.get(pipeline.schedule, f":{pipeline.schedule}")
    if pipeline.layout is None:
        return text
    layers_of_ranks = []
    for chunks in stages_of(recipe.model.n_layers, recipe.parallelism):
        layers_of_ranks.append(sum(len(chunk.layers) for chunk in chunks))
    fewest = min(layers_of_ranks)
    most = max(layers_of_ranks)
    text += f"/{fewest}"
    if most > fewest:
        text += f"-{most}"
    return text


def show_found(search: Search) -> None:
    """The table of the best layouts, and what its signs mean."""
    recipe = search.grid.recipe
    found = search.found
    out = terminal()
    batch = f"{recipe.train.global_batch} sequences of {recipe.data.seq_len:,}"
    out.print(
        f"{recipe.name} on {recipe.launcher.ranks} x {search.hardware.name}, {batch} a step: {found.considered:,} "
        f"layouts, pipelines and micro batches considered"
    )
    if search.documents:
        out.print(escape(f"documents: {search.documents}"))
    out.print(_table(search))
    pipelines = [one.recipe.parallelism.pipeline for one in found.best if one.recipe.parallelism.pp > 1]
    if any(pipeline.virtual_stages > 1 for pipeline in pipelines):
        out.print("pp4x2: 2 chunks of layers a rank, interleaved; pp4:zb_v: another schedule")
    is_divided_by_search = any(pipeline.layout is not None for pipeline in pipelines)
    if recipe.parallelism.pipeline.layout is None and is_divided_by_search:
        out.print("pp4/6-9: ranks have 6 to 9 layers, as is fastest (parallelism.pipeline.layout in --json and --out)")
    if any(unbuilt_problems(one.recipe) for one in found.best):
        out.print("* can be planned, not trained yet; --trainable leaves these out")


def _table(search: Search) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "step", "tok/s/GPU", "MFU", "free GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for number, one in enumerate(search.found.best, start=1):
        free = (search.hardware.memory - one.memory.total) / GIB
        mark = "*" if unbuilt_problems(one.recipe) else ""
        table.add_row(
            f"{number}{mark}",
            _time(one.time.seconds),
            f"{one.time.tokens_per_second_per_gpu:,.0f}",
            f"{one.time.mfu['causal']:.1%}",
            f"{free:,.1f}",
            one.limit,
            escape(words_of(one.recipe)),
        )
    return table


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.0f} ms"


def as_json(search: Search) -> dict[str, Any]:
    """What a program reads."""
    return {
        "recipe": search.composed.recipe.name,
        "hardware": search.hardware.name,
        "gpus": search.grid.recipe.launcher.ranks,
        "considered": search.found.considered,
        "documents": search.documents or None,
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
    parent = next(word.removeprefix("recipe=") for word in args.words if word.startswith("recipe="))
    inherited = compose(parent, (), args.config_dir).recipe.model_dump(mode="json")
    changed = _changed_keys(search.composed.recipe, layout_of(one.recipe), inherited)
    machine = f"{one.recipe.launcher.ranks} x {search.hardware.name}"
    if changed.get("name", AUTO) == AUTO:
        changed["name"] = args.out.stem
    changed["about.purpose"] = f"{parent} as megaspec tune lays it out on {machine}."
    words = " ".join(args.words)
    text = f"# Number {args.take} of `megaspec tune {words}` on {machine}: predicted to take\n"
    text += f"# {_time(one.time.seconds)} a step and {one.memory.total / GIB:.1f} GiB of the fullest rank.\n"
    text += yaml.safe_dump({"defaults": [parent], **_nested(changed)}, sort_keys=False)
    write_text(args.out, text)
    print(printable(f"{args.out}: written"), file=sys.stderr)


def _changed_keys(asked: Recipe, layout: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    """Dotted path -> value of everything that is not as in the recipe that is inherited from: what the command line
    asked for, then the layout, which overrides it."""
    changed = {}
    for key, value in leaves(asked.model_dump(mode="json")):
        is_of_layout = any(key == path or key.startswith(f"{path}.") for path in layout)
        if not is_of_layout and value != value_at(inherited, key):
            changed[key] = value
    for key, value in layout.items():
        if value != value_at(inherited, key):
            changed[key] = value
    return changed


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted path -> value as sections in each other."""
    content: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        section = content
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return content
