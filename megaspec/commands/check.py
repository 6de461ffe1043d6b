"""`megaspec check [RECIPE...]`: every recipe resolved on the GPUs that it states, and all that is wrong with it."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from megaspec.commands.stated import Stated, stated
from megaspec.commands.words import terminal
from megaspec.core.errors import DataError, MegaspecError, Problem, RecipeError
from megaspec.core.units import GIB, count_in_words
from megaspec.resolve.memory import fullest, memory_of
from megaspec.resolve.parameters import count_parameters
from megaspec.resolve.remedies import remedies
from megaspec.search import SearchPath


@dataclass(frozen=True)
class Checked:
    """What is known about one recipe."""

    name: str
    gpus: str = ""
    parameters: int | None = None
    memory: int | None = None
    """Bytes on the fullest rank."""
    capacity: int | None = None
    """Bytes of its GPU."""
    way_out: str = ""
    """Overrides with which it fits, where it does not."""
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None or self.capacity is None else self.memory <= self.capacity


def add_parser(commands: Any) -> None:
    """The parser of `check`."""
    text = "resolve recipes on the GPUs that they state, without data: all shipped and local ones, or those named"
    command = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    command.add_argument("recipes", nargs="*", metavar="RECIPE", help="name, or path of a YAML file")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups and recipes")


def run(args: argparse.Namespace) -> int:
    """Print a line each, and the problems. -> 0, or 64 where a recipe is wrong."""
    names = args.recipes or SearchPath(args.config_dir).choices("recipe")
    found = [check(name, args.config_dir) for name in names]
    if args.json:
        print(json.dumps({one.name: as_json(one) for one in found}, indent=1))
    else:
        _print(found)
    return RecipeError.exit_code if any(one.problems for one in found) else 0


def check(name: str, config_dirs: Sequence[str] = ()) -> Checked:
    """Resolve one recipe."""
    one: Stated | None = None
    try:
        one = stated(name, (), config_dirs)
        spec = one.spec()
    except (RecipeError, DataError) as error:
        return Checked(name, one.gpus if one else "", problems=_problems(error))
    memory, capacity = fullest(memory_of(spec)).total, one.hardware.memory
    found = remedies(spec, one.hardware)[:1] if memory > capacity else []
    way_out = " ".join(word for remedy in found for word in remedy.overrides)
    return Checked(name, one.gpus, count_parameters(spec.model).total, memory, capacity, way_out)


def _problems(error: MegaspecError) -> tuple[Problem, ...]:
    return tuple(error.problems) if isinstance(error, RecipeError) else (Problem("", str(error)),)


def as_json(one: Checked) -> dict[str, Any]:
    """What a program reads."""
    return {
        "ok": not one.problems,
        "gpus": one.gpus,
        "parameters": one.parameters,
        "memory": one.memory,
        "fits": one.fits,
        "way_out": one.way_out,
        "problems": [{"code": p.code, "key": p.key, "message": p.message, "origin": p.origin} for p in one.problems],
    }


def _print(found: Sequence[Checked]) -> None:
    out = terminal()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("", "left"), ("recipe", "left"), ("GPUs", "left"), ("parameters", "right"), ("", "left")):
        table.add_column(heading, justify=justify, overflow="fold")
    for one in found:
        mark = "[red]wrong" if one.problems else "ok"
        size = "" if one.parameters is None else count_in_words(one.parameters)
        table.add_row(mark, escape(one.name), escape(one.gpus), size, escape(_room(one)))
    out.print(table)
    for one in found:
        for problem in one.problems:
            code = f" \\[{problem.code}]" if problem.code else ""
            out.print(f"{escape(one.name)}: {escape(str(problem))}{code}", soft_wrap=True)
    wrong = sum(1 for one in found if one.problems)
    count = f"{len(found)} recipe{'' if len(found) == 1 else 's'}"
    out.print(f"{count}, {wrong} wrong" if wrong else f"{count}, all right")
    if wrong:
        out.print("megaspec explain CODE says more about a problem")


def _room(one: Checked) -> str:
    if one.memory is None or one.capacity is None:
        return f"{len(one.problems)} problem{'s' if len(one.problems) > 1 else ''}"
    numbers = f"{one.memory / GIB:.1f} of {one.capacity / GIB:.1f} GiB"
    way_out = f"try {one.way_out}" if one.way_out else "megaspec tune searches for a layout"
    return f"fits: {numbers}" if one.fits else f"does not fit: {numbers}; {way_out}"
