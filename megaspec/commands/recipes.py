"""`megaspec recipes`: which there are, how large, for which GPUs, what for, and where their numbers are from."""

import argparse
import json
from typing import Any

from rich.padding import Padding

from megaspec.commands.stated import stated
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import DataError, RecipeError
from megaspec.core.frozen import AUTO
from megaspec.core.terminal import escape, terminal
from megaspec.core.units import count_in_words
from megaspec.estimate.parameters import count_parameters


def add_parser(commands: Any) -> None:
    """The parser of `recipes`."""
    text = "list the recipes: size, GPUs, purpose and provenance"
    command = commands.add_parser("recipes", help=text, description=text, allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups and recipes")


def run(args: argparse.Namespace) -> int:
    """Print all of them; a recipe that can't be read is listed with what is wrong first."""
    found = {name: about(name, args.config_dir) for name in SearchPath(args.config_dir).choices("recipe")}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    out = terminal()
    widths = [max(len(text) for text in column) for column in zip(*map(_line, found.items()), strict=True)]
    for name, one in found.items():
        first = "  ".join(text.ljust(width) for text, width in zip(_line((name, one)), widths, strict=True))
        out.print(f"[bold]{escape(first.rstrip())}")
        for text in filter(None, (one["purpose"], one["source"], one.get("wrong"))):
            out.print(Padding(escape(text), (0, 0, 0, 4)))
    return 0


def _line(entry: tuple[str, dict[str, Any]]) -> tuple[str, str, str]:
    name, one = entry
    return name, _size(one), one["on"]


def about(name: str, config_dirs: list[str]) -> dict[str, Any]:
    """One recipe, for a program."""
    facts: dict[str, Any] = {"parameters": None, "active": None, "gpus": None, "hardware": None, "on": ""}
    try:
        one = stated(name, (), config_dirs)
        own = one.recipe.about
        ranks = one.recipe.launcher.ranks
        facts |= {"gpus": None if ranks == AUTO else ranks, "hardware": own.hardware, "on": one.gpus}
        facts |= {"purpose": own.purpose, "source": own.source}
        count = count_parameters(one.spec().model)
    except (RecipeError, DataError) as error:
        return {"purpose": "", "source": "", **facts, "wrong": str(error).splitlines()[0]}
    return {**facts, "parameters": count.total, "active": count.active}


def _size(one: dict[str, Any]) -> str:
    if one["parameters"] is None:
        return "wrong"
    total, active = count_in_words(one["parameters"]), count_in_words(one["active"])
    return total if one["active"] == one["parameters"] else f"{total}, {active} active"
