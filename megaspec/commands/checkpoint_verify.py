"""`megaspec checkpoint verify RUN [--step N]`."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.commands.checkpoint_table import show


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint verify`."""
    text = "check every byte of the checkpoints of a run, and that they are its own"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
    command.add_argument("--step", type=int, metavar="N", help="only the checkpoint of this step")


def run(args: argparse.Namespace) -> int:
    """Print the table. -> 0, or 66 when a checkpoint is bad. Raises CheckpointError when there is none."""
    return show(args.run_dir, deep=True, step=args.step)
