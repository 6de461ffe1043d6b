"""`megaspec checkpoint ...`: the checkpoints of a run."""

import argparse
from types import ModuleType
from typing import Any

from megaspec.commands import (
    checkpoint_average,
    checkpoint_diff,
    checkpoint_fetch,
    checkpoint_inspect,
    checkpoint_list,
    checkpoint_save,
    checkpoint_verify,
)

COMMANDS: dict[str, ModuleType] = {
    "list": checkpoint_list,
    "verify": checkpoint_verify,
    "inspect": checkpoint_inspect,
    "diff": checkpoint_diff,
    "save": checkpoint_save,
    "average": checkpoint_average,
    "fetch": checkpoint_fetch,
}


def add_parser(commands: Any) -> None:
    """Register `checkpoint` with its sub-commands."""
    text = "list, verify, inspect, compare or average checkpoints, save weights alone, or fetch a copy"
    checkpoint = commands.add_parser("checkpoint", help=text)
    below = checkpoint.add_subparsers(dest="checkpoint_command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add_parser(below)


def run(args: argparse.Namespace) -> int:
    """The sub-command."""
    return COMMANDS[args.checkpoint_command].run(args)
