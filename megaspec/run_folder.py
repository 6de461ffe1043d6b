"""The folder of a run: recipe.json, target.json, prediction.json and spec.json, made, changed and read. Torch-free.

A run's folder may come from somebody else. The folder itself may be reached through links, below it none is followed.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from megaspec.checkpoint.examine import Inspect, examine, read_manifest
from megaspec.checkpoint.fallback import (
    candidates_anywhere,
    fallback_dir_of,
    looked_up_again,
    newest_anywhere,
    path_of_step,
    saved_anywhere,
    where_now,
)
from megaspec.checkpoint.files import DiskError, read_failure, sync_folder
from megaspec.checkpoint.folders import CHECKPOINTS, QUARANTINE, CandidateFolder, refuse_gone, step_name
from megaspec.checkpoint.format import FORMAT_VERSION, MANIFEST, Manifest
from megaspec.checkpoint.in_use import held_for_reading
from megaspec.checkpoint.lock import LOCK_FOLDER, RunLock
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import (
    COMMAND_LINE,
    CheckpointError,
    MegaspecError,
    Problem,
    RecipeError,
    RunLockedError,
    WriteError,
    printable,
)
from megaspec.core.faults import failpoint
from megaspec.core.frozen import AUTO
from megaspec.core.problems import one_of, show
from megaspec.core.regular_files import (
    check_kinds,
    disk_failure,
    make_folder_inside,
    open_inside,
    raise_disk_failure,
    read_inside,
)
from megaspec.data.files import is_no_room, publish, write_atomically, write_error
from megaspec.data.kept_room import ROOM, keep_room, write_into_room
from megaspec.data.spec import IndexedSpec
from megaspec.estimate.target import Target
from megaspec.hf.companions import FOLDER as TOKENIZER_FOLDER
from megaspec.hf.companions import kept_companions
from megaspec.launcher.attempts import ATTEMPTS
from megaspec.launcher.devices import DEVICES
from megaspec.launcher.exit_file import EXIT_FILE, read_exit
from megaspec.launcher.stop import before_leaving
from megaspec.launcher.suspects import AVOIDED, FAILED_HOSTS, SUSPECTS
from megaspec.log.environment import FILE_NAME as ENVIRONMENT
from megaspec.log.prediction import FILE_NAME as PREDICTION
from megaspec.log.remote import REMOTE_RUNS, SERVICE_FOLDERS, hand_down
from megaspec.log.sinks import METRICS, TENSORBOARD
from megaspec.plan.predict import predict
from megaspec.plugins import demand
from megaspec.profiling.spec import PROFILES
from megaspec.recipe import Recipe
from megaspec.rules.belonging import (
    began_as_fork,
    fork_again,
    holds_weights_alone,
    last_of_weights,
    objections,
    other_place,
)
from megaspec.rules.checkpoint_rules import APART, inside_the_run, is_inside
from megaspec.spec import Spec
from megaspec_kernels.gone import GoneKernel, gone_kernels, without_gone

RECIPE, TARGET, SPEC = "recipe.json", "target.json", "spec.json"
# Stands in a fork's folder while it is made: {"source": folder of the run that it is from, "step": of its checkpoint}.
FORKING = "forking.json"
# What may be there before spec.json makes it a run: what an interrupted `train` leaves, and who may use which devices.
_UNFINISHED = ("lock", RECIPE, TARGET, PREDICTION, TOKENIZER_FOLDER, DEVICES, ROOM)
# What a supervisor, and who looks after its machine, keep beside it.
SUPERVISED = (ATTEMPTS, AVOIDED, DEVICES, FAILED_HOSTS, SUSPECTS)
LOGS = "logs"
_COPY_BYTES = 16 << 20
_FORKING_LIMIT = 1 << 16


@dataclass(frozen=True)
class SavedRun:
    """What a run folder says about its run."""

    folder: Path
    recipe: dict[str, Any]
    """The recipe as it was composed."""
    spec: Spec
    """With the folder where it is now as run_dir."""
    gone: tuple[GoneKernel, ...] = ()
    """Implementations that it names and this version does not have; the recipe says auto there, the Spec a plain one.
    Who starts the run again has to name others, see `refuse_gone_kernels`."""


# Runs in a folder that an error names.
_MOST_NEAR = 3


def is_run(folder: Path) -> bool:
    """True for a folder in which a run was made. Whether its files are what they should be is for `read_run` to say."""
    # room that is kept in a run's folder is called as the files that will be written over it
    if folder.name == ROOM:
        return False
    return _is_there(folder / SPEC) and not _is_there(folder / FORKING)


def _is_there(path: Path) -> bool:
    """WriteError: a failing disk doesn't say. Who took that for a no would make a run where one is, or find none."""
    try:
        os.lstat(path)
    except OSError as error:
        raise_disk_failure(error)
        return False
    except ValueError:
        # a NUL in it, or what no encoding has
        return False
    return True


def refuse_unfinished_fork(folder: Path) -> None:
    """Raises for a folder in which a fork was begun and is not whole.

    RunLockedError: it is being made. CheckpointError: that was interrupted. RecipeError: as `refuse_links`.
    """
    if not _is_there(folder / FORKING):
        return
    refuse_links(folder)
    source, what = _begun_fork(folder)
    if RunLock(folder).is_held():
        raise RunLockedError(f"run_dir={folder} is no run yet: {what} is being made there; wait until it is")
    text = f"run_dir={folder} is no run: {what} was interrupted while it was made there"
    raise CheckpointError(f"{text}; delete {folder} and fork again: megaspec resume {source} --fork {folder}")


def _begun_fork(folder: Path) -> tuple[str, str]:
    """The folder of the run that a fork is made from, and the fork in words, as far as its marker says."""
    try:
        raw = json.loads(read_inside(folder, FORKING, limit=_FORKING_LIMIT))
        return str(raw["source"]), f"a fork of {raw['source']} at step {raw['step']}"
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        # cut off, or somebody else's: that it is there is enough
        return "SOURCE", "a fork"


def refuse_links(folder: Path) -> None:
    """RecipeError: a file or folder that a run reads or writes is there as a link, FIFO or device.

    Looked at before anything is locked, read or written; who opens a file looks again.
    """
    files = (SPEC, RECIPE, TARGET, PREDICTION, ENVIRONMENT, METRICS, EXIT_FILE, REMOTE_RUNS, *SUPERVISED)
    checkpoints = (CHECKPOINTS, f"{CHECKPOINTS}/{QUARANTINE}")
    folders = (*checkpoints, LOCK_FOLDER, LOGS, PROFILES, ROOM, TENSORBOARD, TOKENIZER_FOLDER, *SERVICE_FOLDERS)
    try:
        check_kinds(folder, files=files, folders=folders)
        if (folder / LOGS).is_dir():
            rank_logs = [name for name in os.listdir(folder / LOGS) if name.startswith("rank-")]
            check_kinds(folder / LOGS, files=rank_logs)
    except OSError as error:
        raise refused(error) from None


def refused(error: OSError) -> RecipeError | WriteError:
    """What to raise for a file of a run's folder that can't be opened as one."""
    failure = disk_failure(error)
    if failure is not None:
        return failure
    name = Path(error.filename or "").name
    way_out = "put a file of its own in its place"
    if name in (CHECKPOINTS, LOGS, TENSORBOARD):
        way_out = f"for {name} on another disk set run_dir there, or reach the whole folder of the run through a link"
    text = f"{error.filename} {error.strerror}: a run's folder holds its own files; {way_out}"
    return RecipeError([Problem("", text, code="run-damaged")])


def make_folder(folder: Path) -> None:
    """A new run folder, or an empty one that is there.

    RecipeError: it is in use. WriteError: it can't be made. Others: as `refuse_unfinished_fork`.
    """
    refuse_unfinished_fork(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = all(f.name in _UNFINISHED or f.name.endswith(".tmp") for f in folder.iterdir())
    except FileExistsError:
        is_empty = False
    except OSError as error:
        raise write_error(folder, error) from None
    refuse_links(folder)
    if not is_empty:
        what = "exists and is not empty"
        if is_run(folder):
            what = f"holds a run; megaspec resume {folder} goes on with it"
            if has_ended_well(folder):
                what = f"holds a finished run; megaspec resume {folder} train.steps=N trains it to step N"
        text = f"run_dir={folder} {what}; choose another run_dir or name"
        raise RecipeError([Problem("run_dir", text, code="run-exists")])


def refuse_place_in_a_run(name: str, value: str, place: Path, run_dir: Path) -> None:
    """RecipeError: checkpoints would be saved or copied, by `checkpoint.name=value`, into the folder of this run, or
    into that of another. `place`: the folder that is meant. Links are followed."""
    place = Path(os.path.realpath(place))
    own = os.path.realpath(run_dir)
    key = f"checkpoint.{name}"
    if is_inside(str(place), own):
        raise RecipeError([Problem(key, inside_the_run(name, value, str(run_dir)), code=APART)])
    below = None
    for folder in (place, *place.parents):
        # where copies are there is a spec.json, too, but nobody locks it; other runs' may lie beside its checkpoints
        is_in_checkpoints = is_run(folder) and below is not None and below.name == CHECKPOINTS
        if is_in_checkpoints or _is_locked_run(folder):
            text = f"{key}={value} is in {folder}, the folder of another run; set it to one outside of all runs, or "
            raise RecipeError([Problem(key, f"{text}drop it", code=APART)])
        below = folder


def _is_locked_run(folder: Path) -> bool:
    """Whether a run was started in a folder."""
    return is_run(folder) and os.path.lexists(folder / LOCK_FOLDER)


def write_run(folder: Path, recipe: Recipe, target: Target, spec: Spec) -> None:
    """Writes the four files, each whole or not at all, spec.json last: with it the run exists. Raises WriteError.

    One that says the same already stays as it is: a run that starts again on a full disk writes nothing anew. What was
    found of the machine and predicted from it may differ a little in every start; where a run goes on unchanged and
    there is no room for these two, that is told, and those of an earlier start stay. A run that saves elsewhere when
    its disk is full keeps room here to change as well: for another layout, on the devices that are left.
    """
    texts = {}
    for name, content in ((RECIPE, recipe), (TARGET, target), (PREDICTION, predict(spec, target)), (SPEC, spec)):
        texts[name] = (content.model_dump_json(indent=1) + "\n").encode()
    goes_on = _says(folder, SPEC, texts[SPEC])
    for name, text in texts.items():
        if _says(folder, name, text):
            continue
        try:
            write_into_room(folder, name, text)
        except WriteError as error:
            may_stay = name in (TARGET, PREDICTION) and goes_on and os.path.lexists(folder / name)
            if not may_stay or not is_no_room(error):
                raise
            told = f"megaspec: {error}; that of an earlier start stays, and the run goes on"
            print(printable(told), file=sys.stderr, flush=True)
    if other_place(spec) is not None:
        keep_room(folder, texts)


def _says(folder: Path, name: str, text: bytes) -> bool:
    """Whether a file of a run's folder holds just that."""
    try:
        return read_inside(folder, name, limit=len(text)) == text
    except OSError:
        return False


def _where_a_run_is(folder: Path) -> str:
    """What to give in place of a folder that holds no run: one near it, where there is one."""
    inside = sorted(path.parent for path in folder.glob(f"*/{SPEC}") if is_run(path.parent))
    if inside:
        return f"give one of the runs in it: {one_of(inside[:_MOST_NEAR])}"
    near = [Path("runs", folder.name), *folder.parents]
    for other in near:
        if is_run(other) and other != Path():
            return f"did you mean {other}?"
    if folder.is_dir():
        return "give the folder that `megaspec train` named"
    return "there is no such folder"


def refuse_no_run(folder: Path) -> None:
    """RecipeError: a folder holds no run. Others: `refuse_unfinished_fork`."""
    refuse_unfinished_fork(folder)
    if not is_run(folder):
        hint = _where_a_run_is(folder)
        raise RecipeError([Problem("", f"{folder} holds no run (no {SPEC}); {hint}", code="run-missing")])


def read_run(folder: Path, *, allows_gone: bool = False) -> SavedRun:
    """The run of a folder. RecipeError: there is none, its files are damaged, or, unless `allows_gone`, it names
    implementations that this version does not have. Others: `refuse_unfinished_fork`."""
    refuse_no_run(folder)
    refuse_links(folder)
    recipe = _read_json(folder, RECIPE)
    saved = _read_json(folder, SPEC)
    _refuse_other_format(folder, saved)
    # before the Spec is read: without its plugins its fields are unknown
    demand(saved, str(folder))
    # one that a recipe names its Spec names as well, unless somebody wrote it there
    gone = tuple(dict.fromkeys((*gone_kernels(saved), *gone_kernels(recipe))))
    if gone and not allows_gone:
        # of weights alone there is nothing to go on with
        command = "eval" if saved.get("holds") == "weights" else "resume"
        raise RecipeError(_gone_problems(folder, gone, str(saved.get("device")), command))
    recipe = without_gone(recipe, instead=AUTO)
    try:
        spec = Spec.model_validate_json(json.dumps(without_gone(saved) | {"run_dir": str(folder)}))
    except (ValidationError, AssertionError) as error:
        raise _damaged(folder / SPEC, _first_of(error)) from None
    has_blend = isinstance(spec.data, IndexedSpec) and isinstance(recipe.get("data"), dict)
    if "data_order" not in saved and has_blend:
        # The Spec was brought up to today's rules as it was read; the recipe says its blend in the same words.
        recipe["data"]["blend"] = [part.model_dump(mode="json") for part in spec.data.blend]
    return SavedRun(folder, recipe, spec, gone)


def refuse_gone_kernels(saved: SavedRun, recipe: Recipe, origins: Mapping[str, str], *, command: str) -> None:
    """RecipeError: a run names implementations that this version does not have, and the recipe with which `command`
    starts it names no others."""
    left = []
    for one in saved.gone:
        if getattr(recipe.kernels, one.operation) == AUTO and origins.get(one.key) != COMMAND_LINE:
            left.append(one)
    if left:
        raise RecipeError(_gone_problems(saved.folder, left, saved.spec.device, command))


def _gone_problems(folder: Path, gone: Sequence[GoneKernel], device: str, command: str) -> list[Problem]:
    words = " ".join(f"{one.key}={one.instead(device)}" for one in gone)
    problems = []
    for one in gone:
        text = f"{folder}: {one.key}={show(one.name)} is gone, this version has {one_of(one.names)};"
        text += f" say which: megaspec {command} {folder} {words}"
        problems.append(Problem(one.key, text, code="run-kernel"))
    return problems


def refuse_weights_alone(folder: Path, run: Spec) -> None:
    """RecipeError: the run was imported, or taken from checkpoints: there is nothing to go on with."""
    if run.holds != "weights":
        return
    text = f"{folder} holds weights alone, no optimizer and no place in a training order; start a run from"
    text += f" them: megaspec train recipe=NAME init.load={folder}"
    raise RecipeError([Problem("", text, code="run-weights")])


def refuse_last_of_weights(folder: Path, run: Spec, steps: int) -> None:
    """RecipeError: a run is to be trained to more `steps` than those after which it saved weights alone."""
    for candidate in candidates_anywhere(folder, run.checkpoint.fallback_dir):
        manifest, problems = examine(candidate.path, candidate.step, deep=False, inspect=own_checkpoint(run))
        if manifest is None or problems:
            continue
        if holds_weights_alone(manifest) and manifest.step < steps:
            text = f"train.steps={steps}: step {manifest.step} of {folder} {last_of_weights(folder)}"
            raise RecipeError([Problem("train.steps", text, code="run-weights")])
        return


def keep_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes tokenizer files into a run's folder, each whole or not at all. Raises WriteError."""
    if not files:
        return
    try:
        make_folder_inside(folder, TOKENIZER_FOLDER)
    except OSError as error:
        raise write_error(folder / TOKENIZER_FOLDER, error) from None
    for name, content in files.items():
        write_atomically(folder / TOKENIZER_FOLDER / name, [content])


def read_target(folder: Path) -> Target | None:
    """The machine that a run was resolved for; None where nothing says so. RecipeError: its file is damaged."""
    if not os.path.lexists(folder / TARGET):
        return None
    try:
        return Target.model_validate_json(json.dumps(_read_json(folder, TARGET)))
    except ValidationError as error:
        raise _damaged(folder / TARGET, _first_of(error)) from None


def own_checkpoint(run: Spec) -> Inspect:
    """What a run has against a checkpoint: see belonging.py."""
    return partial(objections, run=run)


def newest_step(folder: Path) -> int:
    """The step of a run's newest checkpoint that is whole and its own, wherever it was saved; 0 when there is none.
    Bytes are not read."""
    if not is_run(folder):
        return 0
    spec = read_run(folder, allows_gone=True).spec
    return newest_anywhere(folder, spec.checkpoint.fallback_dir, own_checkpoint(spec)) or 0


def saved_steps(run: SavedRun) -> list[int]:
    """Steps of a run's checkpoints, wherever they were saved, ascending; nothing is verified. CheckpointError: there is
    none."""
    saved = saved_anywhere(run.folder, other_place(run.spec))
    if not saved.candidates:
        saved.refuse_unseen_newest()
        text = f"{run.folder}: no checkpoint was saved there yet; megaspec resume {run.folder} trains it"
        raise CheckpointError(text)
    return saved.steps


def refuse_no_checkpoint(run: SavedRun, step: int | None) -> None:
    """CheckpointError: a run has no checkpoint, or none of that step. Asked before ranks start; nothing is verified."""
    saved_steps(run)
    if step is not None:
        path_of_step(run.folder, other_place(run.spec), step)


def has_ended_well(folder: Path) -> bool:
    """Whether the last start of a run ended with all its steps done, all its sinks and samples written."""
    last = read_exit(folder)
    return last is not None and last.code == 0


def saved_in_words(folder: Path) -> str:
    """What a run would go on from that ended just now: only a checkpoint that is whole is called saved.

    Bytes are not read: a scheduler waits for this job to end, and a large checkpoint takes minutes. Who resumes reads
    them.
    """
    step = newest_step(folder)
    if step == 0 and not _has_saved(folder):
        return f"no step was saved yet; megaspec resume {folder} goes on"
    if step == 0:
        return f"no good checkpoint is left; megaspec checkpoint verify {folder} says why"
    return f"step {step} is saved; megaspec resume {folder} goes on"


def _has_saved(folder: Path) -> bool:
    """Whether there is a checkpoint of a run, whole or not."""
    fallback_dir = None
    if is_run(folder):
        fallback_dir = read_run(folder, allows_gone=True).spec.checkpoint.fallback_dir
    return bool(saved_anywhere(folder, fallback_dir).candidates)


def refuse_lost_fork(folder: Path, run: Spec) -> None:
    """CheckpointError: the run began as a fork, and none of its checkpoints is whole. Bytes are the ranks' affair."""
    if not began_as_fork(run):
        return
    damage: list[str] = []
    for candidate in candidates_anywhere(folder, run.checkpoint.fallback_dir):
        _, problems = examine(candidate.path, candidate.step, deep=False, inspect=own_checkpoint(run))
        if not problems:
            return
        damage += problems
    raise CheckpointError([f"{folder / CHECKPOINTS}: no good checkpoint is left; {fork_again(run)}", *damage])


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint that is good in every byte, and what was found in the newer ones."""

    candidate: CandidateFolder
    manifest: Manifest
    passed_over: tuple[str, ...]


def newest_good(source: Path, run: Spec) -> GoodCheckpoint:
    """The newest good checkpoint of a run, wherever it was saved, for a fork. CheckpointError: there is none, or a
    place of them can't be listed."""
    return looked_up_again(source, run.checkpoint.fallback_dir, partial(_newest_good, source, run))


def _newest_good(source: Path, run: Spec) -> GoodCheckpoint:
    saved = saved_anywhere(source, run.checkpoint.fallback_dir)
    for error in saved.unlisted:
        raise error
    damage = saved.unseen
    for candidate in saved.candidates:
        manifest, problems = examine(candidate.path, candidate.step, deep=True, inspect=own_checkpoint(run))
        if manifest is not None and not problems:
            return GoodCheckpoint(candidate, manifest, tuple(damage))
        refuse_gone(candidate.path)
        damage += problems
    what = "; ".join(damage) or "no checkpoint was saved there"
    raise CheckpointError(f"{source}: nothing to fork from: {what}")


def make_fork(place: Path, source: Path, good: GoodCheckpoint, recipe: Recipe, target: Target, spec: Spec) -> None:
    """Makes a fork of `source` in a folder whose lock is held: the checkpoint that it begins with, then its files.

    FORKING stands there from before the first byte until all is on the disk, so that what an interruption leaves is
    never taken for a run. Where it fails or is asked to stop, the folder is left for another fork. CheckpointError,
    WriteError: as `copy_checkpoint` and `write_run`.
    """
    marker = place / FORKING
    begun = {"source": str(source), "step": good.manifest.step}
    write_atomically(marker, [json.dumps(begun).encode() + b"\n"])
    with before_leaving(partial(_undo_fork, place)):
        try:
            # spec.json, which write_run writes last, makes it a run: what the run begins with is there before it
            fallback_dir = fallback_dir_of(source)
            looked_up_again(source, fallback_dir, partial(_copy_good, source, fallback_dir, good, place))
            failpoint("fork_copied")
            keep_companions(place, kept_companions(source))
            _hand_down(source, place)
            write_run(place, recipe, target, spec)
        except (MegaspecError, KeyboardInterrupt):
            _undo_fork(place)
            raise
        failpoint("fork_written")
        try:
            marker.unlink()
            sync_folder(place)
        except OSError as error:
            raise write_error(marker, error) from None


def _hand_down(source: Path, place: Path) -> None:
    """The ids by which services know the run that a fork is from. RecipeError: their file is damaged."""
    try:
        hand_down(source, place)
    except OSError as error:
        raise write_error(Path(error.filename or place), error) from None
    except ValueError as error:
        raise RecipeError([Problem("", str(error), code="run-damaged")]) from None


def _undo_fork(place: Path) -> None:
    """Makes the folder of an unfinished fork as good as new. Where that fails, the marker stays and says so."""
    if not os.path.lexists(place / FORKING):
        return
    with suppress(OSError):
        (place / SPEC).unlink(missing_ok=True)
        for name in (CHECKPOINTS, TOKENIZER_FOLDER):
            if os.path.lexists(place / name):
                shutil.rmtree(place / name)
        (place / REMOTE_RUNS).unlink(missing_ok=True)
        # last: while anything is left, it says that this is no run
        (place / FORKING).unlink()


def _copy_good(source: Path, fallback_dir: str | None, good: GoodCheckpoint, place: Path) -> None:
    """Copies what a fork begins with, from where it is now. CheckpointError, WriteError: as `copy_checkpoint`."""
    candidate = where_now(source, fallback_dir, good.candidate)
    with held_for_reading(candidate.path):
        if read_manifest(candidate.path, candidate.step).digest != good.manifest.digest:
            raise CheckpointError(f"{candidate.path} was saved again meanwhile; nothing was copied")
        copy_checkpoint(candidate, good.manifest, place)


def copy_checkpoint(candidate: CandidateFolder, manifest: Manifest, target: Path) -> None:
    """Copies what a manifest lists into another run's folder, whole or not at all; nothing else that lies beside it.

    CheckpointError: it is gone, or a file of it has become a link. WriteError: no room.
    """
    place = target / CHECKPOINTS / step_name(candidate.step)
    incoming = Path(CHECKPOINTS, ".incoming")
    # the manifest last, as a save writes it
    names = [file.name for file in manifest.files]
    names.append(MANIFEST)
    try:
        make_folder_inside(target, CHECKPOINTS)
        make_folder_inside(target, incoming)
        for name in names:
            _copy(candidate.path, name, target, incoming / name)
            failpoint("fork_file_copied")
        publish(target / incoming, place)
    except OSError as error:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise write_error(place, error, manifest.bytes) from None
    except CheckpointError:
        shutil.rmtree(place.parent, ignore_errors=True)
        raise


def _copy(checkpoint: Path, name: str, target: Path, new: Path) -> None:
    """One file, to the disk. CheckpointError: it can't be read as a file. OSError: the copy can't be written."""
    try:
        # a name below the folder of checkpoints, so that the checkpoint itself is no link either
        fd = open_inside(checkpoint.parent, Path(checkpoint.name, name))
    except OSError as error:
        raise _not_copied(Path(error.filename), error) from None
    with open(fd, "rb") as reader:
        fd = open_inside(target, new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(fd, "wb") as writer:
            while block := _read_block(reader, checkpoint / name):
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())


def _read_block(reader: BinaryIO, path: Path) -> bytes:
    try:
        return reader.read(_COPY_BYTES)
    except OSError as error:
        raise _not_copied(path, error) from None


def _not_copied(path: Path, error: OSError) -> CheckpointError:
    """DiskError: it can't be read now."""
    failure = read_failure(path, error)
    if isinstance(failure, DiskError):
        return failure
    return CheckpointError(f"{path} {error.strerror}; nothing was copied")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = parse_json(read_inside(folder, name, limit=MAX_BYTES))
    except OSError as error:
        raise_disk_failure(error)
        raise _unreadable(folder / name, error.strerror) from None
    except ValueError as error:
        raise _unreadable(folder / name, error) from None
    if not isinstance(content, dict):
        raise _damaged(folder / name, "it holds no object")
    return content


def _unreadable(path: Path, why: object) -> RecipeError:
    return RecipeError([Problem("", f"{path} can't be read: {why}", code="run-damaged")])


def _first_of(error: ValidationError | AssertionError) -> str:
    """The first thing that is wrong, and where it stands."""
    if isinstance(error, AssertionError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _refuse_other_format(folder: Path, saved: dict[str, Any]) -> None:
    """RecipeError: another version of the program began the run, and its Spec means something else to this one."""
    # files of version 1 don't say theirs
    version = saved.get("format_version", 1)
    if version == FORMAT_VERSION:
        return
    text = f"{folder / SPEC}: format_version={version}, this program reads {FORMAT_VERSION}; go on with the program"
    text += f" that began the run ({ENVIRONMENT} beside it says which), or start a new run with megaspec train"
    raise RecipeError([Problem("", text, code="run-format")])


def _damaged(path: Path, what: str) -> RecipeError:
    return RecipeError([Problem("", f"{path} is damaged: {what}", code="run-damaged")])
