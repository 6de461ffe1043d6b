"""`megaspec hf families`: which model types can be read and written, and with which keys of config.json."""

import argparse
from typing import Any

from megaspec.core.errors import RecipeError, printable
from megaspec.core.problems import did_you_mean
from megaspec.hf.config import ABOUT, PLAIN, Config
from megaspec.hf.family import Family
from megaspec.hf.table import FAMILIES


def add_parser(commands: Any) -> None:
    """The parser of `hf families`."""
    text = "list the model types that can be said, or the keys of one's config.json"
    command = commands.add_parser("families", help=text, description=text, allow_abbrev=False)
    command.add_argument("family", metavar="FAMILY", nargs="?", help="a model type: its keys and what each may be")


def run(args: argparse.Namespace) -> int:
    """Print a line for each, or the keys of one."""
    if args.family is None:
        width = max(map(len, FAMILIES))
        for name, family in FAMILIES.items():
            mapped = [key for key, what in keys_of(family).items() if not what.startswith("not needed")]
            print(printable(f"{name.ljust(width)}  {family.architecture}: {', '.join(mapped)}"))
        return 0
    if args.family not in FAMILIES:
        hint = did_you_mean(args.family, FAMILIES) or f"there are {', '.join(FAMILIES)}"
        raise RecipeError(f"{args.family} is no model type that can be said; {hint}")
    keys = keys_of(FAMILIES[args.family])
    width = max(map(len, keys))
    for name, what in keys.items():
        print(printable(f"{name.ljust(width)}  {what}"))
    return 0


def keys_of(family: Family) -> dict[str, str]:
    """What a family asks of its own config.json, without what all may have: each key, and what it must be.

    An empty one is read: every key is asked for, whatever it says.
    """
    config = Config({}, family.model_type)
    family.read(config)
    return {name: what for name, what in config.asked.items() if name not in ABOUT and name not in PLAIN}
