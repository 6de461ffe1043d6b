"""`megaspec data ...`: token files."""

import argparse
from types import ModuleType
from typing import Any

from megaspec.commands import data_fetch, data_inspect, data_prepare

COMMANDS: dict[str, ModuleType] = {"prepare": data_prepare, "inspect": data_inspect, "fetch": data_fetch}


def add_parser(commands: Any) -> None:
    """Register `data` with its sub-commands."""
    data = commands.add_parser("data", help="prepare, inspect and fetch token files")
    below = data.add_subparsers(dest="data_command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add_parser(below)


def run(args: argparse.Namespace) -> int:
    """The sub-command."""
    return COMMANDS[args.data_command].run(args)
