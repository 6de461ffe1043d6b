"""`megaspec plan`: what `train` would do, without torch, without data and on any hardware."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megaspec.commands.fewer_nodes import fewer_nodes_to_plan, is_for_fewer_nodes, planned_on_fewer
from megaspec.commands.layouts import layout_options, specs_of_list
from megaspec.commands.paragraphs import Paragraphs
from megaspec.commands.planned import Planned, plan_words
from megaspec.compose.compose import Composed
from megaspec.compose.words import tell_left_out, words_parser
from megaspec.core.errors import COMMAND_LINE, MegaspecError, Problem, RecipeError
from megaspec.core.terminal import terminal
from megaspec.data.fetch import data_in_words
from megaspec.plan.layouts import ON_FEWER, SUPERVISED, PlannedLayout, planned_layout, print_layouts
from megaspec.plan.plan import Plan, make_plan, rank_view
from megaspec.plan.report import print_ranks, print_whole_plan
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec

NOT_EQUAL = MegaspecError.exit_code

_DESCRIPTION = """Show what `train` would do: mesh, memory, collectives, step time, and all that is decided for you.

hardware=NAME: GPUs to plan for; without it those of this machine, where there are none those that the recipe's source
names, else H100; hardware=cpu is this machine without GPUs. gpus=N: how many of them; a launcher.ranks of the recipe
gives way to it. throughput=FILE: measured speeds, as `megaspec bench throughput` writes them."""


def add_parser(commands: Any) -> None:
    """The parser of `plan`."""
    text = "show what `train` would do: recipe=NAME [hardware=H100] [gpus=N] [throughput=FILE] a.b=c ..."
    command = commands.add_parser(
        "plan",
        help=text,
        description=_DESCRIPTION,
        formatter_class=Paragraphs,
        allow_abbrev=False,
        parents=[words_parser()],
    )
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--ranks", metavar="0,5", help="these ranks' own view: place, groups, layers, memory")
    command.add_argument(
        "--trace",
        action="store_true",
        help="build ranks (those of --ranks; else the first, the last and the fullest) and take a step without numbers:"
        " shapes, memory and collectives as they are, beside the plan's",
    )


def run(args: argparse.Namespace) -> int:
    """Resolve for the machine that is asked about, and print. Data that is not there is told at the end. -> 0, or
    NOT_EQUAL where a trace is not what was planned."""
    planned = plan_words(args.words, args.config_dir)
    composed = planned.composed
    target = planned.target
    facts = gather_facts(composed.recipe)
    spec = resolve(composed.recipe, target, replace(facts, problems=()), composed.origins)
    plan = make_plan(
        spec, target, hardware=planned.hardware, throughput=planned.throughput, why=planned.why, weigh_changes=True
    )
    layouts = _layouts(planned, spec, plan, facts, args.config_dir)
    ranks = _ranks(args.ranks, spec.world_size)
    views = [rank_view(plan, rank) for rank in ranks]
    agrees = True
    data = ""
    if not facts.problems:
        data = data_in_words(spec.data, spec.remote)
    if args.json:
        content = plan.as_json()
        content["recipe"] = composed.recipe.model_dump(mode="json")
        if data:
            content["data"] = data
        if layouts:
            content["layouts"] = [layout.model_dump(mode="json") for layout in layouts]
        if views:
            content["ranks"] = [view.model_dump(mode="json") for view in views]
        if args.trace:
            content["traces"] = _traces_as_json(spec, ranks)
            agrees = _all_agree(content["traces"])
        print(json.dumps(content, indent=1))
    else:
        print_whole_plan(plan, terminal(), data=data)
        if layouts:
            heading = SUPERVISED
            if is_for_fewer_nodes(spec):
                heading = ON_FEWER
            print_layouts(layouts, terminal(), device=spec.device, heading=heading)
        print_ranks(views, terminal())
        if args.trace:
            agrees = _print_traces(spec, ranks)
    tell_left_out(composed)
    if target.gpus > spec.world_size:
        idle = f"{target.gpus - spec.world_size:,} of {target.gpus:,} GPUs idle"
        print(f"{idle}: launcher.ranks={spec.world_size}   ({_ranks_origin(spec, composed)})", file=sys.stderr)
    for problem in facts.problems:
        print(f"not ready to train: {problem}", file=sys.stderr)
    return 0 if agrees else NOT_EQUAL


def _layouts(planned: Planned, spec: Spec, plan: Plan, facts: Facts, config_dirs: Sequence[str]) -> list[PlannedLayout]:
    """Those that a run may take when devices or nodes are lost, where it may lose some: its own first. RecipeError: see
    `specs_of_list` and `for_fewer_nodes`."""
    if is_for_fewer_nodes(spec):
        fewer = fewer_nodes_to_plan(spec, planned.target)
        return planned_on_fewer(spec, fewer, planned.target, hardware=planned.hardware, throughput=planned.throughput)
    options = layout_options(planned.composed, config_dirs)
    if len(options) == 1:
        return []
    layouts = [planned_layout(options[0].name, plan)]
    specs = specs_of_list(options, planned.target, facts)
    for option, spec in zip(options[1:], specs, strict=True):
        target = planned.target
        if target.device == "cuda":
            target = target.model_copy(update={"gpus": spec.world_size})
        one = make_plan(spec, target, hardware=planned.hardware, throughput=planned.throughput, why=planned.why)
        layouts.append(planned_layout(option.name, one))
    return layouts


def _traces_as_json(spec: Spec, ranks: Sequence[int]) -> list[dict[str, Any]]:
    from megaspec.verify.trace import trace_ranks  # torch, only where it is needed
    from megaspec.verify.trace_report import trace_as_json

    return [trace_as_json(spec, trace) for trace in trace_ranks(spec, ranks)]


def _all_agree(traces: Sequence[dict[str, Any]]) -> bool:
    """True where everything that was traced on a rank is what was planned for it."""
    for trace in traces:
        for row in trace["compared"]:
            if not row["agrees"]:
                return False
    return True


def _print_traces(spec: Spec, ranks: Sequence[int]) -> bool:
    from megaspec.verify.trace import trace_ranks
    from megaspec.verify.trace_report import print_traces

    return print_traces(spec, trace_ranks(spec, ranks), terminal())


def _ranks_origin(spec: Spec, composed: Composed) -> str:
    """Who said how many ranks there are."""
    for decision in spec.decisions:
        if decision.key == "launcher.ranks":
            return decision.reason
    return composed.origins.get("launcher.ranks", "")


def _ranks(text: str | None, world: int) -> list[int]:
    """`0,5` -> [0, 5]. RecipeError: not numbers of ranks."""
    if text is None:
        return []
    ranks = []
    for word in text.split(","):
        # digits of ASCII alone, and few of them: int() takes other scripts', and a long time for thousands
        is_number = word.isascii() and word.isdigit() and len(word) < 10
        if not is_number or int(word) >= world:
            wrong = f"--ranks {text} must be ranks from 0 to {world - 1}, with commas between them"
            raise RecipeError([Problem("", wrong, COMMAND_LINE)])
        ranks.append(int(word))
    return ranks
