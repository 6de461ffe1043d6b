"""Checkpoints that a run folder did not take and that were saved in another place: moved home by the next start.

Where that has no room for the newest either, a start goes on from it where it is, and saves beside it.

Note "Read while it moves". A checkpoint is whole at home, under its name, before it loses its name in the other place,
and it loses that only while nobody holds it for reading (in_use.py). So who has it open reads on, and who has found it
and not opened it yet misses it, looks again and finds it at home: `looked_up_again`. One that is held is removed by a
later start, which sees that it is the one at home by the digest of its manifest.

Torch-free. `checkpoints/saved-elsewhere.txt` in the run folder names the place, where there was room for a line. It is
how they are found again when `fallback_dir` was changed, or the run folder was moved. A run that was copied has a note
of the other one's place: there nothing is removed.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from megaspec.checkpoint import folders
from megaspec.checkpoint.examine import Inspect, examine, no_objections, read_manifest, whole_steps
from megaspec.checkpoint.files import (
    DiskError,
    free_bytes,
    read_failure,
    remove_tree,
    rename_durably,
    sync_folder,
    write_failure,
)
from megaspec.checkpoint.format import MANIFEST, Manifest
from megaspec.checkpoint.in_use import unless_held
from megaspec.checkpoint.retention import kept
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import CheckpointError, WriteError, printable
from megaspec.core.regular_files import read_inside

NOTE = "saved-elsewhere.txt"
_NOTE_LIMIT = 4096
# Times that a checkpoint is looked for which is gone whenever it is to be read.
MOST_LOOKS = 5

T = TypeVar("T")


def fallback_folder(fallback_dir: str, run_dir: Path) -> Path:
    """Where a run saves what its own folder does not take: a folder of its own, by its name and place."""
    place = sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
    return Path(fallback_dir) / f"{run_dir.name}-{place}"


def file_elsewhere(fallback_dir: str | None, run_dir: Path, name: str) -> Path | None:
    """A file of a run in the other place, where its own disk has no room for it; None: there is no other place."""
    if fallback_dir is None:
        return None
    return fallback_folder(fallback_dir, run_dir) / name


def note(run_dir: Path, path: Path) -> None:
    """Keeps in the run folder where its newest checkpoint is; a disk without room for a line does without."""
    with contextlib.suppress(OSError):
        (run_dir / folders.CHECKPOINTS).mkdir(exist_ok=True)
        (run_dir / folders.CHECKPOINTS / NOTE).write_text(f"{path}\n")


def refuse_unwritable(fallback_dir: str, run_dir: Path) -> None:
    """WriteError: nothing can be saved there. Asked before training starts, not when it is needed."""
    place = _own_place(fallback_dir, run_dir)
    try:
        Path(fallback_dir).mkdir(parents=True, exist_ok=True)
        while not os.path.lexists(place):
            place = place.parent
        probe = place / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise WriteError(
            f"checkpoint.fallback_dir={fallback_dir}: cannot write {error.filename or place}: "
            f"{os.strerror(error.errno or 0)}; name a folder that can be written"
        ) from None


def _own_place(fallback_dir: str, run_dir: Path) -> Path:
    """The folder of the run's checkpoints there."""
    return fallback_folder(fallback_dir, run_dir) / folders.CHECKPOINTS


def _places(run_dir: Path, fallback_dir: str | None) -> list[Path]:
    """Folders in which checkpoints of the run may lie that it did not take."""
    places = []
    noted = _noted(run_dir / folders.CHECKPOINTS)
    if noted is not None:
        places.append(noted.path.parent)
    if fallback_dir is not None:
        places.append(_own_place(fallback_dir, run_dir))
    return list(dict.fromkeys(places))


@dataclass(frozen=True)
class Saved:
    """The checkpoints of a run, wherever they were saved."""

    candidates: tuple[folders.CandidateFolder, ...]
    """Every folder that may hold a good one, as folders.candidates lists them; of one step those that were saved
    elsewhere come first: they are the later ones."""
    unlisted: tuple[CheckpointError, ...]
    """Of other places that can't be looked into."""
    lost: folders.CandidateFolder | None
    """What the run folder's note names, newer than all candidates, and is not there."""
    absent: str | None
    """The `fallback_dir` that is not there, so that nobody knows what it held."""

    @property
    def steps(self) -> list[int]:
        """Ascending; nothing is verified."""
        return sorted({candidate.step for candidate in self.candidates})

    def of_step(self, step: int) -> list[folders.CandidateFolder]:
        """The candidates of a step, those that were saved later first."""
        return [candidate for candidate in self.candidates if candidate.step == step]

    @property
    def unseen(self) -> list[str]:
        """Why a newer one than all candidates may be where nobody can look, a line each."""
        if self.unlisted or self.lost is None:
            return [str(error) for error in self.unlisted]
        return [f"{self.lost.path} is not there, in which step {self.lost.step} was saved"]

    def refuse_unseen_newest(self) -> None:
        """CheckpointError: the newest may be where nobody can look. DiskError: where nobody can look now."""
        way_out = "make that place readable"
        if self.candidates:
            way_out += f", or take step {self.candidates[0].step}, the newest that is seen, by its number"
        if self.unseen:
            cls = DiskError if any(isinstance(error, DiskError) for error in self.unlisted) else CheckpointError
            raise cls([f"{line}: the newest checkpoint may be there; {way_out}" for line in self.unseen])


def saved_anywhere(run_dir: Path, fallback_dir: str | None) -> Saved:
    """What there is of a run's checkpoints: all who read one, or go on from one, ask here. Nothing is verified.

    CheckpointError: the run folder's own can't be listed.
    """
    found = []
    unlisted = []
    for place in _places(run_dir, fallback_dir):
        try:
            found += folders.candidates(place)
        except CheckpointError as error:
            unlisted.append(error)
    found += folders.candidates(run_dir / folders.CHECKPOINTS)
    # sorted keeps the order of equals
    found.sort(key=lambda candidate: -candidate.step)
    lost = _noted(run_dir / folders.CHECKPOINTS)
    if lost is not None and (os.path.isdir(lost.path) or any(lost.step <= candidate.step for candidate in found)):
        lost = None
    absent = None
    if fallback_dir is not None and not os.path.lexists(fallback_dir):
        absent = fallback_dir
    return Saved(tuple(found), tuple(unlisted), lost, absent)


def candidates_anywhere(run_dir: Path, fallback_dir: str | None) -> tuple[folders.CandidateFolder, ...]:
    """Those that `saved_anywhere` finds, for who goes on from one. CheckpointError: a place can't be listed."""
    saved = saved_anywhere(run_dir, fallback_dir)
    for error in saved.unlisted:
        raise error
    return saved.candidates


def listed(run_dir: Path, fallback_dir: str | None) -> list[str]:
    """The folders of a run's checkpoints as they are now, for `any_is_gone`. CheckpointError: as saved_anywhere."""
    return [str(candidate.path) for candidate in saved_anywhere(run_dir, fallback_dir).candidates]


def any_is_gone(paths: Sequence[str]) -> bool:
    """Whether one of these is not there any more: moved home, or deleted since there is a newer one."""
    return any(folders.is_gone(Path(path)) for path in paths)


def where_now(run_dir: Path, fallback_dir: str | None, candidate: folders.CandidateFolder) -> folders.CandidateFolder:
    """A checkpoint that was listed before, where it is now; the same where it is nowhere, which who reads it says."""
    if not folders.is_gone(candidate.path):
        return candidate
    for found in saved_anywhere(run_dir, fallback_dir).of_step(candidate.step):
        return found
    return candidate


def looked_up_again(run_dir: Path, fallback_dir: str | None, read: Callable[[], T]) -> T:
    """What `read` gives, which looks for a checkpoint of a run and reads it; once more where that fails and one was
    moved meanwhile, see note "Read while it moves". CheckpointError: as `read`."""
    for _ in range(MOST_LOOKS - 1):
        before = listed(run_dir, fallback_dir)
        try:
            return read()
        except CheckpointError:
            if not any_is_gone(before):
                raise
    return read()


def newest_anywhere(run_dir: Path, fallback_dir: str | None, inspect: Inspect) -> int | None:
    """The step of a run's newest checkpoint that is whole, in its folder or where it was saved elsewhere. Bytes are not
    read. None: there is none. A place that can't be looked into is told where a start looks for what to go on from."""

    def look() -> int | None:
        for candidate in saved_anywhere(run_dir, fallback_dir).candidates:
            _, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
            if not problems:
                return candidate.step
            folders.refuse_gone(candidate.path)
        return None

    return looked_up_again(run_dir, fallback_dir, look)


def path_of_step(run_dir: Path, fallback_dir: str | None, step: int, *, asked: str = "--step ") -> Path:
    """The folder of a step's checkpoint, the later save where there are two. CheckpointError: there is none; `asked` is
    what names the step."""
    saved = saved_anywhere(run_dir, fallback_dir)
    for candidate in saved.of_step(step):
        return candidate.path
    there = "no checkpoint"
    if saved.steps:
        there = f"checkpoints of {', '.join(map(str, saved.steps))}"
    raise CheckpointError([f"{asked}{step}: {run_dir} has {there}", *map(str, saved.unlisted)])


def tell_elsewhere(run_dir: Path, taken: folders.CandidateFolder) -> None:
    """Says on stderr that a run's checkpoint is read which its folder has not taken."""
    if taken.path.parent != run_dir / folders.CHECKPOINTS:
        text = f"step {taken.step} is read from {taken.path}, where it was saved: the run folder has not taken it"
        print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)


def fallback_dir_of(run_dir: Path) -> str | None:
    """`checkpoint.fallback_dir` as a run's spec.json says it, for who has no Spec of the run; None where none does."""
    try:
        return fallback_dir_in(parse_json(read_inside(run_dir, "spec.json", limit=MAX_BYTES)))
    except (OSError, ValueError):
        return None


def fallback_dir_in(spec: object) -> str | None:
    """`checkpoint.fallback_dir` of a Spec or a recipe as plain data; None where it says none, or holds weights alone,
    which are written at once."""
    if not isinstance(spec, dict) or spec.get("holds") == "weights":
        return None
    checkpoint = spec.get("checkpoint")
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("fallback_dir"), str):
        return None
    return checkpoint["fallback_dir"]


def is_own_place(place: Path, fallback_dir: str | None, run_dir: Path) -> bool:
    """Whether checkpoints in a folder of them are this run's to move and to remove, or those of one that it was copied
    from."""
    return fallback_dir is not None and place == _own_place(fallback_dir, run_dir)


@dataclass(frozen=True)
class Adopted:
    """What `adopt` did. For whoever starts the run: `lines` tell what was done, and `left` what stays elsewhere."""

    step: int | None
    """The newest that was moved."""
    lines: tuple[str, ...]
    left: tuple[str, ...] = ()
    place: Path | None = None
    """The folder in which the newest of all stays, since the run folder does not take it; None where it has it."""


def adopt(
    run_dir: Path, spec: CheckpointSpec, inspect: Inspect = no_objections, *, losses: Mapping[int, float] | None = None
) -> Adopted:
    """Moves checkpoints from the fallback folder into the run folder: the newest, where it is newer than all there, and
    those that `spec` keeps beside it, of which the best by `losses`. Others are removed. For who holds the run's lock.

    Of a step that is in both the one in the fallback folder is the later one: a run that goes on, or back, has taken
    home before what was there. But for one that was read then, and is there still: it is removed once nobody does.

    One that the run folder has no room for stays where it is, and so does a damaged one. DiskError: one, here or there,
    can't be read now. WriteError: the newest stays,
    and nothing says where to save what follows.
    """
    home = run_dir / folders.CHECKPOINTS
    noted = _noted(home)
    at_home = whole_steps(home, inspect)
    lines = []
    left_there = []
    stays = None
    moved = []
    if noted is not None and not noted.path.is_dir() and noted.step > max(at_home, default=-1):
        lines.append(f"{noted.path} is not there, in which a checkpoint was saved that this folder had not taken")
    for place in _places(run_dir, spec.fallback_dir):
        is_ours = is_own_place(place, spec.fallback_dir, run_dir)
        # newest first
        left = folders.candidates(place)
        while left:
            candidate = left.pop(0)
            step = candidate.step
            wanted = kept({*at_home, step, *(older.step for older in left)}, spec, losses or {})
            is_later = is_ours and candidate.replaced_by is None and not _is_home(candidate, home)
            if step not in wanted or (step in at_home and not is_later):
                if is_ours:
                    _remove_unless_read(candidate)
                continue
            try:
                manifest, problems = _copied(candidate, inspect, home)
            except WriteError as error:
                is_newest = step > max(at_home, default=-1) and (stays is None or step > stays.step)
                if is_newest and spec.fallback_dir is None:
                    raise
                if is_newest:
                    stays = candidate
                left_there.append(f"step {step} stays where it was saved: {error}")
                continue
            if manifest is None or problems:
                lines.append(f"a checkpoint is not good: {'; '.join(problems)}")
                continue
            at_home.add(step)
            moved.append(step)
            line = f"step {step} was saved in {place}, and is in {home} now"
            if is_ours and not _remove_unless_read(candidate):
                line += "; a later start removes it there"
            lines.append(line)
        if is_ours:
            _remove_empty(place)
    if noted is not None and noted.step <= max(at_home, default=-1):
        with contextlib.suppress(OSError):
            (home / NOTE).unlink()
    place = None if stays is None else stays.path.parent
    return Adopted(max(moved, default=None), tuple(lines), tuple(left_there), place)


def put_aside_from(run_dir: Path, fallback_dir: str | None, first_step: int, reason: str) -> list[int]:
    """Puts checkpoints of `first_step` and behind, wherever they were saved, into a quarantine there: no start is to go
    on from them. -> their steps. WriteError: one can't be moved, or a place can't be looked into."""
    moved = []
    for place in (run_dir / folders.CHECKPOINTS, *_places(run_dir, fallback_dir)):
        try:
            for candidate in folders.candidates(place):
                if candidate.step >= first_step:
                    folders.put_aside(candidate, reason)
                    moved.append(candidate.step)
        except CheckpointError as error:
            raise WriteError(error.problems) from None
        except OSError as error:
            raise write_failure(place, error) from None
    return moved


def _remove_empty(place: Path) -> None:
    """Removes the run's folder in the other place, unless something is in it, and halves of what was removed there."""
    with contextlib.suppress(OSError, CheckpointError):
        folders.remove_hidden(place, "deleted")
    for folder in (place, place.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_home(candidate: folders.CandidateFolder, home: Path) -> bool:
    """Whether the run folder has a checkpoint that lies elsewhere, or a later one of its step: an earlier start has
    moved it home, and left it there since it was read. DiskError: one of the two can't be read now."""
    try:
        there = read_manifest(candidate.path, candidate.step)
        here = read_manifest(home / folders.step_name(candidate.step), candidate.step)
    except DiskError:
        raise
    except CheckpointError:
        return False
    # of two starts the later one has the higher token
    return there.digest == here.digest or there.token < here.token


def _remove_unless_read(candidate: folders.CandidateFolder) -> bool:
    """Removes a checkpoint that nobody reads. -> whether it is gone."""
    with contextlib.suppress(OSError), unless_held(candidate.path) as is_free:
        if is_free:
            folders.delete(candidate.path, candidate.step, candidate.replaced_by or 0)
            return True
    return False


def _noted(home: Path) -> folders.CandidateFolder | None:
    """What the note says; None where there is none, or it names no checkpoint. DiskError: it can't be read now."""
    try:
        text = read_inside(home, NOTE, limit=_NOTE_LIMIT).decode(errors="replace").strip()
    except OSError as error:
        failure = read_failure(home / NOTE, error)
        if isinstance(failure, DiskError):
            # without it an older checkpoint would be taken for the newest
            raise failure from None
        return None
    path = Path(text)
    return folders.parse_candidate(path.parent, path.name)


def _copied(candidate: folders.CandidateFolder, inspect: Inspect, home: Path) -> tuple[Manifest | None, list[str]]:
    """Copies a good checkpoint home. -> as `examine`. WriteError: it did not arrive."""
    manifest, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
    if manifest is None or problems:
        return manifest, problems
    # before its bytes are read, which takes minutes
    _refuse_no_room(candidate, manifest, home)
    manifest, problems = examine(candidate.path, candidate.step, deep=True, inspect=inspect)
    if manifest is not None and not problems:
        _copy(candidate, manifest, home)
    return manifest, problems


def _refuse_no_room(candidate: folders.CandidateFolder, manifest: Manifest, home: Path) -> None:
    free = free_bytes(home)
    if manifest.bytes > free:
        raise WriteError(
            f"{candidate.path} belongs into {home}, which has no room for it: need {manifest.bytes:,} bytes, {free:,} "
            "bytes are free; make room there, and the next start moves it"
        )


def _copy(candidate: folders.CandidateFolder, manifest: Manifest, home: Path) -> None:
    """Copies a checkpoint home as it would be saved there. WriteError: it did not arrive."""
    target = home / folders.step_name(candidate.step)
    saving = home / folders.hidden_name("saving", candidate.step, manifest.generation)
    try:
        home.mkdir(parents=True, exist_ok=True)
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
            raise WriteError([f"{candidate.path} came into {home} with other bytes", *problems])
        if os.path.lexists(target):
            # it is not whole, or an earlier one of the same step
            folders.put_aside(folders.CandidateFolder(candidate.step, target), "it was saved again elsewhere")
        rename_durably(saving, target)
    except OSError as error:
        raise write_failure(home, error, need=manifest.bytes) from None
    finally:
        if os.path.lexists(saving):
            with contextlib.suppress(OSError):
                remove_tree(saving)
