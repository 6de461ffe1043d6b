"""`megaspec sweep show FOLDER`: what a sweep has come to."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.sweep.driver import SweepTable, look
from megaspec.sweep.report import MOST_REASONS, print_results
from megaspec.sweep.state import SweepFolder


def add_parser(commands: Any) -> None:
    """The parser of `sweep show`."""
    text = "print the table of a sweep and write its page anew"
    command = commands.add_parser("show", help=text, description=text)
    command.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the sweep: sweeps/<name>")


def run(args: argparse.Namespace) -> int:
    """Print the table. -> 0. RecipeError: a file of the sweep can't be read; what can is printed."""
    table = SweepTable(SweepFolder(args.folder), SweepFolder(args.folder).head())
    table.write_page(running=look(table))
    print_results(table)
    troubles = [result.trouble for result in table.results().values() if result.trouble]
    if troubles:
        raise RecipeError([Problem("", text, code="sweep-damaged") for text in troubles[:MOST_REASONS]])
    return 0
