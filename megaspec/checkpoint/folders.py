"""The folders of a run's checkpoints, and what a crash may leave of them. Torch-free.

    checkpoints/step-00000100              published
    checkpoints/.replaced-00000100-7       the earlier save of a step, while its re-save (generation 7) takes its place
    checkpoints/.saving-00000100-7         being written
    checkpoints/.deleted-00000100-7        being removed
    checkpoints/quarantine/step-00000100-1 found bad; step-00000100-1.txt says why

A save goes: write .saving, rename step to .replaced (re-save only), rename .saving to step, remove .replaced. A kill
between any two of these leaves the old or the new checkpoint whole, under `step-` or `.replaced-`; both are candidates.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaspec.checkpoint.files import DiskError, read_failure, remove_tree, rename_durably, sync_folder, write_durably
from megaspec.core.errors import CheckpointError
from megaspec.core.faults import failpoint
from megaspec.core.regular_files import read_inside

CHECKPOINTS = "checkpoints"
QUARANTINE = "quarantine"

_PUBLISHED = re.compile(r"step-([0-9]{8,18})")
_HIDDEN = re.compile(r"\.(saving|replaced|deleted)-([0-9]{8,18})-([0-9]{1,18})")


@dataclass(frozen=True)
class CandidateFolder:
    """A folder that may hold a good checkpoint. `replaced_by` is the generation that took its place, or None."""

    step: int
    path: Path
    replaced_by: int | None = None


def step_name(step: int) -> str:
    """Name of the folder of a step."""
    return f"step-{step:08d}"


def hidden_name(kind: str, step: int, generation: int) -> str:
    """Name of a folder that is `saving`, `replaced` or `deleted`."""
    return f".{kind}-{step:08d}-{generation}"


def names(folder: Path) -> list[str]:
    """Names in a folder, sorted; none when there is no such folder. Raises CheckpointError when it can't be listed, of
    which DiskError is one that may be listed later."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        if isinstance(read_failure(folder, error), DiskError):
            raise DiskError(f"{folder}: cannot be listed now: {os.strerror(error.errno or 0)}") from None
        raise CheckpointError(f"{folder}: cannot be listed: {os.strerror(error.errno or 0)}") from None
    except ValueError:
        # a NUL in it, or what no encoding has
        raise CheckpointError(f"{folder}: cannot be listed: it is no path") from None


def parse_candidate(folder: Path, name: str) -> CandidateFolder | None:
    """What a name in the folder of checkpoints stands for; None when it is no candidate."""
    if match := _PUBLISHED.fullmatch(name):
        return CandidateFolder(int(match[1]), folder / name)
    if (match := _HIDDEN.fullmatch(name)) and match[1] == "replaced":
        return CandidateFolder(int(match[2]), folder / name, int(match[3]))
    return None


def candidates(folder: Path) -> list[CandidateFolder]:
    """Every folder that may hold a good checkpoint: newest step first, and of one step the published one first."""
    found = []
    for name in names(folder):
        candidate = parse_candidate(folder, name)
        if candidate is not None:
            found.append(candidate)
    return sorted(found, key=lambda c: (-c.step, c.replaced_by is not None, -(c.replaced_by or 0)))


def is_gone(path: Path) -> bool:
    """Whether a checkpoint that was listed is not there any more; not where that can't be told."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def refuse_gone(path: Path) -> None:
    """CheckpointError: a checkpoint that was listed is not there any more. Who wants the newest has to list them again,
    and to take no older one for it."""
    if is_gone(path):
        raise CheckpointError(f"{path}: is not there any more")


def highest_generation(folder: Path) -> int:
    """The highest generation that the names of hidden folders mention; 0 when there are none."""
    highest = 0
    for name in names(folder):
        if match := _HIDDEN.fullmatch(name):
            highest = max(highest, int(match[3]))
    return highest


def remove_hidden(folder: Path, *kinds: str) -> None:
    """Remove what earlier saves left: folders of the given kinds. Raises OSError."""
    for name in names(folder):
        if (match := _HIDDEN.fullmatch(name)) and match[1] in kinds:
            remove_tree(folder / name)


def delete(path: Path, step: int, generation: int, remove: Callable[[Path], object] = remove_tree) -> None:
    """Remove a checkpoint: renamed first, so that no half of it is ever found under its name. Raises OSError."""
    doomed = path.with_name(hidden_name("deleted", step, generation))
    if doomed.exists():
        remove_tree(doomed)
    rename_durably(path, doomed)
    failpoint("mid_delete")
    remove(doomed)


def put_aside(candidate: CandidateFolder, reason: str) -> Path:
    """Move a bad checkpoint into quarantine, with the reason beside it; returns its new place. Raises OSError."""
    quarantine = candidate.path.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    number = 1
    while os.path.lexists(target := quarantine / f"{step_name(candidate.step)}-{number}"):
        number += 1
    rename_durably(candidate.path, target)
    failpoint("mid_quarantine")
    # On a full disk the move is what matters; whoever called has the reason too.
    with contextlib.suppress(OSError):
        write_durably(target.with_name(f"{target.name}.txt"), f"{reason}\n".encode())
        sync_folder(quarantine)
    return target


def quarantined(folder: Path) -> dict[str, str]:
    """Names of the checkpoints in quarantine and why they are there."""
    quarantine = folder / QUARANTINE
    found = {}
    for name in names(quarantine):
        if re.fullmatch(r"step-[0-9]{8,18}-[0-9]+", name):
            try:
                found[name] = read_inside(quarantine, f"{name}.txt", limit=1 << 20).decode(errors="replace").strip()
            except OSError:
                found[name] = "no reason was noted"
    return found
