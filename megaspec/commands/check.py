"""`megaspec check [RECIPE...]`: every recipe resolved on the GPUs that it states, and all that is wrong with it."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megaspec.commands.stated import stated
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import DataError, MegaspecError, Problem, RecipeError
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import GIB, count_in_words, plural
from megaspec.estimate.memory import fullest, memory_of
from megaspec.estimate.parameters import count_parameters
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.remedies import Remedy, remedies

# State of a recipe -> what the last line counts such recipes as.
_COUNTED_AS = {"wrong": "wrong", "does not fit": "too large for its GPUs"}


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
        """None where its memory is not known."""
        if self.memory is None or self.capacity is None:
            return None
        return self.memory <= self.capacity

    @property
    def state(self) -> str:
        """`ok`, `wrong`, or `does not fit`."""
        if self.problems:
            return "wrong"
        if self.fits is False:
            return "does not fit"
        return "ok"


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
    checked = [check(name, args.config_dir) for name in names]
    if args.json:
        print(json.dumps({one.name: as_json(one) for one in checked}, indent=1))
    else:
        _print(checked)
    if any(one.state != "ok" for one in checked):
        return RecipeError.exit_code
    return 0


def check(name: str, config_dirs: Sequence[str] = ()) -> Checked:
    """Resolve one recipe."""
    gpus = ""  # until the recipe is read far enough to say them
    try:
        recipe = stated(name, (), config_dirs)
        gpus = recipe.gpus
        spec = recipe.spec()
    except (RecipeError, DataError) as error:
        return Checked(name, gpus, problems=_problems(error))
    memory = fullest(memory_of(spec)).total
    capacity = recipe.hardware.memory
    ways_to_fit: tuple[Remedy, ...] = ()
    if memory > capacity:
        ways_to_fit = tuple(remedies(spec, recipe.hardware))
    return Checked(
        name,
        gpus,
        parameters=count_parameters(spec.model).total,
        memory=memory,
        capacity=capacity,
        remedies=ways_to_fit,
        unbuilt=tuple(problem.key for problem in unbuilt_problems(spec)),
    )


def _problems(error: MegaspecError) -> tuple[Problem, ...]:
    if isinstance(error, RecipeError):
        return tuple(error.problems)
    return (Problem("", str(error)),)


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


def _print(checked: Sequence[Checked]) -> None:
    """The table, below it what is wrong with each recipe, and a line that counts."""
    out = terminal()
    out.print(_table(checked))
    if any(one.unbuilt for one in checked):
        out.print("plan only: `megaspec plan` says what of it can't be trained yet")
    for one in checked:
        for text in _below(one):
            out.print(text, soft_wrap=True)
    states = [one.state for one in checked]
    bad = [f"{states.count(state)} {words}" for state, words in _COUNTED_AS.items() if state in states]
    verdict = ", ".join(bad) or "all right"
    out.print(f"{len(checked)} {plural('recipe', len(checked))}, {verdict}")
    if "wrong" in states:
        out.print("megaspec explain CODE says more about a problem")


def _table(checked: Sequence[Checked]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (("", "left"), ("recipe", "left"), ("GPUs", "left"), ("parameters", "right"), ("", "left"), ("", "left"))
    for heading, justify in headings:
        table.add_column(heading, justify=justify, overflow="fold")
    for one in checked:
        state = one.state
        if state != "ok":
            state = f"[red]{state}"
        size = ""
        if one.parameters is not None:
            size = count_in_words(one.parameters)
        today = "plan only" if one.unbuilt else ""
        table.add_row(state, escape(one.name), escape(one.gpus), size, _room(one), today)
    return table


def _room(one: Checked) -> str:
    """`12.0 of 79.6 GiB`; how many problems it has where its memory is not known."""
    if one.memory is None or one.capacity is None:
        return f"{len(one.problems)} {plural('problem', len(one.problems))}"
    return f"{one.memory / GIB:.1f} of {one.capacity / GIB:.1f} GiB"


def _below(one: Checked) -> Iterator[str]:
    """The lines about a recipe that stand below the table: each problem, each way to make it fit."""
    for problem in one.problems:
        line = f"{escape(one.name)}: {escape(str(problem))}"
        if problem.code:
            line += f" \\[{problem.code}]"  # the backslash keeps rich from taking it for a style
        yield line
    if one.state == "does not fit":
        yield f"{escape(one.name)}: does not fit the memory of its GPUs; try one of"
        for remedy in one.remedies:
            yield escape(f"  {remedy.words}   ({remedy.total / GIB:.1f} GiB)")
        yield "  a layout that megaspec tune finds, or more GPUs: launcher.ranks=..."
