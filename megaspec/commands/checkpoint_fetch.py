"""`megaspec checkpoint fetch URL --out RUN`: a run folder from the copies that checkpoint.copy_to made."""

import argparse
import sys
from pathlib import Path
from typing import Any

from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.remote import Remote
from megaspec.core.errors import CheckpointError, WriteError, printable


def add_parser(commands: Any) -> None:
    """The parser of `checkpoint fetch`."""
    text = "bring the newest copy at a URL of checkpoint.copy_to into a run folder, every byte checked"
    command = commands.add_parser("fetch", help=text, description=text)
    command.add_argument("url", metavar="URL", help="what checkpoint.copy_to said")
    command.add_argument("--out", metavar="RUN", type=Path, required=True, help="folder of the run, new or there")
    command.add_argument("--step", metavar="N", type=int, help="of the copy; default: the newest that is good")


def run(args: argparse.Namespace) -> int:
    """Download, verify, publish. -> 0. CheckpointError: no copy is good; WriteError: it can't be written here."""
    remote = Remote(args.url, name="", error=CheckpointError)
    steps = remote.steps()
    if args.step is not None:
        steps = [step for step in steps if step == args.step]
    if not steps:
        wanted = "" if args.step is None else f" of step {args.step}"
        raise CheckpointError(f"{args.url} holds no whole copy of a checkpoint{wanted}")
    problems: list[str] = []
    with RunLock(args.out):
        for step in reversed(steps):
            try:
                path = remote.download(args.out, step)
            except WriteError:
                raise
            except CheckpointError as error:
                problems += [str(problem) for problem in error.problems]
                print(printable(f"megaspec: step {step} is not good: {error}", keep="\n"), file=sys.stderr)
                continue
            print(printable(f"{path}: step {step} of {args.url}; megaspec resume {args.out} goes on"))
            return 0
    raise CheckpointError([f"{args.url}: no copy is good", *problems])
