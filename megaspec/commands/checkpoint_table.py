"""The table that `checkpoint list` and `checkpoint verify` print. Torch-free; changes nothing."""

import sys
from pathlib import Path

from megaspec.checkpoint.examine import examine, no_objections
from megaspec.checkpoint.folders import CHECKPOINTS, Candidate, candidates, quarantined
from megaspec.checkpoint.format import Manifest
from megaspec.core.errors import CheckpointError, printable
from megaspec.run_folder import is_run, own_checkpoint, read_run, refuse_unfinished_fork

_HEADINGS = ("step", "generation", "tensors", "files", "MB", "state")


def show(run_dir: Path, *, deep: bool, step: int | None = None) -> int:
    """Print a table. -> 0, or 66 when a checkpoint is bad.

    `deep`: every byte is read, else manifests and sizes only, and those in quarantine are shown. `step`: only that one.
    CheckpointError: there is none.
    """
    refuse_unfinished_fork(run_dir)
    folder = run_dir / CHECKPOINTS
    is_in_run = is_run(run_dir)
    inspect = own_checkpoint(read_run(run_dir).spec) if is_in_run else no_objections
    found = [c for c in candidates(folder) if step in (None, c.step)]
    aside = quarantined(folder)
    if not found and (step is not None or not aside):
        raise CheckpointError(_nothing(run_dir, step))
    rows, problems = [_HEADINGS], []
    for candidate in found:
        manifest, damage = examine(candidate.path, candidate.step, deep=deep, inspect=inspect)
        # A running job may have removed it meanwhile.
        if candidate.path.exists() or candidate.path.is_symlink():
            rows.append(_row(candidate, manifest, damage, deep=deep))
            problems += damage
    if len(rows) > 1:
        _print_table(rows)
    for problem in problems:
        print(printable(problem))
    if not is_in_run:
        text = f"{run_dir} holds no spec.json, so that nothing tells which run they are of"
        print(printable(f"megaspec: {text}"), file=sys.stderr)
    if not deep:
        for name, reason in aside.items():
            print(printable(f"in quarantine: {name}: {reason}"))
    return CheckpointError.exit_code if problems else 0


def _nothing(run_dir: Path, step: int | None) -> str:
    steps = sorted({c.step for c in candidates(run_dir / CHECKPOINTS)})
    if step is not None and steps:
        return f"step={step} has no checkpoint in {run_dir}; there are {', '.join(map(str, steps))}"
    return f"{run_dir / CHECKPOINTS} holds no checkpoint; give the folder of a run that has saved one"


def _row(candidate: Candidate, manifest: Manifest | None, damage: list[str], *, deep: bool) -> tuple[str, ...]:
    if damage:
        state = "BAD"
    elif candidate.replaced_by is not None:
        state = "good, set aside while its step was saved again"
    else:
        state = "good" if deep else "whole"
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
