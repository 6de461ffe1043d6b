"""`megaspec verify`: does the layout of a recipe compute what one rank computes? A small run of it says so."""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

from rich.table import Table

from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.planned import plan_words
from megaspec.compose.words import take, tell_left_out, words_parser
from megaspec.core.axes import DENSE_AXES, coordinates
from megaspec.core.errors import MegaspecError, RecipeError
from megaspec.core.problems import show
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import plural
from megaspec.estimate.target import Target, detect_target
from megaspec.plugins import loaded
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.difference import changed
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.fits import MEMORY, memory_problem
from megaspec.spec import Spec
from megaspec.verify.shrink import alone, on_cpu, shrink
from megaspec.verify.shrink_grid import grid_of
from megaspec_launchers.environment import rank_from_environment
from megaspec_launchers.local import PRELOADED, launch
from megaspec_launchers.rank_factory import RankFactory

NOT_EQUAL = MegaspecError.exit_code
ENTRY = "megaspec.verify.ranks:main"
TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 2.0
_MOST_STEPS = 100
_MOST_RANKS = 64
# Of what is told: parameters that differ, and ranks on which one does.
_MOST_WRONG = 6
_MOST_SAID = 4
# What is said of the small run beside its degrees; sizes of the model are told together.
_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "vocab_size")
# Keys that may differ in the small run without a change of the layout: told, since they are not compared.
_INSTEAD = ("precision.kind", "kernels.", "optim.formats.", "parallelism.grad_reduce")

_DESCRIPTION = """Train a small model with the layout of a recipe for a few steps, in fp64, and compare it with the same
model on one rank: losses, gradient norms, and every gradient and weight. No data is read.

The layout is that which `megaspec plan` shows for the same words (hardware=NAME gpus=N). Where it needs more ranks than
this machine has, every axis shrinks and none goes away."""


def add_parser(commands: Any) -> None:
    """The parser of `verify`."""
    text = "prove that a layout computes what one rank computes: recipe=NAME [gpus=N] a.b=c ..."
    command = commands.add_parser(
        "verify",
        help=text,
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
        parents=[words_parser()],
    )
    command.add_argument("--steps", type=int, default=3, metavar="N", help="how many steps to train (3)")
    ranks = "how many ranks at most (as many as GPUs; without enough of them 8, or the fewest that keep every axis)"
    command.add_argument("--ranks", type=int, metavar="N", help=ranks)
    command.add_argument("--cpu", action="store_true", help="ranks on the CPU, even where there are GPUs")
    command.add_argument("--json", action="store_true", help="one JSON object, on one line")


def run(args: argparse.Namespace) -> int:
    """Shrink, run, compare, print. -> 0 when all is equal or there is nothing to compare, NOT_EQUAL when not."""
    _refuse_arguments(args)
    memory, words = take(args.words, "memory", MEMORY)
    planned = plan_words(words, args.config_dir)
    composed = planned.composed
    facts = replace(gather_facts(composed.recipe), problems=())
    whole = resolve(composed.recipe, planned.target, facts, composed.origins)
    tell_left_out(composed)
    if whole.world_size == 1:
        if args.json:
            print(json.dumps({"name": whole.name, "world_size": 1, "equal": True, "findings": []}))
        else:
            print(f"{whole.name}: one rank, there is nothing to compare; give it several, e.g. parallelism.tp=2")
        return 0
    small = _shrunk(whole, detect_target(), ranks=args.ranks, cpu=args.cpu)
    problems = list(unbuilt_problems(small, composed.origins))
    if small.device == "cpu" and memory == "check":
        too_large = memory_problem(small, on_cpu(detect_target()), composed.origins)
        if too_large is not None:
            problems.append(too_large)
    if problems:
        raise RecipeError(problems)
    if not args.json:
        show_shrunk(whole, small)
    code, result = compare(whole, small, steps=args.steps)
    if result is None:
        if args.json:
            print(json.dumps({"name": whole.name, "world_size": whole.world_size, "equal": False, "exit_code": code}))
        return code
    if args.json:
        print(json.dumps(result.as_json()))
    else:
        show_result(result)
    return 0 if result.is_equal else NOT_EQUAL


def _refuse_arguments(args: argparse.Namespace) -> None:
    """RecipeError: numbers out of range, or ranks that torchrun has started already."""
    if not 1 <= args.steps <= _MOST_STEPS:
        raise RecipeError(f"--steps {args.steps} must be from 1 to {_MOST_STEPS}")
    if args.ranks is not None and not 2 <= args.ranks <= _MOST_RANKS:
        raise RecipeError(f"--ranks {args.ranks} must be from 2 to {_MOST_RANKS}")
    if rank_from_environment(os.environ) is not None:
        raise RecipeError("verify starts its ranks itself; start it without torchrun")


def _shrunk(whole: Spec, here: Target, *, ranks: int | None, cpu: bool) -> Spec:
    """On the GPUs of this machine where they are enough for all axes, else on its CPU."""
    if here.device == "cuda" and here.gpus > 1 and not cpu:
        try:
            return shrink(whole, here, ranks=ranks)
        except RecipeError as error:
            if ranks is not None and ranks <= here.gpus:
                raise
            print(f"not on the GPUs of this machine: {error}", file=sys.stderr)
    return shrink(whole, on_cpu(here), ranks=ranks)


@dataclass(frozen=True)
class WrongParameter:
    """A parameter that differs."""

    kind: str
    """gradient or weight."""
    name: str
    off: dict[int, float]
    """Rank whose part differs -> largest difference of an element."""
    allowed: float
    """What counts as rounding."""

    @property
    def worst(self) -> float:
        return max(self.off.values())

    @property
    def times_allowed(self) -> float:
        """The worst difference in units of rounding."""
        if self.allowed == 0:
            return inf
        return self.worst / self.allowed

    @property
    def layer(self) -> str:
        """`layer 3`; the first part of the name where it lies in none."""
        found = re.match(r"layers\.(\d+)\.", self.name)
        if found is None:
            return self.name.partition(".")[0]
        return f"layer {found[1]}"


@dataclass(frozen=True)
class Result:
    """What a comparison came to."""

    whole: Spec
    small: Spec
    steps: int
    report: dict[str, Any]
    """Of verify/ranks.py."""
    differences: list[dict[str, dict[str, float]]]
    """By rank: gradient or weight -> name -> largest difference of an element."""

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.report["findings"]

    @property
    def parameters(self) -> int:
        return len(self.report["allowed"]["weight"])

    @property
    def is_equal(self) -> bool:
        return all(one["passed"] for one in self.findings) and not self.wrong

    @property
    def worst_margin(self) -> float:
        return max(one["margin"] for one in self.findings)

    @cached_property
    def wrong(self) -> list[WrongParameter]:
        """Parameters that differ on some rank, gradients first, of each kind the worst first."""
        found = []
        for kind, allowed_of in self.report["allowed"].items():
            for name, allowed in allowed_of.items():
                off = {}
                for rank, differences in enumerate(self.differences):
                    # a rank that holds no part of the parameter says nothing of it
                    difference = differences.get(kind, {}).get(name, 0.0)
                    if difference > allowed:
                        off[rank] = difference
                if off:
                    found.append(WrongParameter(kind, name, off, allowed))
        return sorted(found, key=lambda one: (one.kind, -one.times_allowed))

    def as_json(self) -> dict[str, Any]:
        """What a program reads; numbers that are not finite are null."""
        whole_degrees = grid_of(self.whole.parallelism).degrees
        small_degrees = grid_of(self.small.parallelism).degrees
        wrong = []
        for one in self.wrong:
            numbers = {"off": _finite(one.worst), "allowed": one.allowed, "ranks": list(one.off)}
            wrong.append({"kind": one.kind, "name": one.name, "layer": one.layer, **numbers})
        return {
            "name": self.whole.name,
            "equal": self.is_equal,
            "steps": self.steps,
            "parameters": self.parameters,
            "worst_margin": _finite(self.worst_margin),
            "device": self.small.device,
            "world_size": [self.whole.world_size, self.small.world_size],
            "degrees": {axis: [n, small_degrees[axis]] for axis, n in whole_degrees.items()},
            "findings": [_with_finite_numbers(one) for one in self.findings],
            "wrong": wrong,
            "spec": self.small.model_dump(mode="json", exclude={"decisions"}),
        }


def compare(whole: Spec, small: Spec, *, steps: int) -> tuple[int, Result | None]:
    """Runs the small layout, and its steps on one rank. -> 0 and what came of it.

    Where ranks fail: their exit code and None; what they wrote stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="megaspec-verify-"))
    arguments = {"steps": steps, "plugins": loaded()}
    with RankFactory((*PRELOADED, ENTRY.partition(":")[0]), threads=1) as factory:
        for name, spec in (("alone", alone(small)), ("layout", small)):
            (folder / name).mkdir()
            (folder / name / "spec.json").write_text(spec.model_dump_json())
            code = launch(
                str(folder / name),
                ranks=spec.world_size,
                entry=ENTRY,
                grace_seconds=_GRACE_SECONDS,
                timeout_seconds=TIMEOUT_SECONDS,
                arguments=arguments,
                factory=factory,
            )
            if code:
                print(f"megaspec: the run to compare failed; its files stay in {folder}", file=sys.stderr)
                return code, None
    layout = folder / "layout"
    report = json.loads((layout / "report.json").read_text())
    differences = []
    for rank in range(small.world_size):
        differences.append(json.loads((layout / f"differences-{rank}.json").read_text()))
    shutil.rmtree(folder)
    return 0, Result(whole, small, steps, report, differences)


def show_shrunk(whole: Spec, small: Spec) -> None:
    """What became of the recipe, before its ranks start."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=12)
    table.add_column()
    for heading, text in _shrunk_lines(whole, small):
        table.add_row(f"[bold]{heading}", escape(text))
    terminal().print(table)


def _shrunk_lines(whole: Spec, small: Spec) -> Iterator[tuple[str, str]]:
    """Headings, and what the recipe says of each next to what the small run has."""
    where = "GPUs" if small.device == "cuda" else "CPU ranks"
    yield "verify", f"{whole.name}, its layout on {small.world_size} {where}, a small model, fp64"
    yield "ranks", _became(whole.world_size, small.world_size)
    whole_grid = grid_of(whole.parallelism)
    small_degrees = grid_of(small.parallelism).degrees
    strategies = _strategies(whole, small)
    for axis, degree in whole_grid.degrees.items():
        # without an expert grid edp is dp under another name
        repeats_dp = axis == "edp" and whole_grid.ep * whole_grid.etp == 1
        if degree > 1 and not repeats_dp:
            yield axis, f"{_became(degree, small_degrees[axis]):10}{strategies.get(axis, '')}".rstrip()
    names = [name for name in _SIZES if hasattr(whole.model, name)]
    yield "model", ", ".join(f"{name} {_field_became(name, whole.model, small.model)}" for name in names)
    whole_moe = whole.model.moe
    small_moe = small.model.moe
    if whole_moe is not None and small_moe is not None:
        n_experts = _field_became("n_experts", whole_moe, small_moe)
        top_k = _field_became("top_k", whole_moe, small_moe)
        yield "experts", f"{n_experts}, {top_k} for each token, of {_field_became('d_expert', whole_moe, small_moe)}"
    batch = _field_became("global_batch", whole.train, small.train)
    micro_batch = _field_became("micro_batch", whole.train, small.train)
    length = _field_became("seq_len", whole.data, small.data)
    yield "sequences", f"{batch} in micro batches of {micro_batch}, of {length} tokens"
    instead = list(_instead(whole, small))
    if instead:
        yield "instead", "; ".join(instead)


def _strategies(whole: Spec, small: Spec) -> dict[str, str]:
    """Axis -> how the small run works along it: `zero1`, `ring`, `interleaved, 2 chunks a rank`."""
    parallelism = small.parallelism
    pipeline = parallelism.pipeline
    schedule = pipeline.schedule
    if pipeline.virtual_stages > 1:
        chunks = _field_became("virtual_stages", whole.parallelism.pipeline, pipeline)
        schedule += f", {chunks} chunks a rank"
    if pipeline.schedule == "interleaved":
        group = _field_became("micro_batch_group", whole.parallelism.pipeline, pipeline)
        schedule += f", groups of {group} micro batches"
    strategies = {
        "pp": schedule,
        "dp_shard": parallelism.dp_strategy,
        "cp": parallelism.context.kind,
        "ep": parallelism.dispatch,
    }
    if parallelism.sequence_parallel:
        strategies["tp"] = "sequence parallel"
    return strategies


def _instead(whole: Spec, small: Spec) -> Iterator[str]:
    """What can't be, or is not, compared as it is."""
    for key, was, now in changed(whole.model_dump(mode="json"), small.model_dump(mode="json")):
        # grouped products are those of experts
        is_idle = key == "kernels.grouped" and whole.model.moe is None
        if key.startswith(_INSTEAD) and not is_idle:
            yield f"{key}={show(was)} is {show(now)}"


def show_result(result: Result) -> None:
    """The table, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("compared with one rank", justify="left")
    for name in ("error", "tolerance", "margin"):
        table.add_column(name, justify="right")
    table.add_column("")
    # step 1 is compared by itself, and may be the worst of all steps, too: one row for both
    findings = {one["what"]: one for one in result.findings}
    for one in findings.values():
        tolerance = f"{one['tolerance']:.0e}" if one["tolerance"] else "none"
        verdict = "" if one["passed"] else "[bold]differs"
        table.add_row(escape(one["what"]), f"{one['error']:.1e}", tolerance, f"{one['margin']:.1e}", verdict)
    console = terminal()
    console.print()
    console.print(table)
    console.print()
    for line in _verdict(result):
        console.print(escape(line))


def _verdict(result: Result) -> Iterator[str]:
    """One line where all is equal; else how much is off, and the worst of it."""
    compared = f"{result.steps} steps, {result.parameters} parameters"
    if result.is_equal:
        yield f"equal: {compared}, worst margin {result.worst_margin:.1e}"
        return
    gradients = [one for one in result.wrong if one.kind == "gradient"]
    weights = [one for one in result.wrong if one.kind == "weight"]
    counts = []
    for noun, wrong in (("gradient", gradients), ("weight", weights)):
        if wrong:
            counts.append(f"{len(wrong)} {plural(noun, len(wrong))}")
    yield f"not equal: {compared}; off: {' and '.join(counts) or 'no parameter, losses or norms alone'}"
    # gradients of the first step say where a difference begins, weights where all of it has arrived
    shown = gradients or result.wrong
    for one in shown[:_MOST_WRONG]:
        off = f"off by {one.worst:.1e}, rounding is {one.allowed:.0e}"
        yield f"  {one.kind} of {one.name} ({one.layer}): {off}; on {_ranks(result, one)}"
    if len(shown) > _MOST_WRONG:
        yield f"  and {len(shown) - _MOST_WRONG} more"


def _ranks(result: Result, one: WrongParameter) -> str:
    """`rank 2 (pp 1, tp 0), rank 3 (pp 1, tp 1) and 2 more`: the ranks on which a parameter is off."""
    ranks = list(one.off)
    if len(ranks) == result.small.world_size:
        return "every rank"
    parallelism = result.small.parallelism
    split_axes = [axis for axis in DENSE_AXES if getattr(parallelism, axis) > 1]
    words = []
    for rank in ranks[:_MOST_SAID]:
        position = coordinates(rank, parallelism.degrees)
        axes = ", ".join(f"{axis} {position[axis]}" for axis in split_axes)
        words.append(f"rank {rank} ({axes})")
    text = ", ".join(words)
    if len(ranks) > _MOST_SAID:
        text += f" and {len(ranks) - _MOST_SAID} more"
    return text


def _became(was: object, now: object) -> str:
    """`4,096 -> 64`; one value where nothing changes."""
    if was == now:
        return _in_words(was)
    return f"{_in_words(was)} -> {_in_words(now)}"


def _field_became(name: str, was: object, now: object) -> str:
    """The same of one field of two specs."""
    return _became(getattr(was, name), getattr(now, name))


def _in_words(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _finite(value: Any) -> Any:
    """None, which JSON has, for a number that it has not; all else as it is."""
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def _with_finite_numbers(finding: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in finding.items()}
