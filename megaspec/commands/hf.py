"""`megaspec hf ...`: Hugging Face both ways."""

import argparse
from types import ModuleType
from typing import Any

from megaspec.commands import hf_export, hf_families, hf_import, hf_recipe, hf_verify

COMMANDS: dict[str, ModuleType] = {
    "import": hf_import,
    "export": hf_export,
    "verify": hf_verify,
    "recipe": hf_recipe,
    "families": hf_families,
}


def add_parser(commands: Any) -> None:
    """Register `hf` with its sub-commands."""
    hf = commands.add_parser("hf", help="weights and configurations of Hugging Face, both ways")
    below = hf.add_subparsers(dest="hf_command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add_parser(below)


def run(args: argparse.Namespace) -> int:
    """The sub-command."""
    return COMMANDS[args.hf_command].run(args)
