"""The table that `checkpoint list` and `checkpoint verify` print. Torch-free; changes nothing."""

import sys
from pathlib import Path
from typing import NamedTuple

from megaspec.checkpoint.examine import Inspect, examine, no_objections
from megaspec.checkpoint.fallback import Saved, saved_anywhere, where_now
from megaspec.checkpoint.files import DiskError
from megaspec.checkpoint.folders import CHECKPOINTS, CandidateFolder, quarantined
from megaspec.checkpoint.format import Manifest
from megaspec.core.errors import CheckpointError, printable
from megaspec.rules.belonging import other_place
from megaspec.run_folder import is_run, own_checkpoint, read_run, refuse_unfinished_fork

_HEADINGS = ("step", "generation", "tensors", "files", "MB", "state")


class _Seen(NamedTuple):
    """What a look at a checkpoint came to."""

    manifest: Manifest | None
    """None: it can't be read."""
    damage: list[str]
    unread: list[str]
    """Why it can't be read now, which is no damage."""


def show(run_dir: Path, *, deep: bool, step: int | None = None) -> int:
    """Print a table. -> 0, 66 when a checkpoint is bad, or 73 when none is and one can't be read now.

    `deep`: every byte is read, else manifests and sizes only, and those in quarantine are shown. `step`: only that one.
    Those that the run folder did not take (fallback.py) are shown with their place.
    CheckpointError: there is none.
    """
    refuse_unfinished_fork(run_dir)
    folder = run_dir / CHECKPOINTS
    is_in_run = is_run(run_dir)
    inspect = no_objections
    fallback_dir = None
    if is_in_run:
        spec = read_run(run_dir, allows_gone=True).spec
        inspect = own_checkpoint(spec)
        fallback_dir = other_place(spec)
    saved = saved_anywhere(run_dir, fallback_dir)
    found = [candidate for candidate in saved.candidates if step in (None, candidate.step)]
    aside = quarantined(folder)
    if not found and (step is not None or not aside):
        raise CheckpointError(_nothing(run_dir, saved, step))
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    unread: list[str] = []
    for candidate in found:
        seen = _look(candidate, deep=deep, inspect=inspect)
        now = where_now(run_dir, fallback_dir, candidate)
        if now.path != candidate.path:
            # a start of the run has moved it home meanwhile
            candidate = now
            seen = _look(candidate, deep=deep, inspect=inspect)
        # A running job may have removed it meanwhile.
        if candidate.path.exists() or candidate.path.is_symlink():
            row = _row(candidate, seen, deep=deep)
            if candidate.path.parent != folder:
                row = (*row[:-1], f"{row[-1]}, in {candidate.path.parent}")
            rows.append(row)
            problems += seen.damage
            unread += seen.unread
    if rows:
        _print_table([_HEADINGS, *rows])
    # a place that can't be looked into may hold more
    problems += saved.unseen
    for problem in [*problems, *unread]:
        print(printable(problem))
    if not is_in_run:
        text = f"{run_dir} holds no spec.json, so that nothing tells which run they are of"
        print(printable(f"megaspec: {text}"), file=sys.stderr)
    if not deep:
        for name, reason in aside.items():
            print(printable(f"in quarantine: {name}: {reason}"))
    if problems:
        return CheckpointError.exit_code
    if unread:
        return DiskError.exit_code
    return 0


def _nothing(run_dir: Path, saved: Saved, step: int | None) -> str:
    """Why there is nothing to show."""
    if step is not None and saved.steps:
        return f"step={step} has no checkpoint in {run_dir}; there are {', '.join(map(str, saved.steps))}"
    return f"{run_dir / CHECKPOINTS} holds no checkpoint; give the folder of a run that has saved one"


def _look(candidate: CandidateFolder, *, deep: bool, inspect: Inspect) -> _Seen:
    try:
        manifest, damage = examine(candidate.path, candidate.step, deep=deep, inspect=inspect)
    except DiskError as error:
        return _Seen(None, [], [str(error)])
    return _Seen(manifest, damage, [])


def _row(candidate: CandidateFolder, seen: _Seen, *, deep: bool) -> tuple[str, ...]:
    """A cell for each heading; `whole` is said of what was not read byte for byte."""
    manifest = seen.manifest
    if seen.damage:
        state = "BAD"
    elif seen.unread:
        state = "can't be read now"
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
    """Numbers to the right of their columns, the state at the end of the line."""
    *number_columns, _ = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in number_columns]
    for *numbers, state in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths, strict=True)]
        print(printable("  ".join([*cells, state])))
