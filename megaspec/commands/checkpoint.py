"""`megaspec checkpoint list RUN` and `megaspec checkpoint verify RUN [--step N]`. Torch-free; changes nothing."""

import argparse
import sys
from pathlib import Path

from megaspec.checkpoint.folders import CHECKPOINTS, Candidate, candidates, quarantined
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.verify import examine, no_objections
from megaspec.core.errors import CheckpointError, printable
from megaspec.run_folder import is_run, own_checkpoint, read_run, refuse_unfinished_fork

_HEADINGS = ("step", "generation", "tensors", "files", "MB", "state")


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add `checkpoint` with its two sub-commands to a command line; `run` carries them out."""
    parser = subparsers.add_parser("checkpoint", help="list or verify the checkpoints of a run")
    commands = parser.add_subparsers(dest="checkpoint_command", required=True, metavar="COMMAND")
    for name, text in (
        ("list", "show the checkpoints of a run and those in quarantine; checks manifests and sizes"),
        ("verify", "check every byte of the checkpoints of a run, and that they are its own"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the run")
        if name == "verify":
            command.add_argument("--step", type=int, metavar="N", help="only the checkpoint of this step")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print a table. Returns 0, or 66 when a checkpoint is bad; raises CheckpointError when there is none."""
    refuse_unfinished_fork(args.run_dir)
    folder = args.run_dir / CHECKPOINTS
    is_in_run = is_run(args.run_dir)
    inspect = own_checkpoint(read_run(args.run_dir).spec) if is_in_run else no_objections
    wanted = getattr(args, "step", None)
    found = [c for c in candidates(folder) if wanted in (None, c.step)]
    aside = quarantined(folder)
    if not found and (wanted is not None or not aside):
        raise CheckpointError(_nothing(args.run_dir, wanted))
    rows, problems = [_HEADINGS], []
    for candidate in found:
        is_deep = args.checkpoint_command == "verify"
        manifest, damage = examine(candidate.path, candidate.step, deep=is_deep, inspect=inspect)
        # A running job may have removed it meanwhile.
        if candidate.path.exists() or candidate.path.is_symlink():
            rows.append(_row(candidate, manifest, damage, args.checkpoint_command))
            problems += damage
    if len(rows) > 1:
        _print_table(rows)
    for problem in problems:
        print(printable(problem))
    if not is_in_run:
        text = f"{args.run_dir} holds no spec.json, so that nothing tells which run they are of"
        print(printable(f"megaspec: {text}"), file=sys.stderr)
    if args.checkpoint_command == "list":
        for name, reason in aside.items():
            print(printable(f"in quarantine: {name}: {reason}"))
    return CheckpointError.exit_code if problems else 0


def _nothing(run_dir: Path, step: int | None) -> str:
    steps = sorted({c.step for c in candidates(run_dir / CHECKPOINTS)})
    if step is not None and steps:
        return f"step={step} has no checkpoint in {run_dir}; there are {', '.join(map(str, steps))}"
    return f"{run_dir / CHECKPOINTS} holds no checkpoint; give the folder of a run that has saved one"


def _row(candidate: Candidate, manifest: Manifest | None, damage: list[str], command: str) -> tuple[str, ...]:
    if damage:
        state = "BAD"
    elif candidate.replaced_by is not None:
        state = "good, set aside while its step was saved again"
    else:
        state = "good" if command == "verify" else "whole"
    if manifest is None:
        return (str(candidate.step), "?", "?", "?", "?", state)
    return (
        str(candidate.step),
        str(manifest.generation),
        str(len(manifest.tensors)),
        str(len(manifest.files)),
        f"{manifest.bytes / 1e6:.1f}",
        state,
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        print(printable("  ".join([*numbers, row[-1]])))
