"""Copies of a run's checkpoints in an object store, or wherever fsspec reaches. Torch-free.

    URL/owner.json                                            the run that copies there, see note "One run, one place"
    URL/spec.json and other RUN_FILES                         what a run needs to go on, as it was at the last copy
    URL/checkpoints/step-00000100/rank-00000.safetensors
    URL/checkpoints/step-00000100/manifest.json               last: who sees it sees all of the checkpoint
    URL/checkpoints/step-00000100/manifest.partial            while it is copied or deleted: whose the half is

Note "Verified by ours". A store's own checksums are of what it received, and differ from store to store. Each file is
read back after it was written, chunk by chunk, and held to the manifest's CRC-32; only then is the manifest written. It
costs the bytes a second time, beside the training, and works with every store.

Note "One run, one place". A step has one folder, and a run one spec.json: copies of two runs in one place would be each
other's ruin. Whoever starts looks at all that says whose it is (`holdings`; whether that is its own is not known here:
rules/belonging.py) and then claims the place. Before anything is written or deleted it is looked once more whose the
claim is, so that of two runs that start at the same moment one copies and the other is told.
"""

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaspec.checkpoint import folders
from megaspec.checkpoint.examine import chunk_length, examine, read_manifest
from megaspec.checkpoint.files import rename_durably, sync_folder, write_failure
from megaspec.checkpoint.format import MANIFEST, MANIFEST_LIMIT, StoredFile
from megaspec.checkpoint.in_use import held_for_reading
from megaspec.core.bounded_json import MAX_BYTES, parse_json
from megaspec.core.errors import CheckpointError, MegaspecError, WriteError, printable
from megaspec.core.faults import failpoint
from megaspec.core.remote_files import FIRST_WAIT_SECONDS, PART_BYTES, TRIES, RemoteFiles, last_name

RUN_FILES = ("recipe.json", "target.json", "spec.json", "prediction.json", "metrics.jsonl")
_RUN_FILE_LIMIT = 1 << 30
SPEC = "spec.json"
OWNER = "owner.json"
_OWNER_LIMIT = 1 << 16
_PROBE = ".megaspec-probe"
PARTIAL = "manifest.partial"

# Where a test may kill a copier, beside those of publish.py.
REMOTE_FAULT_POINTS = ("mid_remote_copy", "before_remote_delete", "mid_remote_delete")


@dataclass(frozen=True)
class Found:
    """Steps of the copies below a URL, ascending."""

    whole: list[int]
    partial: list[int]
    """Of which there is something, and no manifest: they were being copied or deleted."""


@dataclass(frozen=True)
class Identity:
    """What the manifest of a copy says of whose it is."""

    step: int | None
    """None: it is the run's own spec.json that says so."""
    spec: dict[str, Any]
    state: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Owner:
    """The run that copies to a place, as it names itself there."""

    name: str
    run_dir: str
    """Its folder, by which starts of one recipe are told apart that run at the same time."""
    run: str
    """Hash of what is the same as long as it goes on."""

    def encoded(self) -> bytes:
        """As it stands in OWNER."""
        return json.dumps(asdict(self)).encode() + b"\n"


def way_out_of_anothers(url: str, name: str) -> str:
    """What to do where another run's copies are in the way of those of the run called `name`."""
    return f"give each run a place of its own: checkpoint.copy_to={url}/{name}, or another URL"


class Remote(RemoteFiles):
    """Copies below a URL. `owner`: the run whose they are; None for who only reads."""

    def __init__(
        self,
        url: str,
        *,
        owner: Owner | None = None,
        name: str = "checkpoint.copy_to=",
        error: type[MegaspecError] = WriteError,
        wait_seconds: float = FIRST_WAIT_SECONDS,
    ):
        super().__init__(url, name=name, error=error, wait_seconds=wait_seconds)
        self.owner = owner

    def check(self) -> None:
        """Writes, reads and deletes a few bytes. WriteError: what is copied there would not arrive."""
        path = f"{self.root}/{_PROBE}"

        self.tried(lambda: self.make_folder(self.root), self.url)
        self.put(path, b"megaspec")
        self.tried(lambda: self.forget(path), self.url)

    def is_claimed(self) -> bool:
        """Whether this run was the last to claim the place."""
        assert self.owner is not None, "copies of nobody"
        return self.has(f"{self.root}/{OWNER}", self.owner.encoded())

    def claim(self) -> None:
        """Says there that it is this run's place from now on."""
        assert self.owner is not None, "copies of nobody"
        self.tried(lambda: self.make_folder(self.root), self.url)
        self.put(f"{self.root}/{OWNER}", self.owner.encoded())

    def _refuse_anothers(self) -> None:
        """WriteError: another run has claimed the place. What nobody has claimed is claimed."""
        assert self.owner is not None, "copies of nobody"
        claimed = self.read_if_there(f"{self.root}/{OWNER}", limit=_OWNER_LIMIT)
        if claimed is None:
            self.claim()
        elif claimed != self.owner.encoded():
            text = (
                f"{self.name}{self.url}: another run{_name_in(claimed)} copies there; nothing of its copies is touched"
            )
            raise self.error(f"{text}; {way_out_of_anothers(self.url, self.owner.name)}")

    def upload(self, checkpoint: Path, step: int, *, run_dir: Path) -> int:
        """Copies a checkpoint that is whole, and the files of its run. -> bytes. It may lie outside `run_dir`.

        WriteError: it could not be, after TRIES of a file, or the place is another run's. CheckpointError: it was
        deleted, or is damaged.
        """
        target = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"
        with held_for_reading(checkpoint):
            manifest = read_manifest(checkpoint, step)
            data = (checkpoint / MANIFEST).read_bytes()
            if self.has(f"{target}/{MANIFEST}", data):
                return 0
            self._refuse_anothers()
            self.tried(lambda: self.make_folder(target), target)
            self.put(f"{target}/{PARTIAL}", data)
            self.tried(lambda: self.forget(f"{target}/{MANIFEST}"), target)
            for file in manifest.files:
                failpoint("mid_remote_copy")
                self._copy(checkpoint / file.name, f"{target}/{file.name}", file, manifest.chunk_bytes)
            self._upload_run_files(run_dir)
            self.put(f"{target}/{MANIFEST}", data)
            self.tried(lambda: self.forget(f"{target}/{PARTIAL}"), target)
        return manifest.bytes

    def _copy(self, source: Path, there: str, file: StoredFile, chunk_bytes: int) -> None:
        """Writes a file until it comes back as it was written; what the store did not answer is asked again first."""
        damage = ""
        for _ in range(TRIES):
            self.tried(lambda: self.write(source, there), there)
            damage = self.tried(lambda: self._damage(there, file, chunk_bytes), there)
            if not damage:
                return
        raise self.error(f"{self.name}{self.url}: {last_name(there)}: {damage}")

    def _upload_run_files(self, run_dir: Path) -> None:
        for name in RUN_FILES:
            source = run_dir / name
            there = f"{self.root}/{name}"
            # the disk of the run may be away for a moment, as the store may
            size = self.tried(partial(_size_of, source), name)
            if size is None:
                continue
            if size > PART_BYTES:
                self.tried(partial(self.write, source, there), there)
            else:
                self.put(there, self.tried(source.read_bytes, name))

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole there, ascending."""
        return self.found().whole

    def found(self) -> Found:
        """What is there."""
        folder = f"{self.root}/{folders.CHECKPOINTS}"

        def look() -> Found:
            whole = []
            partial = []
            if not self.fs.exists(folder):
                return Found([], [])
            for path in self.fs.ls(folder, detail=False):
                candidate = folders.parse_candidate(Path(), path.rstrip("/").rsplit("/", 1)[-1])
                if candidate is None:
                    continue
                if self.fs.exists(f"{path}/{MANIFEST}"):
                    whole.append(candidate.step)
                else:
                    partial.append(candidate.step)
            return Found(sorted(whole), sorted(partial))

        return self.tried(look, self.url)

    def identity(self, step: int) -> Identity | None:
        """Whose a copy is, or a half of one; None where nothing says so. CheckpointError: its manifest is damaged."""
        from megaspec.checkpoint.codec import decode  # numpy, only where there is a manifest

        target = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"
        for name in (MANIFEST, PARTIAL):
            data = self.read_if_there(f"{target}/{name}", limit=MANIFEST_LIMIT)
            if data is not None:
                manifest = decode(data, f"{target}/{name}")
                return Identity(step, manifest.spec, manifest.state, manifest.digest)
        return None

    def holdings(self) -> list[Identity]:
        """All there that says whose it is: copies, halves of them, and the spec.json of their run. What is damaged says
        nothing."""
        found = self.found()
        holdings = identities(self, [*found.whole, *found.partial])
        with contextlib.suppress(CheckpointError):
            spec = self.run_spec()
            if spec is not None:
                holdings.append(Identity(None, spec, {}, ""))
        return holdings

    def run_spec(self) -> dict[str, Any] | None:
        """The Spec of the run whose copies they are, as it was written; None where there is none. CheckpointError: its
        file is damaged."""
        data = self.read_if_there(f"{self.root}/{SPEC}", limit=MAX_BYTES)
        if data is None:
            return None
        try:
            spec = parse_json(data)
        except ValueError as error:
            raise CheckpointError(f"{self.url}/{SPEC} is damaged: {error}") from None
        if not isinstance(spec, dict):
            raise CheckpointError(f"{self.url}/{SPEC} is damaged: it holds no object")
        return spec

    def remove(self, step: int) -> None:
        """Deletes a copy: its manifest first, so that no half of it is ever taken for one, and last what says whose the
        half is, so that a later start finds it. WriteError: the place is another run's."""
        self._refuse_anothers()
        target = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"
        manifest = self.read_if_there(f"{target}/{MANIFEST}", limit=MANIFEST_LIMIT)
        if manifest is not None:
            self.put(f"{target}/{PARTIAL}", manifest)

        def remove() -> None:
            failpoint("before_remote_delete")
            self.forget(f"{target}/{MANIFEST}")
            failpoint("mid_remote_delete")
            if not self.fs.exists(target):
                return
            files = [path for path in self.fs.find(target) if last_name(path) != PARTIAL]
            if files:
                self.fs.rm(files)
            self.fs.rm(target, recursive=True)

        self.tried(remove, target)

    def download(self, run_dir: Path, step: int) -> Path:
        """Brings a copy into a run folder as if it had been saved there, with the files that a run needs to go on where
        they are missing. CheckpointError: it is damaged, or not there."""
        source = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"
        home = run_dir / folders.CHECKPOINTS
        target = home / folders.step_name(step)
        saving = home / folders.hidden_name("saving", step, 1)
        if os.path.lexists(target):
            raise WriteError(f"{target} is there already; remove it, or name another folder")
        try:
            saving.mkdir(parents=True)
            self.fetch(f"{source}/{MANIFEST}", saving / MANIFEST, limit=MANIFEST_LIMIT)
            manifest = read_manifest(saving, step)
            for file in manifest.files:
                self.fetch(f"{source}/{file.name}", saving / file.name, limit=file.bytes)
            _, problems = examine(saving, step, deep=True)
            if problems:
                raise CheckpointError([f"{self.url}: step {step} is damaged", *problems])
            for name in RUN_FILES:
                if not (run_dir / name).exists() and self.tried(
                    lambda name=name: self.fs.exists(f"{self.root}/{name}"), self.url
                ):
                    self.fetch(f"{self.root}/{name}", run_dir / name, limit=_RUN_FILE_LIMIT)
            sync_folder(saving)
            rename_durably(saving, target)
        except OSError as error:
            raise write_failure(target, error) from None
        finally:
            if os.path.lexists(saving):
                with contextlib.suppress(OSError):
                    for path in saving.iterdir():
                        path.unlink()
                    saving.rmdir()
        return target

    def _damage(self, there: str, file: StoredFile, chunk_bytes: int) -> str:
        """Reads a file back. -> in what it is not what was written; "" where it is."""
        with self.fs.open(there, "rb", block_size=PART_BYTES, cache_type="readahead") as back:
            for index, expected in enumerate(file.crc32):
                data = back.read(chunk_length(file, index, chunk_bytes))
                if zlib.crc32(data) != int(expected):
                    return f"chunk {index} came back with other bytes than were written"
            if back.read(1):
                return "more bytes came back than were written"
        return ""


def _size_of(path: Path) -> int | None:
    """None: there is no such file, or it is no plain one. OSError: that can't be told."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def work(job: dict[str, Any]) -> Any:
    """A job of the copier, in writer.py's process: check, claim, copy, drop, list or look."""
    remote = Remote(job["url"], owner=Owner(**job["owner"]), wait_seconds=job["wait_seconds"])
    match job["do"]:
        case "check":
            remote.check()
            if remote.is_claimed():
                return []
            return [asdict(one) for one in remote.holdings()]
        case "claim":
            return remote.claim()
        case "copy":
            return remote.upload(Path(job["path"]), job["step"], run_dir=Path(job["run_dir"]))
        case "drop":
            return remote.remove(job["step"])
        case "list":
            return asdict(remote.found())
        case "look":
            return [asdict(one) for one in identities(remote, job["steps"])]
    raise AssertionError(f"do={job['do']!r} is no job of a copier")


def _name_in(claim: bytes) -> str:
    """`, NAME (RUN_DIR),` of the run that made a claim; "" where that can't be read."""
    try:
        claimed = parse_json(claim)
    except ValueError:
        return ""
    if not isinstance(claimed, dict):
        return ""
    return printable(f", {claimed.get('name')} ({claimed.get('run_dir')}),")


def identities(remote: Remote, steps: Sequence[int]) -> list[Identity]:
    """Of the copies of these steps. One whose manifest is damaged says nothing of whose it is, and stays."""
    found = []
    for step in steps:
        with contextlib.suppress(CheckpointError):
            identity = remote.identity(step)
            if identity is not None:
                found.append(identity)
    return found
