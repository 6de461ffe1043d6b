"""`megaspec checkpoint list RUN`."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.commands.checkpoint_table import show


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint list`."""
    text = "show the checkpoints of a run and those in quarantine; checks manifests and sizes"
    command = commands.add_parser("list", help=text, description=text)
    command.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")


def run(args: argparse.Namespace) -> int:
    """Print the table. -> 0, or 66 when a checkpoint is bad. Raises CheckpointError when there is none."""
    return show(args.run_dir, deep=False)
