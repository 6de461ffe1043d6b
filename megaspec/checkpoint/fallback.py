"""Checkpoints that a run folder did not take and that were saved in another place: moved home by the next start.

Torch-free. `checkpoints/saved-elsewhere.txt` in the run folder names the place, where there was room for a line.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from megaspec.checkpoint import folders
from megaspec.checkpoint.examine import Inspect, examine, newest_whole, no_objections
from megaspec.checkpoint.files import free_bytes, remove_tree, rename_durably, sync_folder, write_failure
from megaspec.checkpoint.format import MANIFEST, Manifest
from megaspec.core.errors import CheckpointError, WriteError
from megaspec.core.regular_files import read_inside

NOTE = "saved-elsewhere.txt"
_NOTE_LIMIT = 4096


def fallback_folder(fallback_dir: str, run_dir: Path) -> Path:
    """Where a run saves what its own folder does not take: a folder of its own, by its name and place."""
    place = sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
    return Path(fallback_dir) / f"{run_dir.name}-{place}"


def note(run_dir: Path, path: Path) -> None:
    """Keeps in the run folder where its newest checkpoint is; a disk without room for a line does without."""
    with contextlib.suppress(OSError):
        (run_dir / folders.CHECKPOINTS).mkdir(exist_ok=True)
        (run_dir / folders.CHECKPOINTS / NOTE).write_text(f"{path}\n")


def refuse_unwritable(fallback_dir: str, run_dir: Path) -> None:
    """WriteError: nothing can be saved there. Asked before training starts, not when it is needed."""
    folder = fallback_folder(fallback_dir, run_dir)
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise WriteError(
            f"checkpoint.fallback_dir={fallback_dir}: cannot write {error.filename or folder}: "
            f"{os.strerror(error.errno or 0)}; name a folder that can be written"
        ) from None


@dataclass(frozen=True)
class Adopted:
    """What `adopt` did. `lines`: for whoever starts the run."""

    step: int | None
    lines: tuple[str, ...]


def adopt(run_dir: Path, fallback_dir: str | None, inspect: Inspect = no_objections) -> Adopted:
    """Moves the newest checkpoint in the fallback folder into the run folder, where it is newer than all there; for who
    holds the run's lock. What is not newer is removed.

    WriteError: the run folder has no room for it. Damage is told, and left where it is.
    """
    home = run_dir / folders.CHECKPOINTS
    lines = []
    noted = _noted(home)
    places = [Path(noted).parent] if noted else []
    if fallback_dir is not None:
        places.append(fallback_folder(fallback_dir, run_dir) / folders.CHECKPOINTS)
    if noted and not Path(noted).is_dir():
        lines.append(f"{noted} is not there, in which a checkpoint was saved that this folder had not taken")
    adopted = None
    for place in dict.fromkeys(places):
        for candidate in folders.candidates(place):
            newest = newest_whole(home, inspect)
            if newest is not None and candidate.step <= newest:
                with contextlib.suppress(OSError):
                    remove_tree(candidate.path)
                continue
            manifest, problems = examine(candidate.path, candidate.step, deep=True, inspect=inspect)
            if manifest is None or problems:
                lines.append(f"a checkpoint is not good: {'; '.join(problems)}")
                continue
            _move(candidate, manifest, home)
            lines.append(f"step {candidate.step} was saved in {place}, and is in {home} now")
            adopted = candidate.step
    if adopted is not None:
        with contextlib.suppress(OSError):
            (home / NOTE).unlink()
    return Adopted(adopted, tuple(lines))


def _noted(home: Path) -> str:
    """What the note says; "" where there is none."""
    try:
        return read_inside(home, NOTE, limit=_NOTE_LIMIT).decode(errors="replace").strip()
    except OSError:
        return ""


def _move(candidate: folders.CandidateFolder, manifest: Manifest, home: Path) -> None:
    """Copies a checkpoint home as it would be saved there, and then removes it where it was."""
    target = home / folders.step_name(candidate.step)
    saving = home / folders.hidden_name("saving", candidate.step, manifest.generation)
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = free_bytes(home)
        if manifest.bytes > free:
            raise WriteError(
                f"{candidate.path} is this run's newest checkpoint, and {home} has no room for it: need "
                f"{manifest.bytes:,} bytes, {free:,} bytes are free; make room there and start again"
            )
        folders.remove_hidden(home, "saving")
        saving.mkdir()
        for name in [file.name for file in manifest.files] + [MANIFEST]:
            shutil.copyfile(candidate.path / name, saving / name, follow_symlinks=False)
            fd = os.open(saving / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_folder(saving)
        # the bytes that are here now: the copy may have gone wrong
        _, problems = examine(saving, candidate.step, deep=True)
        if problems:
            raise CheckpointError(problems)
        if os.path.lexists(target):
            # it is not whole, or this one would not be newer
            folders.put_aside(folders.CandidateFolder(candidate.step, target), "it was saved again elsewhere")
        rename_durably(saving, target)
    except OSError as error:
        raise write_failure(home, error, need=manifest.bytes) from None
    finally:
        if os.path.lexists(saving):
            with contextlib.suppress(OSError):
                remove_tree(saving)
    with contextlib.suppress(OSError):
        remove_tree(candidate.path)
