"""When a run's checkpoints are written: while training waits, or beside it by another process.

Note "Beside". All ranks copy their state into shared memory, and each rank's writer (writer.py) writes its file. Each
rank says when its next steps begin, with `word`, whether its part is done; the sum over the ranks begins the step, so
that all ranks learn in that step that all are done, or that one has failed, and meet in `settle`. Then rank 0's
writer publishes, which the ranks learn in the same way. The order on the disk is that of a save that training waits
for, and so are the bytes.

Note "One buffer". A save that is due while the one before is still being written waits for it: a run has the
checkpoints that its recipe says, and the CPU's memory holds the state once. How long it waited is told.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megaspec.checkpoint import folders
from megaspec.checkpoint.comm import Comm, on_first, raise_failure, together
from megaspec.checkpoint.fallback import fallback_folder, note
from megaspec.checkpoint.files import remove_tree
from megaspec.checkpoint.publish import BegunSave
from megaspec.checkpoint.shard import SavedPiece, ShardPlan, plan_shard
from megaspec.checkpoint.shared_buffer import SharedBuffer
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.checkpoint.store import Store, shard_entry
from megaspec.checkpoint.writer_process import WriterProcess
from megaspec.core.errors import MegaspecError, WriteError, printable

SPARE_BYTES = 1 << 20
MEET_SECONDS = 5.0
RETRY_SECONDS = 1.0
"""Between a save that failed and the next try in the same place."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is published. `seconds`: since its save began. `stall_seconds`: of these, how long this rank's
    training stood still for it."""

    step: int
    path: Path
    seconds: float
    stall_seconds: float


def nothing_to_do() -> None:
    """For who does nothing while a save is waited for."""


class Saver(Protocol):
    """How the loop saves. All ranks call `save`, `settle` and `finish` together."""

    def prepare(self, pieces: Sequence[SavedPiece]) -> None:
        """Takes what saves of these pieces will need."""

    def save(
        self,
        step: int,
        pieces: Sequence[SavedPiece],
        *,
        spec: dict[str, Any],
        state: dict[str, Any],
        is_steady: Callable[[SavedPiece], bool],
    ) -> list[Saved]:
        """Begins to save, and returns what is published by now. `is_steady`: whether nothing changes a piece's tensor
        before `before_update`; all others may be changed at once."""

    def before_update(self) -> None:
        """Called before the optimizer changes what is being saved."""

    def wait_for_copies(self) -> None:
        """Returns when nothing is read any more of what is being saved."""

    def word(self) -> int:
        """What this rank adds to a sum over all ranks in its next step. At `world_size` and more `settle` is due."""

    def settle(self) -> list[Saved]:
        """Takes in what the ranks' words said. Raises WriteError when a save failed and was tried in vain."""

    def finish(self) -> list[Saved]:
        """Waits until nothing is under way. Raises as `settle` does."""

    def remove(self, path: Path) -> None:
        """Rank 0: removes the folder of a checkpoint that was deleted, now or soon."""

    def close(self) -> None:
        """Gives up what is under way, and everything that was taken."""


@dataclass(frozen=True)
class Tries:
    """Where a save is tried. `first` the run's folder; then `retries` times in `fallback` where there is one, else in
    the first again."""

    first: Store
    fallback: Store | None = None
    retries: int = 1

    def place(self, n_failed: int) -> Store:
        """Where to save after so many tries."""
        if n_failed > 0 and self.fallback is not None:
            return self.fallback
        return self.first

    def store_of(self, path: Path) -> Store:
        """The one in which a checkpoint was saved."""
        if self.fallback is not None and path.parent == self.fallback.folder:
            return self.fallback
        return self.first

    def note(self, path: Path) -> None:
        """Notes in the run folder where a checkpoint was saved that is not there."""
        if path.parent != self.first.folder:
            note(self.first.folder.parent, path)

    def again(self, step: int, n_failed: int, error: WriteError, *, tell: bool) -> None:
        """After the n-th failure: says where the next try goes, and waits before one in the same place. Raises the
        error when there is none left."""
        if n_failed > self.retries:
            raise WriteError([*error.problems, f"step {step} was not saved, in {n_failed} tries; the run ends here"])
        place = self.place(n_failed)
        if tell:
            text = f"megaspec: step {step} was not saved: {error}\nmegaspec: trying again in {place.folder}"
            print(printable(text, keep="\n"), file=sys.stderr, flush=True)
        if place is self.place(n_failed - 1):
            time.sleep(RETRY_SECONDS)


class BlockingSaver:
    """Training waits until a checkpoint is published."""

    def __init__(self, tries: Tries, comm: Comm):
        self._tries = tries
        self._comm = comm

    def prepare(self, pieces: Sequence[SavedPiece]) -> None:
        """Nothing."""

    def save(
        self,
        step: int,
        pieces: Sequence[SavedPiece],
        *,
        spec: dict[str, Any],
        state: dict[str, Any],
        is_steady: Callable[[SavedPiece], bool],
    ) -> list[Saved]:
        """All of it."""
        began = time.perf_counter()
        n_failed = 0
        while True:
            store = self._tries.place(n_failed)
            try:
                path = store.save(step, pieces, spec=spec, state=state, comm=self._comm)
            except WriteError as error:
                n_failed += 1
                self._tries.again(step, n_failed, error, tell=self._comm.rank == 0)
            else:
                seconds = time.perf_counter() - began
                if self._comm.rank == 0:
                    self._tries.note(path)
                return [Saved(step, path, seconds, seconds)]

    def before_update(self) -> None:
        """Nothing is under way."""

    def wait_for_copies(self) -> None:
        """Nothing is under way."""

    def word(self) -> int:
        """0: nothing is under way."""
        return 0

    def settle(self) -> list[Saved]:
        """Nothing is under way."""
        return []

    def finish(self) -> list[Saved]:
        """Nothing is under way."""
        return []

    def remove(self, path: Path) -> None:
        """At once."""
        remove_tree(path)

    def close(self) -> None:
        """Nothing was taken."""


@dataclass
class _UnderWay:
    """A save that is being written."""

    step: int
    pieces: list[SavedPiece]
    """Their tensors lie in the shared memory."""
    need: int
    """Bytes of all ranks' files."""
    spec: dict[str, Any]
    state: dict[str, Any]
    began: float
    stall_seconds: float = 0.0
    n_failed: int = 0
    begun: BegunSave | None = None
    plan: ShardPlan | None = None
    phase: str = "copying"
    """This rank: copying, writing, or publishing (rank 0 does, the others wait)."""
    answer: dict[str, Any] | None = None
    """Of this rank's writer in this phase."""


class AsyncSaver:
    """Training waits until the state is copied at most; a process beside each rank writes. See the notes above."""

    def __init__(
        self, tries: Tries, comm: Comm, *, device: torch.device, on_wait: Callable[[], object] = nothing_to_do
    ):
        self._on_wait = on_wait
        self._tries = tries
        self._comm = comm
        self._device = device
        first = tries.first
        token = 0 if first.lock is None else first.lock.token
        run_dir = str(first.folder.parent)
        opening = {"run_dir": run_dir, "token": token, "chunk_bytes": first.publisher.chunk_bytes}
        self.writer = WriterProcess(opening)
        self._buffer: SharedBuffer | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._sources: list[SavedPiece] = []
        self._save: _UnderWay | None = None
        self._to_remove: list[str] = []
        self._is_removing = False

    def prepare(self, pieces: Sequence[SavedPiece]) -> None:
        """Starts the writer and takes the shared memory."""
        self.writer.start()
        plan = plan_shard(pieces, metadata={})
        together(self._comm, lambda: self._reserve(plan.bytes - len(plan.header)))

    def _reserve(self, n_bytes: int) -> None:
        """Takes memory unless there is enough. Some more than asked for: to take it anew costs seconds, and where a
        stream of data stands, which is saved as well, is not known at the start."""
        if self._buffer is not None and self._buffer.n_bytes >= n_bytes:
            return
        n_bytes += SPARE_BYTES
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = SharedBuffer(n_bytes, device=self._device)
        self.writer.share(self._buffer.fd, self._buffer.n_bytes)

    def save(
        self,
        step: int,
        pieces: Sequence[SavedPiece],
        *,
        spec: dict[str, Any],
        state: dict[str, Any],
        is_steady: Callable[[SavedPiece], bool],
    ) -> list[Saved]:
        """Starts the copies, once the save before is published."""
        began = time.perf_counter()
        earlier = self.finish()
        waited = time.perf_counter() - began
        if self._comm.rank == 0 and waited > 1:
            text = f"megaspec: step {step} waited {waited:.1f} s for the checkpoint before it to be written: "
            text += "the disk is slower than checkpoint.every asks for"
            print(printable(text), file=sys.stderr, flush=True)
        plan = plan_shard(pieces, metadata={})
        needs = together(self._comm, lambda: plan.bytes)
        together(self._comm, lambda: self._reserve(plan.bytes - len(plan.header)))
        held = self._copy(plan, pieces, is_steady)
        self._save = _UnderWay(step, held, sum(needs), spec, state, began)
        try:
            self._begin()
            self._advance()
        finally:
            if self._save is not None:
                self._save.stall_seconds = time.perf_counter() - began
        return earlier

    def _copy(
        self, plan: ShardPlan, pieces: Sequence[SavedPiece], is_steady: Callable[[SavedPiece], bool]
    ) -> list[SavedPiece]:
        """Starts to copy into the shared memory, in the order of the file. -> the pieces as they lie there."""
        assert self._buffer is not None, "no memory was taken"
        offsets = {id(piece): offset - len(plan.header) for piece, offset in plan.pieces}
        held = []
        steady: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in pieces:
            tensor = piece.value().detach()
            if id(piece) in offsets:
                target = self._buffer.part(offsets[id(piece)], tensor)
            else:  # without elements
                target = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.is_cuda and is_steady(piece):
                steady.append((target, tensor))
            else:
                # in the computation's own order: what comes next may change it
                target.copy_(tensor, non_blocking=True)
            held.append(replace(piece, tensor=target, read=None))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for target, tensor in steady:
                    target.copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()
            # kept until the copies are done: some are made for this save alone
            self._sources = list(pieces)
        return held

    def before_update(self) -> None:
        """What the device is given from here on runs after the copies."""
        if self._copied is not None and self._sources:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._sources = []

    def wait_for_copies(self) -> None:
        """See Saver."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = []

    def _begin(self) -> None:
        """Makes the folder for a try, or the tries after it. Raises WriteError when none is left."""
        save = self._under_way()
        while True:
            store = self._tries.place(save.n_failed)
            try:
                begun = on_first(
                    self._comm,
                    lambda store=store: asdict(store.begin(save.step, save.need, spec=save.spec, state=save.state)),
                )
            except WriteError as error:
                self._failed(error)
                continue
            save.begun = BegunSave(**begun)
            save.plan = plan_shard(save.pieces, metadata=save.begun.metadata(self._comm.rank))
            save.phase = "copying"
            save.answer = None
            return

    def _failed(self, error: WriteError) -> None:
        """A try failed on some rank. Raises when none is left."""
        save = self._under_way()
        self.writer.abandon()
        if self._comm.rank == 0 and save.begun is not None:
            self._store().publisher.give_up(save.begun)
        save.begun = None
        save.n_failed += 1
        try:
            self._tries.again(save.step, save.n_failed, error, tell=self._comm.rank == 0)
        except WriteError:
            self._save = None
            raise

    def _under_way(self) -> _UnderWay:
        assert self._save is not None, "no save is under way"
        return self._save

    def _store(self) -> Store:
        """Where the save under way goes."""
        return self._tries.place(self._under_way().n_failed)

    def _job(self, do: str, **more: Any) -> dict[str, Any]:
        save = self._under_way()
        assert save.begun is not None, "no folder was made"
        return {"do": do, "folder": str(self._store().folder), "save": asdict(save.begun), **more}

    def _advance(self, *, wait: bool = False) -> None:
        """What this rank can do by itself: give its writer the state that is copied, and hear its answer."""
        save = self._under_way()
        if save.phase == "copying":
            if self._copied is not None:
                if wait:
                    self._copied.synchronize()
                elif not self._copied.query():
                    return
                self._copied = None
                self._sources = []
            assert save.plan is not None, "no file was planned"
            save.phase = "writing"
            if not save.plan.pieces:
                save.answer = {"value": []}
                return
            header = save.plan.header.decode("latin-1")
            n_bytes = save.plan.bytes - len(save.plan.header)
            job = self._job("write", rank=self._comm.rank, header=header, bytes=n_bytes, need=save.plan.bytes)
            self._await_removal()
            self.writer.send(job)
        if save.answer is None:
            save.answer = self.writer.wait_some(MEET_SECONDS) if wait else self.writer.poll()

    def word(self) -> int:
        """0: nothing to settle here. 1: this rank is done with its part. The number of ranks: it failed."""
        if self._save is None:
            return 0
        if self._save.answer is None:
            self._advance()
        answer = self._save.answer
        if answer is None:
            return 0
        return 1 if "value" in answer else self._comm.size

    def settle(self) -> list[Saved]:
        """See Saver. Nothing happens where ranks were told of what is settled already."""
        if self._save is None:
            return []
        return self._settle()

    def finish(self) -> list[Saved]:
        """See Saver."""
        found = []
        while self._save is not None:
            self._advance(wait=True)
            found += self._settle()
            # ranks meet now and then, so that none waits for another longer than a collective may take
            self._on_wait()
        self._await_removal()
        return found

    def _settle(self) -> list[Saved]:
        save = self._under_way()
        answers = self._comm.gather(save.answer or {})
        try:
            raise_failure(answers)
        except WriteError as error:
            self._failed(error)
            self._begin()
            self._advance()
            return []
        except MegaspecError:
            self._save = None
            raise
        if not all("value" in answer for answer in answers):
            return []
        if save.phase == "writing":
            self._publish([answer["value"] for answer in answers])
            return []
        path = self._store().folder / folders.step_name(save.step)
        self._store().publisher.published = save.step
        if self._comm.rank == 0:
            self._tries.note(path)
        self._save = None
        self._start_removal()
        return [Saved(save.step, path, time.perf_counter() - save.began, save.stall_seconds)]

    def _publish(self, crcs: list[list[int]]) -> None:
        """All files are on the disk: rank 0 has its writer publish."""
        save = self._under_way()
        assert save.plan is not None, "no file was planned"
        entries = self._comm.gather(shard_entry(save.plan, save.pieces, crcs[self._comm.rank]))
        save.phase = "publishing"
        save.answer = {"value": None}
        if self._comm.rank == 0:
            save.answer = None
            self.writer.send(self._job("publish", entries=entries, spec=save.spec, state=save.state))

    def remove(self, path: Path) -> None:
        """By the writer, while it has nothing else to do."""
        self._to_remove.append(str(path))
        if self._save is None:
            self._start_removal()

    def _start_removal(self) -> None:
        if not self._to_remove:
            return
        self._await_removal()
        self.writer.send({"do": "remove", "paths": self._to_remove})
        self._to_remove = []
        self._is_removing = True

    def _await_removal(self) -> None:
        if self._is_removing:
            self._is_removing = False
            # a writer that died leaves what it has not removed to a later save
            self.writer.wait()

    def close(self) -> None:
        """Gives up what is under way: the checkpoint before it is the newest good one."""
        if self._copied is not None:
            # the device may still write into memory that goes away below; where the device has failed it does not
            with suppress(RuntimeError):
                self._copied.synchronize()
        self.writer.abandon()
        if self._save is not None and self._comm.rank == 0 and self._save.begun is not None:
            self._store().publisher.give_up(self._save.begun)
        self._save = None
        self._sources = []
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def build_tries(spec: CheckpointSpec, store: Store) -> Tries:
    """Where the saves of a run into `store` are tried."""
    fallback = None
    if spec.fallback_dir is not None:
        fallback = Store(fallback_folder(spec.fallback_dir, store.folder.parent), lock=store.lock)
    return Tries(store, fallback, retries=spec.retries)


def build_saver(
    spec: CheckpointSpec, tries: Tries, comm: Comm, *, device: torch.device, on_wait: Callable[[], object]
) -> Saver:
    """What a run saves with. `on_wait` is called every few seconds while training waits for a writer."""
    if spec.saving == "async":
        return AsyncSaver(tries, comm, device=device, on_wait=on_wait)
    return BlockingSaver(tries, comm)
