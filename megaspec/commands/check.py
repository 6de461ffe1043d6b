"""`megaspec check [RECIPE...]`: every recipe resolved on the GPUs that it states, and all that is wrong with it."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megaspec.commands.stated import Stated, stated
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import DataError, MegaspecError, Problem, RecipeError
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import GIB, count_in_words
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.parameters import count_parameters
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.remedies import Remedy, remedies

_BAD = (("wrong", "wrong"), ("does not fit", "too large for its GPUs"))


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
    remedies: tuple[Remedy, ...] = ()
    """What would make it fit, where it does not."""
    problems: tuple[Problem, ...] = ()
    unbuilt: tuple[str, ...] = ()
    """Keys whose values can be planned, not trained yet."""

    @property
    def fits(self) -> bool | None:
        return None if self.memory is None or self.capacity is None else self.memory <= self.capacity

    @property
    def state(self) -> str:
        """`ok`, `wrong`, or `does not fit`."""
        return "wrong" if self.problems else "does not fit" if self.fits is False else "ok"


def add_parser(commands: Any) -> None:
    """The parser of `check`."""
    text = "resolve recipes on the GPUs that they state, without data: all shipped and local ones, or those named"
    command = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    command.add_argument("recipes", nargs="*", metavar="RECIPE", help="name, or path of a YAML file")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups and recipes")


def run(args: argparse.Namespace) -> int:
    """Print a line each, the problems, and what would make fit. -> 0, or 64 where a recipe is wrong or does not fit."""
    names = args.recipes or SearchPath(args.config_dir).choices("recipe")
    found = [check(name, args.config_dir) for name in names]
    if args.json:
        print(json.dumps({one.name: as_json(one) for one in found}, indent=1))
    else:
        _print(found)
    return RecipeError.exit_code if any(one.state != "ok" for one in found) else 0


def check(name: str, config_dirs: Sequence[str] = ()) -> Checked:
    """Resolve one recipe."""
    one: Stated | None = None
    try:
        one = stated(name, (), config_dirs)
        spec = one.spec()
    except (RecipeError, DataError) as error:
        return Checked(name, one.gpus if one else "", problems=_problems(error))
    memory, capacity = fullest(memory_of(spec)).total, one.hardware.memory
    found = tuple(remedies(spec, one.hardware)) if memory > capacity else ()
    unbuilt = tuple(problem.key for problem in unbuilt_problems(spec))
    return Checked(name, one.gpus, count_parameters(spec.model).total, memory, capacity, found, unbuilt=unbuilt)


def _problems(error: MegaspecError) -> tuple[Problem, ...]:
    return tuple(error.problems) if isinstance(error, RecipeError) else (Problem("", str(error)),)


def as_json(one: Checked) -> dict[str, Any]:
    """What a program reads."""
    return {
        "ok": one.state == "ok",
        "gpus": one.gpus,
        "parameters": one.parameters,
        "memory": one.memory,
        "fits": one.fits,
        "unbuilt": list(one.unbuilt),
        "remedies": [remedy.model_dump(mode="json") for remedy in one.remedies],
        "problems": [problem.as_json() for problem in one.problems],
    }


def _print(found: Sequence[Checked]) -> None:
    out = terminal()
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (("", "left"), ("recipe", "left"), ("GPUs", "left"), ("parameters", "right"), ("", "left"), ("", "left"))
    for heading, justify in headings:
        table.add_column(heading, justify=justify, overflow="fold")
    for one in found:
        mark = one.state if one.state == "ok" else f"[red]{one.state}"
        size = "" if one.parameters is None else count_in_words(one.parameters)
        today = "plan only" if one.unbuilt else ""
        table.add_row(mark, escape(one.name), escape(one.gpus), size, _room(one), today)
    out.print(table)
    if any(one.unbuilt for one in found):
        out.print("plan only: `megaspec plan` says what of it can't be trained yet")
    for one in found:
        for text in _below(one):
            out.print(text, soft_wrap=True)
    states = [one.state for one in found]
    count = f"{len(found)} recipe{'' if len(found) == 1 else 's'}"
    bad = [f"{states.count(state)} {word}" for state, word in _BAD if state in states]
    out.print(f"{count}, {', '.join(bad) or 'all right'}")
    if "wrong" in states:
        out.print("megaspec explain CODE says more about a problem")


def _room(one: Checked) -> str:
    if one.memory is None or one.capacity is None:
        return f"{len(one.problems)} problem{'s' if len(one.problems) > 1 else ''}"
    return f"{one.memory / GIB:.1f} of {one.capacity / GIB:.1f} GiB"


def _below(one: Checked) -> Iterator[str]:
    """The lines about a recipe that stand below the table: each problem, each way to make it fit."""
    for problem in one.problems:
        code = f" \\[{problem.code}]" if problem.code else ""
        yield f"{escape(one.name)}: {escape(str(problem))}{code}"
    if one.state == "does not fit":
        yield f"{escape(one.name)}: does not fit the memory of its GPUs; try one of"
        for remedy in one.remedies:
            yield escape(f"  {remedy.words}   ({remedy.total / GIB:.1f} GiB)")
        yield "  a layout that megaspec tune finds, or more GPUs: launcher.ranks=..."
