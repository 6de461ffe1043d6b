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

from megaspec.commands.planned import plan_words
from megaspec.compose.words import tell_left_out, words_parser
from megaspec.core.axes import DENSE_AXES, coordinates
from megaspec.core.errors import MegaspecError, RecipeError
from megaspec.core.problems import show
from megaspec.core.terminal import escape, terminal
from megaspec.estimate.target import Target, detect_target
from megaspec.model.kinds import moe_of
from megaspec.plugins import loaded
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.difference import changed
from megaspec.rules.unbuilt import unbuilt_problems
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
_MOST_STEPS, _MOST_RANKS, _MOST_WRONG, _MOST_SAID = 100, 64, 6, 4
# What is said of the small run beside its degrees; sizes of the model are told together.
_SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "vocab_size")
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    if not 1 <= args.steps <= _MOST_STEPS:
        raise RecipeError(f"--steps {args.steps} must be from 1 to {_MOST_STEPS}")
    if args.ranks is not None and not 2 <= args.ranks <= _MOST_RANKS:
        raise RecipeError(f"--ranks {args.ranks} must be from 2 to {_MOST_RANKS}")
    if rank_from_environment(os.environ) is not None:
        raise RecipeError("verify starts its ranks itself; start it without torchrun")
    planned = plan_words(args.words, args.config_dir)
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
    problems = unbuilt_problems(small, composed.origins)
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
class Wrong:
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
    def layer(self) -> str:
        """`layer 3`; the first part of the name where it lies in none."""
        found = re.match(r"layers\.(\d+)\.", self.name)
        return f"layer {found[1]}" if found else self.name.partition(".")[0]


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
    def wrong(self) -> list[Wrong]:
        """Parameters that differ on some rank, gradients first, of each kind the worst first."""
        found = []
        for kind, names in self.report["allowed"].items():
            for name, allowed in names.items():
                parts = {rank: held.get(kind, {}).get(name, 0.0) for rank, held in enumerate(self.differences)}
                off = {rank: one for rank, one in parts.items() if one > allowed}
                found += [Wrong(kind, name, off, allowed)] if off else []
        return sorted(found, key=lambda one: (one.kind, -one.worst / one.allowed if one.allowed else -inf))

    def as_json(self) -> dict[str, Any]:
        """What a program reads; numbers that are not finite are null."""
        were, are = (grid_of(spec.parallelism).degrees for spec in (self.whole, self.small))
        wrong = [
            {"kind": one.kind, "name": one.name, "layer": one.layer, "off": _finite(one.worst)}
            | {"allowed": one.allowed, "ranks": list(one.off)}
            for one in self.wrong
        ]
        findings = [
            {name: _finite(value) if isinstance(value, float) else value for name, value in one.items()}
            for one in self.findings
        ]
        return {
            "name": self.whole.name,
            "equal": self.is_equal,
            "steps": self.steps,
            "parameters": self.parameters,
            "worst_margin": _finite(self.worst_margin),
            "device": self.small.device,
            "world_size": [self.whole.world_size, self.small.world_size],
            "degrees": {axis: [n, are[axis]] for axis, n in were.items()},
            "findings": findings,
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
    differences = [json.loads((layout / f"differences-{r}.json").read_text()) for r in range(small.world_size)]
    shutil.rmtree(folder)
    return 0, Result(whole, small, steps, report, differences)


def show_shrunk(whole: Spec, small: Spec) -> None:
    """What became of the recipe, before its ranks start."""
    console, facts = terminal(), Table.grid(padding=(0, 2))
    facts.add_column(width=12)
    facts.add_column()
    for heading, text in _shrunk_lines(whole, small):
        facts.add_row(f"[bold]{heading}", escape(text))
    console.print(facts)


def _shrunk_lines(whole: Spec, small: Spec) -> Iterator[tuple[str, str]]:
    where = "GPUs" if small.device == "cuda" else "CPU ranks"
    yield "verify", f"{whole.name}, its layout on {small.world_size} {where}, a small model, fp64"
    yield "ranks", _became(whole.world_size, small.world_size)
    were, are = grid_of(whole.parallelism), grid_of(small.parallelism)
    own, pipeline = small.parallelism, small.parallelism.pipeline
    chunks = _became(whole.parallelism.pipeline.virtual_stages, pipeline.virtual_stages)
    said = {"pp": f"{pipeline.schedule}, {chunks} chunks a rank" if pipeline.virtual_stages > 1 else pipeline.schedule}
    if pipeline.schedule == "interleaved":
        group = _became(whole.parallelism.pipeline.micro_batch_group, pipeline.micro_batch_group)
        said["pp"] += f", groups of {group} micro batches"
    said |= {"dp_shard": own.dp_strategy, "cp": own.context.kind, "ep": own.dispatch}
    said["tp"] = "sequence parallel" if own.sequence_parallel else ""
    for axis, n in were.degrees.items():
        is_new = axis != "edp" or were.ep * were.etp > 1
        if n > 1 and is_new:
            yield axis, f"{_became(n, are.degrees[axis]):10}{said.get(axis, '')}".rstrip()
    names = [name for name in _SIZES if hasattr(whole.model, name)]
    sizes = [f"{name} {_became(getattr(whole.model, name), getattr(small.model, name))}" for name in names]
    yield "model", ", ".join(sizes)
    many, few = moe_of(whole.model), moe_of(small.model)
    if many is not None and few is not None:
        experts = f"{_became(many.n_experts, few.n_experts)}, {_became(many.top_k, few.top_k)} for each token"
        yield "experts", f"{experts}, of {_became(many.d_expert, few.d_expert)}"
    batch, micro_batch = (
        _became(getattr(whole.train, name), getattr(small.train, name)) for name in ("global_batch", "micro_batch")
    )
    length = _became(whole.data.seq_len, small.data.seq_len)
    yield "sequences", f"{batch} in micro batches of {micro_batch}, of {length} tokens"
    instead = list(_instead(whole, small))
    if instead:
        yield "instead", "; ".join(instead)


def _instead(whole: Spec, small: Spec) -> Iterator[str]:
    """What can't be, or is not, compared as it is."""
    for key, was, now in changed(whole.model_dump(mode="json"), small.model_dump(mode="json")):
        is_idle = key == "kernels.grouped" and moe_of(whole.model) is None
        if key.startswith(_INSTEAD) and not is_idle:
            yield f"{key}={show(was)} is {show(now)}"


def show_result(result: Result) -> None:
    """The table, and the verdict."""
    console = terminal()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (("compared with one rank", "left"), ("error", "right"), ("tolerance", "right")):
        table.add_column(name, justify=justify)
    table.add_column("margin", justify="right")
    table.add_column("")
    for one in {one["what"]: one for one in result.findings}.values():
        tolerance = f"{one['tolerance']:.0e}" if one["tolerance"] else "none"
        numbers = (f"{one['error']:.1e}", tolerance, f"{one['margin']:.1e}")
        table.add_row(escape(one["what"]), *numbers, "" if one["passed"] else "[bold]differs")
    console.print()
    console.print(table)
    console.print()
    for line in _verdict(result):
        console.print(escape(line))


def _verdict(result: Result) -> Iterator[str]:
    count = f"{result.steps} steps, {result.parameters} parameters"
    if result.is_equal:
        yield f"equal: {count}, worst margin {result.worst_margin:.1e}"
        return
    numbers = {kind: sum(one.kind == kind for one in result.wrong) for kind in ("gradient", "weight")}
    counts = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in numbers.items() if n]
    yield f"not equal: {count}; off: {' and '.join(counts) or 'no parameter, losses or norms alone'}"
    # gradients of the first step say where a difference begins, weights where all of it has arrived
    shown = [one for one in result.wrong if one.kind == "gradient"] or result.wrong
    for one in shown[:_MOST_WRONG]:
        off = f"off by {one.worst:.1e}, rounding is {one.allowed:.0e}"
        yield f"  {one.kind} of {one.name} ({one.layer}): {off}; on {_ranks(result, one)}"
    if len(shown) > _MOST_WRONG:
        yield f"  and {len(shown) - _MOST_WRONG} more"


def _ranks(result: Result, one: Wrong) -> str:
    own, ranks = result.small.parallelism, list(one.off)
    if len(ranks) == result.small.world_size:
        return "every rank"
    words = []
    for rank in ranks[:_MOST_SAID]:
        at = coordinates(rank, own.degrees)
        axes = ", ".join(f"{axis} {at[axis]}" for axis in DENSE_AXES if getattr(own, axis) > 1)
        words.append(f"rank {rank} ({axes})")
    more = f" and {len(ranks) - _MOST_SAID} more" if len(ranks) > _MOST_SAID else ""
    return f"{', '.join(words)}{more}"


def _became(was: object, now: object) -> str:
    def words(value: object) -> str:
        return f"{value:,}" if isinstance(value, int) else str(value)

    return words(was) if was == now else f"{words(was)} -> {words(now)}"


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
