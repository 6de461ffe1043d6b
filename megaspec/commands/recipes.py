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
    rows = [(name, _size(one), one["on"]) for name, one in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, found.values(), strict=True):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        line = "  ".join(cells).rstrip()
        out.print(f"[bold]{escape(line)}")
        for text in filter(None, (one["purpose"], one["source"], one.get("wrong"))):
            out.print(Padding(escape(text), (0, 0, 0, 4)))
    return 0


def about(name: str, config_dirs: list[str]) -> dict[str, Any]:
    """One recipe, for a program."""
    facts: dict[str, Any] = {"parameters": None, "active": None, "gpus": None, "hardware": None, "on": ""}
    try:
        recipe = stated(name, (), config_dirs)
        ranks = recipe.recipe.launcher.ranks
        if ranks != AUTO:
            facts["gpus"] = ranks
        provenance = recipe.recipe.about
        facts |= {"hardware": provenance.hardware, "on": recipe.gpus}
        facts |= {"purpose": provenance.purpose, "source": provenance.source}
        count = count_parameters(recipe.spec().model)
    except (RecipeError, DataError) as error:
        return {"purpose": "", "source": "", **facts, "wrong": str(error).splitlines()[0]}
    return {**facts, "parameters": count.total, "active": count.active}


def _size(one: dict[str, Any]) -> str:
    """`8.03B`, or `671B, 37.6B active` where not every token passes through all parameters."""
    if one["parameters"] is None:
        return "wrong"
    total = count_in_words(one["parameters"])
    if one["active"] == one["parameters"]:
        return total
    return f"{total}, {count_in_words(one['active'])} active"
