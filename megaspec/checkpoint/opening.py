"""A checkpoint of a run, opened by who only reads: nothing is moved, since another process may train the run."""

import sys
from functools import partial
from pathlib import Path

from megaspec.checkpoint.comm import Comm, on_first
from megaspec.checkpoint.examine import Inspect
from megaspec.checkpoint.fallback import (
    MOST_LOOKS,
    any_is_gone,
    listed,
    path_of_step,
    saved_anywhere,
    tell_elsewhere,
)
from megaspec.checkpoint.folders import CandidateFolder
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError, printable


def open_saved(run_dir: Path, fallback_dir: str | None, comm: Comm, *, step: int | None, inspect: Inspect) -> Reader:
    """The checkpoint of a step, wherever it was saved; None: the newest good one. Every byte of it is verified. Every
    rank of `comm` calls this; rank 0 tells on stderr of one that is not in the run folder.

    CheckpointError: there is none, it is damaged, `inspect` objects to it, or the newest may be where nobody can look.
    """
    for _ in range(MOST_LOOKS - 1):
        before = on_first(comm, lambda: listed(run_dir, fallback_dir))
        try:
            return _open(run_dir, fallback_dir, comm, step=step, inspect=inspect)
        except CheckpointError:
            # fallback.py's note "Read while it moves"; every rank is here, or none
            if not on_first(comm, partial(any_is_gone, before)):
                raise
    return _open(run_dir, fallback_dir, comm, step=step, inspect=inspect)


def _open(run_dir: Path, fallback_dir: str | None, comm: Comm, *, step: int | None, inspect: Inspect) -> Reader:
    store = Store(run_dir)
    if step is None:
        among = partial(_newest_first, run_dir, fallback_dir)
        reader = store.newest_good(comm, repair=False, inspect=inspect, among=among)
        if reader is None:
            raise CheckpointError(f"{run_dir}: no checkpoint was saved there yet; megaspec resume {run_dir} trains it")
    else:
        path = Path(on_first(comm, lambda: str(path_of_step(run_dir, fallback_dir, step))))
        reader = store.open(step, comm, path=path)
        problems = inspect(reader.manifest)
        if problems:
            reader.close()
            raise CheckpointError([f"{reader.path}: {problem}" for problem in problems])
    if comm.rank == 0:
        tell_elsewhere(run_dir, CandidateFolder(reader.step, reader.path))
    return reader


def _newest_first(run_dir: Path, fallback_dir: str | None) -> list[CandidateFolder]:
    """CheckpointError: the newest may be where nobody can look."""
    saved = saved_anywhere(run_dir, fallback_dir)
    saved.refuse_unseen_newest()
    if saved.absent is not None and saved.candidates:
        text = f"checkpoint.fallback_dir={saved.absent} is not there: what was saved there, if anything, is not seen"
        _tell(f"{text}; step {saved.candidates[0].step} is the newest of {run_dir}")
    return list(saved.candidates)


def _tell(text: str) -> None:
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
