"""The checkpoints of one run: saved whole or not at all, verified before use, the newest good one taken.

The store knows names, rectangles and JSON; what they mean is the runtime's affair. What a crash may leave stands in
folders.py.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megaspec.checkpoint import folders
from megaspec.checkpoint.codec import encode, encode_json, not_whole
from megaspec.checkpoint.comm import Comm, on_first, together
from megaspec.checkpoint.examine import Inspect, examine, find_damage, no_objections, read_manifest
from megaspec.checkpoint.files import (
    UnreadableError,
    free_bytes,
    remove_tree,
    rename_durably,
    sync_folder,
    write_durably,
    write_failure,
)
from megaspec.checkpoint.format import (
    CHUNK_BYTES,
    LARGEST_CHUNK,
    MANIFEST,
    Manifest,
    StoredFile,
    StoredTensor,
    file_name,
)
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.shard import DTYPE_NAMES, SavedPiece, plan_shard, write_shard
from megaspec.core.errors import CheckpointError, WriteError
from megaspec.core.faults import failpoint

T = TypeVar("T")

# Where no good checkpoint is left of a run that may as well begin again.
START_ANEW = "restore one from a backup or remove the folder to start anew"


@dataclass(frozen=True)
class Findings:
    """What speaks against a checkpoint, a line each."""

    damage: list[str]
    objections: list[str] = field(default_factory=list)


# Where a test may kill a process: each of these is passed to core.faults.failpoint by this package.
FAULT_POINTS = (
    "save_started",
    "before_chunk_write",
    "after_shard_write",
    "after_shard_sync",
    "before_manifest",
    "after_manifest",
    "before_set_aside",
    "after_set_aside",
    "after_publish",
    "after_cleanup",
    "mid_delete",
    "mid_quarantine",
)


class Store:
    """Checkpoints under `run_dir/checkpoints`.

    `lock`, on rank 0 of a job that writes, is the run's lock: it is asked before each change, and what an earlier
    holder had begun to save is removed here, so that it can't be published any more. Without a lock the store still
    saves, for one's own loops and tests; nothing then keeps a second writer out.
    """

    def __init__(self, run_dir: Path | str, *, lock: RunLock | None = None, chunk_bytes: int = CHUNK_BYTES):
        assert 8 <= chunk_bytes <= LARGEST_CHUNK, f"chunk_bytes={chunk_bytes} must be 8 to {LARGEST_CHUNK}"
        assert chunk_bytes % 8 == 0, f"chunk_bytes={chunk_bytes} must be a multiple of 8"
        self.folder = Path(run_dir) / folders.CHECKPOINTS
        self._lock = lock
        self._chunk_bytes = chunk_bytes
        self._generation = 0
        self._published: int | None = None
        if lock:
            self._writing(lambda: folders.remove_hidden(self.folder, "saving", "deleted"))

    def steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending; nothing is verified."""
        return sorted({c.step for c in folders.candidates(self.folder) if c.replaced_by is None})

    def save(
        self, step: int, pieces: Sequence[SavedPiece], *, spec: dict[str, Any], state: dict[str, Any], comm: Comm
    ) -> Path:
        """Save the pieces of all ranks as the checkpoint of `step` and publish it. Every rank of `comm` calls this.

        `spec` and `state` are JSON objects, taken from rank 0. Returns the folder. An earlier checkpoint of the same
        step stays good until this one is published. Raises WriteError and RunLockedError, on every rank when it happens
        on any; the earlier checkpoints are then as they were. Mistakes of the caller: AssertionError when the pieces
        leave out or repeat elements, TypeError or ValueError for what JSON has no form of (NaN).
        """
        needs = together(comm, lambda: plan_shard(pieces, metadata={}).bytes)
        begun = on_first(comm, lambda: self._begin(step, sum(needs), spec, state))
        saving = self.folder / begun["name"]
        try:
            # every rank's file is on the disk before rank 0 writes the manifest that names it
            entries = together(comm, lambda: self._write_shard(saving, begun, pieces, comm.rank, needs[comm.rank]))
            on_first(comm, lambda: self._publish(saving, step, begun["generation"], entries, spec, state))
        finally:
            if comm.rank == 0 and os.path.lexists(saving):
                # What can't be removed now is removed when the run is opened again.
                with contextlib.suppress(OSError):
                    remove_tree(saving)
        return self.folder / folders.step_name(step)

    def newest_good(
        self, comm: Comm, *, repair: bool = True, inspect: Inspect = no_objections, way_out: str = START_ANEW
    ) -> Reader | None:
        """Open the newest checkpoint that is good in every byte and that `inspect` has nothing against; ranks share the
        work. None when none was saved.

        `repair`: put bad ones into quarantine and finish what a crash interrupted; to be false in a process that does
        not hold the run's lock. What `inspect` objects to goes into quarantine once a good one is found: where there is
        none, the fault may lie in the run's own files, and everything stays. Raises CheckpointError when there is none,
        saying what was found in each and the `way_out`, and when this machine or version can't read one.
        """
        found: dict[str, str] = {}
        moved: dict[str, str] = {}
        to_put_aside: list[tuple[folders.CandidateFolder, str]] = []
        names = on_first(comm, lambda: [c.path.name for c in folders.candidates(self.folder)])
        for name in names:
            candidate = self._candidate(name)
            findings = self._look_at(candidate, comm, inspect)
            if not findings.damage and not findings.objections:
                # First, since one of them may stand where the good one has to go.
                while to_put_aside:
                    other, reason = to_put_aside.pop(0)
                    moved[other.path.name] = self._put_aside(other, reason, comm)
                try:
                    reader = self._open_good(candidate, comm, repair)
                except UnreadableError:
                    raise
                except CheckpointError as error:
                    # It was removed, or damaged, after it was verified.
                    findings = Findings(damage=[str(error)])
                else:
                    reader.passed_over = tuple(_listed(found, moved))
                    return reader
            reason = "\n".join(findings.damage or findings.objections)
            found[name] = reason
            if repair and findings.damage:
                moved[name] = self._put_aside(candidate, reason, comm)
            elif repair:
                to_put_aside.append((candidate, reason))
        put_aside_before = on_first(comm, lambda: folders.quarantined(self.folder))
        if not found:
            # what an earlier start has put aside was saved, too
            for name, reason in put_aside_before.items():
                found[f"{folders.QUARANTINE}/{name}"] = reason
        if not found:
            return None
        lines = "\n".join(_listed(found, moved)).split("\n")
        raise CheckpointError([f"{self.folder}: no good checkpoint is left; {way_out}", *lines])

    def open(self, step: int, comm: Comm) -> Reader:
        """Verify and open the checkpoint of one step. Raises CheckpointError; nothing is moved."""
        path = self.folder / folders.step_name(step)
        problems = self._verify(path, step, comm)
        if problems:
            raise CheckpointError(problems)
        return open_together(path, comm)

    def prune(self, keep: int, *, inspect: Inspect = no_objections) -> list[int]:
        """Remove all but the newest `keep` checkpoints; for rank 0, after a save. Returns the steps that were removed.

        Counts only those whose manifest and sizes are right and that `inspect` has nothing against; the others, and
        what this store published last, stay. Raises WriteError.
        """
        assert keep >= 1, f"keep={keep} must be at least 1"
        if self._lock:
            self._lock.check()
        # newest first
        whole = []
        for candidate in folders.candidates(self.folder):
            manifest, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
            if candidate.replaced_by is None and manifest and not problems:
                whole.append((candidate, manifest.generation))
        removed = []
        for candidate, generation in whole[keep:]:
            if candidate.step == self._published:
                continue
            self._writing(partial(folders.delete, candidate.path, candidate.step, generation))
            removed.append(candidate.step)
        return removed

    def _candidate(self, name: str) -> folders.CandidateFolder:
        found = folders.parse_candidate(self.folder, name)
        assert found, f"{name} is no name of a checkpoint"
        return found

    def _verify(self, path: Path, step: int, comm: Comm) -> list[str]:
        """What is wrong with a checkpoint, on every rank the same; each rank checks its share of the bytes."""

        return self._look_at(folders.CandidateFolder(step, path), comm, no_objections).damage

    def _look_at(self, candidate: folders.CandidateFolder, comm: Comm, inspect: Inspect) -> Findings:
        """What speaks against a checkpoint, on every rank the same; each rank checks its share of the bytes. `inspect`
        is asked first: what it objects to needs no reading."""
        path = candidate.path

        def look_at_share() -> dict[str, list[str]]:
            try:
                manifest = read_manifest(path, candidate.step)
                objections = [f"{path / MANIFEST}: {line}" for line in inspect(manifest)]
                if objections:
                    return {"damage": [], "objections": objections}
                damage = find_damage(path, manifest, part=comm.rank, parts=comm.size)
            except UnreadableError:
                raise
            except CheckpointError as error:
                return {"damage": [str(error)], "objections": []}
            return {"damage": damage, "objections": []}

        # ranks find the same in the manifest: dicts keep the order and tell each line once
        damage: dict[str, None] = {}
        objections: dict[str, None] = {}
        for share in together(comm, look_at_share):
            damage |= dict.fromkeys(share["damage"])
            objections |= dict.fromkeys(share["objections"])
        return Findings(list(damage), list(objections))

    def _open_good(self, candidate: folders.CandidateFolder, comm: Comm, repair: bool) -> Reader:
        path = candidate.path
        if repair:
            path = self.folder / on_first(comm, lambda: self._finish_interrupted(candidate))
        return open_together(path, comm)

    def _finish_interrupted(self, good: folders.CandidateFolder) -> str:
        """Give a good checkpoint its name back, and remove what it makes superfluous. Returns its name."""

        def finish() -> str:
            target = good.path.with_name(folders.step_name(good.step))
            if good.path != target:
                try:
                    rename_durably(good.path, target)
                except FileNotFoundError:
                    raise CheckpointError(f"{good.path}: removed after it was verified") from None
            for other in folders.candidates(self.folder):
                if other.replaced_by is not None and other.step == good.step:
                    remove_tree(other.path)
            return target.name

        return self._writing(finish)

    def _put_aside(self, candidate: folders.CandidateFolder, reason: str, comm: Comm) -> str:
        """Moves a checkpoint into quarantine, on rank 0. -> where it is now, in words."""

        def put_aside() -> str:
            try:
                target = self._writing(lambda: folders.put_aside(candidate, reason))
            except WriteError:
                if os.path.lexists(candidate.path):
                    raise
                # Somebody has removed it meanwhile: nothing is left to move.
                return "gone meanwhile"
            return f"now {target.relative_to(self.folder)}"

        return on_first(comm, put_aside)

    def _begin(self, step: int, need: int, spec: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: make the folder to write into. Refuses (WriteError) what the disk has no room for."""
        assert step >= 0, f"step={step} must not be negative"
        encode_json([spec, state])

        def begin() -> dict[str, Any]:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder.parent)
            free = free_bytes(self.folder)
            if need > free:
                raise WriteError(
                    f"cannot write {self.folder / folders.step_name(step)}: need {need:,} bytes, {free:,} bytes "
                    "are free; make room there, lower checkpoint.keep or set another run_dir"
                )
            folders.remove_hidden(self.folder, "saving", "deleted")
            self._generation = self._next_generation()
            name = folders.hidden_name("saving", step, self._generation)
            (self.folder / name).mkdir()
            return {"name": name, "generation": self._generation, "id": secrets.token_hex(16), "step": step}

        return self._writing(begin, need=need)

    def _next_generation(self) -> int:
        known = max(self._generation, folders.highest_generation(self.folder))
        # the manifests of earlier jobs are read once, by the first save of this one
        if self._generation == 0:
            for candidate in folders.candidates(self.folder):
                manifest, _ = examine(candidate.path, candidate.step, deep=False)
                if manifest is not None:
                    known = max(known, manifest.generation)
        return known + 1

    def _write_shard(
        self, saving: Path, begun: dict[str, Any], pieces: Sequence[SavedPiece], rank: int, need: int
    ) -> dict[str, Any]:
        """Write this rank's file; returns what the manifest has to say of it. A rank without elements writes none."""
        # The id makes files of different saves differ even when their tensors are equal.
        metadata = {key: str(begun[key]) for key in ("generation", "id", "step")}
        metadata["rank"] = str(rank)
        plan = plan_shard(pieces, metadata=metadata)
        path = saving / file_name(rank)
        crcs: tuple[int, ...] = ()

        def write() -> tuple[int, ...]:
            failpoint("save_started")
            found = write_shard(path, plan, chunk_bytes=self._chunk_bytes)
            failpoint("after_shard_sync")
            return found

        try:
            if plan.pieces:
                crcs = self._writing(write, need=need)
        finally:
            # A job that lost the lock meanwhile finds its folder gone: say the cause, not the consequence.
            if self._lock:
                self._lock.check()
        # by identity: pieces hold tensors, which don't compare; a piece without elements has no offset
        offsets = {id(piece): offset for piece, offset in plan.pieces}
        entries = []
        for piece in pieces:
            dtype = DTYPE_NAMES[piece.tensor.dtype]
            shape = list(piece.tensor.shape)
            entries.append([piece.name, dtype, piece.global_shape, offsets.get(id(piece)), piece.start, shape])
        return {"bytes": plan.bytes, "crc32": crcs, "pieces": entries}

    def _publish(
        self,
        saving: Path,
        step: int,
        generation: int,
        entries: list[dict[str, Any]],
        spec: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        """Rank 0: write the manifest and give the folder its name."""
        files, tensors = _collect(entries)
        manifest = Manifest(
            step=step,
            generation=generation,
            token=self._lock.token if self._lock else 0,
            chunk_bytes=self._chunk_bytes,
            files=files,
            tensors=tensors,
            spec=spec,
            state=state,
        )
        data = encode(manifest)
        target = self.folder / folders.step_name(step)

        def publish() -> None:
            failpoint("before_manifest")
            # A name is on the disk once its folder is: the manifest's before the folder gets the name under which it
            # counts as a checkpoint.
            write_durably(saving / MANIFEST, data)
            sync_folder(saving)
            failpoint("after_manifest")
            # As late as can be: whoever took the lock over may have begun to save the same step.
            if self._lock:
                self._lock.check()
            self._exchange(saving, target, self.folder / folders.hidden_name("replaced", step, generation))
            self._published = step
            # What can't be removed now is removed after a later save.
            with contextlib.suppress(OSError):
                folders.remove_hidden(self.folder, "replaced")
            failpoint("after_cleanup")

        self._writing(publish, need=len(data))

    def _exchange(self, saving: Path, target: Path, replaced: Path) -> None:
        """Put `saving` in the place of `target`, which keeps its bytes under `replaced` until then. Raises OSError."""
        try:
            # rename(2) replaces no folder that holds files. Between these two the step stands under `replaced`, where
            # newest_good finds it (see folders.py).
            if os.path.lexists(target):
                failpoint("before_set_aside")
                rename_durably(target, replaced)
                failpoint("after_set_aside")
            rename_durably(saving, target)
        except OSError:
            if os.path.lexists(replaced) and not os.path.lexists(target):
                rename_durably(replaced, target)
            raise
        failpoint("after_publish")

    def _writing(self, action: Callable[[], T], *, need: int | None = None) -> T:
        """Change something on the disk: only while the lock is ours, and a failure is a WriteError."""
        try:
            if self._lock:
                self._lock.check()
            return action()
        except OSError as error:
            raise write_failure(self.folder, error, need=need) from None


def _listed(found: dict[str, str], moved: dict[str, str]) -> list[str]:
    """Checkpoints by name, with where they are now and what was found in them."""
    lines = []
    for name, reason in found.items():
        title = name
        if name in moved:
            title = f"{name} ({moved[name]})"
        lines.append(f"{title}:\n{reason}")
    return lines


def open_together(path: Path, comm: Comm) -> Reader:
    """Open a checkpoint on every rank, or raise on every rank."""
    opened: list[Reader] = []
    try:
        together(comm, lambda: opened.append(Reader(path)))
    except CheckpointError:
        for reader in opened:
            reader.close()
        raise
    return opened[0]


def _collect(entries: list[dict[str, Any]]) -> tuple[tuple[StoredFile, ...], dict[str, StoredTensor]]:
    """The files and tensors of all ranks' entries. The pieces of a tensor must agree and hold each element once."""
    files: list[StoredFile] = []
    # dtype and global shape of each tensor, and a row of its table for each stored piece: file, offset, start, shape
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    rows: dict[str, list[list[int]]] = {}
    for rank, entry in enumerate(entries):
        if entry["crc32"]:
            files.append(StoredFile(file_name(rank), entry["bytes"], np.array(entry["crc32"], dtype=np.uint32)))
        for name, dtype, shape, offset, start, extent in entry["pieces"]:
            kind = (dtype, tuple(shape))
            assert kinds.setdefault(name, kind) == kind, f"{name}: rank {rank} says {kind}, another says {kinds[name]}"
            tensor_rows = rows.setdefault(name, [])
            if offset is not None:
                tensor_rows.append([len(files) - 1, offset, *start, *extent])
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        table = np.array(rows[name], dtype=np.int64).reshape(len(rows[name]), 2 + 2 * len(shape))
        tensors[name] = StoredTensor(dtype, shape, table)
    for name in not_whole(tensors)[:1]:
        held = int(tensors[name].shapes.prod(axis=1).sum())
        whole = prod(tensors[name].shape)
        raise AssertionError(f"{name}: saved pieces hold {held} elements of {whole}; each must be held once")
    return tuple(files), tensors
