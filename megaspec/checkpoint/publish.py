"""How a checkpoint gets onto the disk, step by step. Torch-free: a process beside the training does it as well.

What a crash may leave stands in folders.py.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megaspec.checkpoint import folders
from megaspec.checkpoint.chunks import write_file
from megaspec.checkpoint.codec import encode, not_whole
from megaspec.checkpoint.examine import examine
from megaspec.checkpoint.files import (
    DiskError,
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
from megaspec.core.errors import WriteError
from megaspec.core.faults import failpoint

T = TypeVar("T")

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


@dataclass(frozen=True)
class BegunSave:
    """A save under way. `id`: makes files of different saves differ even when their tensors are equal."""

    step: int
    generation: int
    id: str

    @property
    def name(self) -> str:
        """Of the folder that it is written into."""
        return folders.hidden_name("saving", self.step, self.generation)

    def metadata(self, rank: int) -> dict[str, str]:
        """What the header of a rank's file says."""
        return {"generation": str(self.generation), "id": self.id, "step": str(self.step), "rank": str(rank)}


class Publisher:
    """Writes checkpoints into one folder of them. `lock`: the run's, asked before each change."""

    def __init__(self, folder: Path, *, lock: RunLock | None, chunk_bytes: int = CHUNK_BYTES):
        assert 8 <= chunk_bytes <= LARGEST_CHUNK, f"chunk_bytes={chunk_bytes} must be 8 to {LARGEST_CHUNK}"
        assert chunk_bytes % 8 == 0, f"chunk_bytes={chunk_bytes} must be a multiple of 8"
        self.folder = folder
        self.lock = lock
        self.chunk_bytes = chunk_bytes
        self.published: int | None = None
        """The step that was published last."""
        self._generation = 0

    def begin(self, step: int, need: int) -> BegunSave:
        """Rank 0: make the folder to write into. Refuses (WriteError) what the disk has no room for."""
        assert step >= 0, f"step={step} must not be negative"

        def begin() -> BegunSave:
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
            begun = BegunSave(step, self._generation, secrets.token_hex(16))
            (self.folder / begun.name).mkdir()
            return begun

        return self.writing(begin, need=need)

    def _next_generation(self) -> int:
        known = max(self._generation, folders.highest_generation(self.folder))
        # the manifests of earlier jobs are read once, by the first save of this one
        if self._generation == 0:
            for candidate in folders.candidates(self.folder):
                try:
                    manifest, _ = examine(candidate.path, candidate.step, deep=False)
                except DiskError as error:
                    # a save that is tried again, rather than a generation that there is already
                    raise WriteError(error.problems) from None
                if manifest is not None:
                    known = max(known, manifest.generation)
        return known + 1

    def write(self, begun: BegunSave, rank: int, views: Iterable[memoryview], *, need: int) -> tuple[int, ...]:
        """Write the file of a rank, whose bytes `views` are. -> the CRC-32 of each chunk. Raises WriteError."""
        path = self.folder / begun.name / file_name(rank)

        def write() -> tuple[int, ...]:
            failpoint("save_started")
            found = write_file(path, views, chunk_bytes=self.chunk_bytes)
            failpoint("after_shard_sync")
            return found

        try:
            return self.writing(write, need=need)
        finally:
            # A job that lost the lock meanwhile finds its folder gone: say the cause, not the consequence.
            if self.lock:
                self.lock.check()

    def publish(
        self, begun: BegunSave, entries: list[dict[str, Any]], spec: dict[str, Any], state: dict[str, Any]
    ) -> None:
        """Rank 0: write the manifest and give the folder its name. `entries`: what each rank's file holds."""
        files, tensors = _collect(entries)
        manifest = Manifest(
            step=begun.step,
            generation=begun.generation,
            token=self.lock.token if self.lock else 0,
            chunk_bytes=self.chunk_bytes,
            files=files,
            tensors=tensors,
            spec=spec,
            state=state,
        )
        data = encode(manifest)
        saving = self.folder / begun.name
        target = self.folder / folders.step_name(begun.step)
        replaced = self.folder / folders.hidden_name("replaced", begun.step, begun.generation)

        def publish() -> None:
            failpoint("before_manifest")
            # A name is on the disk once its folder is: the manifest's before the folder gets the name under which it
            # counts as a checkpoint.
            write_durably(saving / MANIFEST, data)
            sync_folder(saving)
            failpoint("after_manifest")
            # As late as can be: whoever took the lock over may have begun to save the same step.
            if self.lock:
                self.lock.check()
            self._exchange(saving, target, replaced)
            self.published = begun.step
            # What can't be removed now is removed after a later save.
            with contextlib.suppress(OSError):
                folders.remove_hidden(self.folder, "replaced")
            failpoint("after_cleanup")

        self.writing(publish, need=len(data))

    def give_up(self, begun: BegunSave) -> None:
        """Remove what was written of a save that came to nothing; nothing is left of one that was published."""
        saving = self.folder / begun.name
        if os.path.lexists(saving):
            # What can't be removed now is removed when the run is opened again.
            with contextlib.suppress(OSError):
                remove_tree(saving)

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

    def writing(self, action: Callable[[], T], *, need: int | None = None) -> T:
        """Change something on the disk: only while the lock is ours, and a failure is a WriteError."""
        try:
            if self.lock:
                self.lock.check()
            return action()
        except OSError as error:
            raise write_failure(self.folder, error, need=need) from None


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
