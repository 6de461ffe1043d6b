"""Going back: from a step whose numbers were too much to the newest good checkpoint before it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaspec.checkpoint.comm import Comm
from megaspec.checkpoint.examine import Inspect
from megaspec.checkpoint.files import DiskError
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError, NonFiniteError, Problem
from megaspec.train.guard import Verdict, Window


@dataclass
class RollBack(Exception):
    """Ends the steps that are under way; the run goes on from an earlier one."""

    verdict: Verdict
    loss: float
    grad_norm: float
    where: str
    """As `first_seen` says it."""
    error: NonFiniteError
    """That ends the run where nothing is left to go back to."""


def only_before(window: Window, inspect: Inspect) -> Inspect:
    """What a run that goes back before a window has against a checkpoint."""

    def is_before(manifest: Manifest) -> list[str]:
        if manifest.step >= window.first:
            return [f"it has learned from the data of steps {window.first} to {window.last}, which is left out now"]
        return inspect(manifest)

    return is_before


def open_before(store: Store, comm: Comm, back: RollBack, elsewhere: Reader | None, *, inspect: Inspect) -> Reader:
    """The newest good checkpoint before a window, opened: `elsewhere`, which is newer than all in the run folder where
    there is one. `inspect`: see `only_before`. What was written behind goes into quarantine: it has learned from data
    that is left out. Raises NonFiniteError where there is none."""
    window = back.verdict.window
    try:
        reader = store.newest_good(comm, inspect=inspect)
    except DiskError:
        # it may be there all the same: another start goes back to it
        raise
    except CheckpointError as error:
        if elsewhere is not None:
            return elsewhere
        raise nothing_before(back, window, error.problems) from error
    if elsewhere is not None:
        if reader is not None:
            reader.close()
        return elsewhere
    if reader is None:
        raise nothing_before(back, window, [])
    return reader


def nothing_before(back: RollBack, window: Window, problems: Sequence[Problem | str]) -> NonFiniteError:
    """The error that ends the run, with why it does not go back."""
    text = f"no good checkpoint before step {window.first} is left to go back to; checkpoint.every says how often one "
    return NonFiniteError([*back.error.problems, f"{text}is written", *problems])
