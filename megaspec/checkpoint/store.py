"""The checkpoints of one run: saved whole or not at all, verified before use, the newest good one taken.

The store knows names, rectangles and JSON; what they mean is the runtime's affair. What a crash may leave stands in
folders.py.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megaspec.checkpoint import folders
from megaspec.checkpoint.codec import encode_json
from megaspec.checkpoint.comm import Comm, on_first, together
from megaspec.checkpoint.examine import Inspect, examine, find_damage, no_objections, read_manifest
from megaspec.checkpoint.files import DiskError, UnreadableError, remove_tree, rename_durably
from megaspec.checkpoint.format import CHUNK_BYTES, MANIFEST
from megaspec.checkpoint.in_use import held_for_reading, unless_held
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.publish import BegunSave, Publisher
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.shard import DTYPE_NAMES, SavedPiece, ShardPlan, plan_shard, views_of
from megaspec.core.errors import CheckpointError, WriteError, printable

T = TypeVar("T")

# A file server that is away for a moment: so long a checkpoint that can't be read is waited for before each new try.
READ_WAITS_SECONDS = (1.0, 4.0)
_MAY_BE_WHOLE = (
    "it may be whole, so that it stays and no older one is taken: start again when the disk answers; where it never "
    "does, move that checkpoint out of its folder by hand"
)

# Where no good checkpoint is left of a run that may as well begin again.
START_ANEW = "restore one from a backup or remove the folder to start anew"


@dataclass(frozen=True)
class Findings:
    """What speaks against a checkpoint, a line each."""

    damage: list[str]
    objections: list[str] = field(default_factory=list)


def none_beside(steps: list[int]) -> Set[int]:
    """Only the newest stay."""
    return frozenset()


class Store:
    """Checkpoints under `run_dir/checkpoints`.

    `lock`, on rank 0 of a job that writes, is the run's lock: it is asked before each change, and what an earlier
    holder had begun to save is removed here, so that it can't be published any more. Without a lock the store still
    saves, for one's own loops and tests; nothing then keeps a second writer out.
    """

    def __init__(self, run_dir: Path | str, *, lock: RunLock | None = None, chunk_bytes: int = CHUNK_BYTES):
        self.folder = Path(run_dir) / folders.CHECKPOINTS
        self.lock = lock
        self.publisher = Publisher(self.folder, lock=lock, chunk_bytes=chunk_bytes)
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
        begun = BegunSave(**on_first(comm, lambda: asdict(self.begin(step, sum(needs), spec=spec, state=state))))
        try:
            # every rank's file is on the disk before rank 0 writes the manifest that names it
            entries = together(comm, lambda: self._write_shard(begun, pieces, comm.rank, needs[comm.rank]))
            on_first(comm, lambda: self.publisher.publish(begun, entries, spec, state))
        finally:
            if comm.rank == 0:
                self.publisher.give_up(begun)
        return self.folder / folders.step_name(step)

    def begin(self, step: int, need: int, *, spec: dict[str, Any], state: dict[str, Any]) -> BegunSave:
        """Rank 0: make the folder that the checkpoint of `step`, `need` bytes in all, is written into.

        Raises as `save` does.
        """
        # what JSON has no form of is found before anything is written
        encode_json([spec, state])
        return self.publisher.begin(step, need)

    def _write_shard(self, begun: BegunSave, pieces: Sequence[SavedPiece], rank: int, need: int) -> dict[str, Any]:
        """Write this rank's file; returns what the manifest has to say of it. A rank without elements writes none."""
        plan = plan_shard(pieces, metadata=begun.metadata(rank))
        crcs: tuple[int, ...] = ()
        if plan.pieces:
            crcs = self.publisher.write(begun, rank, views_of(plan), need=need)
        return shard_entry(plan, pieces, crcs)

    def newest_good(
        self,
        comm: Comm,
        *,
        repair: bool = True,
        inspect: Inspect = no_objections,
        way_out: str = START_ANEW,
        among: Callable[[], Sequence[folders.CandidateFolder]] | None = None,
    ) -> Reader | None:
        """Open the newest checkpoint that is good in every byte and that `inspect` has nothing against; ranks share the
        work. None when none was saved.

        `repair`: put bad ones into quarantine and finish what a crash interrupted; to be false in a process that does
        not hold the run's lock. What `inspect` objects to goes into quarantine once a good one is found: where there is
        none, the fault may lie in the run's own files, and everything stays. Raises CheckpointError when there is none,
        saying what was found in each and the `way_out`, and when this machine or version can't read one. DiskError: on
        one rank it could not be read now, however often it was tried; it may be whole, and stays where it is.

        `among`, without `repair`: those to choose from, newest first, which rank 0 asks for; None: those of this store.
        One of them that is gone when it is to be read is a CheckpointError: who has listed them looks again.
        """
        assert among is None or not repair, "what lies elsewhere is not this store's to repair"
        candidates = among or partial(folders.candidates, self.folder)
        found: dict[str, str] = {}
        moved: dict[str, str] = {}
        to_put_aside: list[tuple[folders.CandidateFolder, str]] = []
        paths = on_first(comm, lambda: [str(candidate.path) for candidate in candidates()])
        for path in paths:
            candidate = _candidate(Path(path))
            name = candidate.path.name
            if candidate.path.parent != self.folder:
                name = path
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
            if among is not None and findings.damage:
                on_first(comm, partial(folders.refuse_gone, candidate.path))
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

    def open(self, step: int, comm: Comm, *, path: Path | None = None) -> Reader:
        """Verify and open the checkpoint of one step: of this store, or at `path`. Raises CheckpointError, of which
        DiskError as `newest_good`; nothing is moved."""
        path = path or self.folder / folders.step_name(step)
        problems = self._verify(path, step, comm)
        if problems:
            raise CheckpointError(problems)
        return open_together(path, comm)

    def prune(
        self,
        keep: int,
        *,
        inspect: Inspect = no_objections,
        beside: Callable[[list[int]], Set[int]] = none_beside,
        remove: Callable[[Path], object] = remove_tree,
    ) -> list[int]:
        """Remove all but the newest `keep` checkpoints; for rank 0, after a save. Returns the steps that were removed.

        `beside`: of the steps that there are, those that stay as well. What somebody reads (in_use.py) stays until a
        later call. `remove` removes a folder that has lost its name already, now or later.

        Counts only those whose manifest and sizes are right and that `inspect` has nothing against; the others, and
        what this store published last, stay. Raises WriteError.
        """
        assert keep >= 1, f"keep={keep} must be at least 1"
        if self.lock:
            self.lock.check()
        # newest first
        whole = []
        for candidate in folders.candidates(self.folder):
            try:
                manifest, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
            except DiskError:
                # nothing is known of it: it stays, and counts for none that is kept
                continue
            if candidate.replaced_by is None and manifest and not problems:
                whole.append((candidate, manifest.generation))
        removed = []
        stay = beside([candidate.step for candidate, _ in whole])
        for candidate, generation in whole[keep:]:
            if candidate.step == self.publisher.published or candidate.step in stay:
                continue
            with unless_held(candidate.path) as is_free:
                if is_free:
                    self._writing(partial(folders.delete, candidate.path, candidate.step, generation, remove))
                    removed.append(candidate.step)
        return removed

    def _verify(self, path: Path, step: int, comm: Comm) -> list[str]:
        """What is wrong with a checkpoint, on every rank the same; each rank checks its share of the bytes."""

        return self._look_at(folders.CandidateFolder(step, path), comm, no_objections).damage

    def _look_at(self, candidate: folders.CandidateFolder, comm: Comm, inspect: Inspect) -> Findings:
        """What speaks against a checkpoint, on every rank the same; each rank checks its share of the bytes. `inspect`
        is asked first: what it objects to needs no reading. What can't be read now is tried again, on all ranks."""
        for wait_seconds in READ_WAITS_SECONDS:
            try:
                return self._look_once(candidate, comm, inspect)
            except DiskError as error:
                # every rank is here: one rank's failure is everybody's
                if comm.rank == 0:
                    text = f"{error.problems[0]}; tried again in {wait_seconds:g} s"
                    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
                time.sleep(wait_seconds)
        try:
            return self._look_once(candidate, comm, inspect)
        except DiskError as error:
            raise DiskError([*error.problems, _MAY_BE_WHOLE]) from None

    def _look_once(self, candidate: folders.CandidateFolder, comm: Comm, inspect: Inspect) -> Findings:
        """As `_look_at`, tried once."""
        path = candidate.path

        def look_at_share() -> dict[str, list[str]]:
            try:
                with held_for_reading(path):
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

    def _writing(self, action: Callable[[], T]) -> T:
        """Change something on the disk: only while the lock is ours, and a failure is a WriteError."""
        return self.publisher.writing(action)


def _candidate(path: Path) -> folders.CandidateFolder:
    found = folders.parse_candidate(path.parent, path.name)
    assert found, f"{path} is no name of a checkpoint"
    return found


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


def shard_entry(plan: ShardPlan, pieces: Sequence[SavedPiece], crcs: Sequence[int]) -> dict[str, Any]:
    """What the manifest has to say of a rank's file, as JSON."""
    # by identity: pieces hold tensors, which don't compare; a piece without elements has no offset
    offsets = {id(piece): offset for piece, offset in plan.pieces}
    entries = []
    for piece in pieces:
        dtype = DTYPE_NAMES[piece.tensor.dtype]
        shape = list(piece.tensor.shape)
        entries.append([piece.name, dtype, piece.global_shape, offsets.get(id(piece)), piece.start, shape])
    return {"bytes": plan.bytes, "crc32": list(crcs), "pieces": entries}
