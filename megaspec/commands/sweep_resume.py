"""`megaspec sweep resume FOLDER sweep.slots=N ...`: the points that have not ended are run."""

import argparse
from pathlib import Path
from typing import Any

from megaspec.commands.starting import refuse_tasks
from megaspec.sweep.multirun import resume_sweep


def add_parser(commands: Any) -> None:
    """The parser of `sweep resume`."""
    text = "run the points of a sweep that have not ended; sweep.slots=N and the like change how"
    command = commands.add_parser("resume", help=text, description=text)
    command.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the sweep: sweeps/<name>")
    what = "slots, gpus, keep_going, again, trials; hydra.launcher.* of its launcher"
    command.add_argument("words", nargs="*", default=[], metavar="sweep.a=b", help=what)


def run(args: argparse.Namespace) -> int:
    """Run them. -> exit code of the sweep."""
    refuse_tasks()
    return resume_sweep(args.folder, args.words)
