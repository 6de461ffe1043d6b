"""`megaspec sweep ...`: a sweep that `train -m` began."""

import argparse
from types import ModuleType
from typing import Any

from megaspec.commands import sweep_resume, sweep_show

COMMANDS: dict[str, ModuleType] = {"resume": sweep_resume, "show": sweep_show}


def add_parser(commands: Any) -> None:
    """Register `sweep` with its sub-commands."""
    sweep = commands.add_parser("sweep", help="go on with a sweep, or show what it has come to")
    below = sweep.add_subparsers(dest="sweep_command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add_parser(below)


def run(args: argparse.Namespace) -> int:
    """The sub-command."""
    return COMMANDS[args.sweep_command].run(args)
