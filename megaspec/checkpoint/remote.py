"""Copies of a run's checkpoints in an object store, or wherever fsspec reaches. Torch-free.

    URL/spec.json and other RUN_FILES                         what a run needs to go on, as it was at the last copy
    URL/checkpoints/step-00000100/rank-00000.safetensors
    URL/checkpoints/step-00000100/manifest.json               last: who sees it sees all of the checkpoint

Note "Verified by ours". A store's own checksums are of what it received, and differ from store to store. Each file is
read back after it was written, chunk by chunk, and held to the manifest's CRC-32; only then is the manifest written. It
costs the bytes a second time, beside the training, and works with every store.

Note "Secrets". Errors are told in words of ours: what a client library says may hold a key, or a signed address.
"""

import contextlib
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from megaspec.checkpoint import folders
from megaspec.checkpoint.examine import chunk_length, examine, read_manifest
from megaspec.checkpoint.files import rename_durably, sync_folder, write_failure
from megaspec.checkpoint.format import MANIFEST, MANIFEST_LIMIT, StoredFile
from megaspec.checkpoint.in_use import held_for_reading
from megaspec.core.errors import CheckpointError, MegaspecError, UsageError, WriteError

T = TypeVar("T")

TRIES = 6
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
PART_BYTES = 64 << 20
"""Of a multipart upload."""
RUN_FILES = ("recipe.json", "target.json", "spec.json", "prediction.json", "metrics.jsonl")
_RUN_FILE_LIMIT = 1 << 30
_PROBE = ".megaspec-probe"


class Remote:
    """What lies below a URL. UsageError: the package for its scheme is not installed.

    `name`, in texts before the URL, and `error`: what is raised when the store does not answer as it should.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "checkpoint.copy_to=",
        error: type[MegaspecError] = WriteError,
        wait_seconds: float = FIRST_WAIT_SECONDS,
    ):
        try:
            import fsspec
        except ImportError:
            raise UsageError(f"{url}: needs the package fsspec; pip install 'megaspec[s3]'") from None
        self.url = url.rstrip("/")
        self._name = name
        self._error = error
        self._wait_seconds = wait_seconds
        self._errors = _errors()
        try:
            # listings change beneath us: other runs, and the copier of this one
            self.fs, self.root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            scheme, _, _ = url.partition("://")
            raise UsageError(
                f"{url}: {scheme}:// needs a package that is not installed, or is no scheme that fsspec knows "
                f"({type(error).__name__}); for s3:// pip install 'megaspec[s3]'"
            ) from None
        self.root = self.root.rstrip("/")

    def check(self) -> None:
        """Writes, reads and deletes a few bytes. WriteError: what is copied there would not arrive."""
        path = f"{self.root}/{_PROBE}"

        self._tried(lambda: self._make_folder(self.root), self.url)
        self._put(path, b"megaspec")
        self._tried(lambda: self._forget(path), self.url)

    def upload(self, checkpoint: Path, step: int) -> int:
        """Copies a checkpoint that is whole. -> bytes. WriteError: it could not be, after TRIES of a file.

        CheckpointError: it was deleted, or is damaged.
        """
        target = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"
        with held_for_reading(checkpoint):
            manifest = read_manifest(checkpoint, step)
            data = (checkpoint / MANIFEST).read_bytes()
            if self._has(f"{target}/{MANIFEST}", data):
                return 0
            self._tried(lambda: self._forget(f"{target}/{MANIFEST}"), target)
            self._tried(lambda: self._make_folder(target), target)
            for file in manifest.files:
                self._copy(checkpoint / file.name, f"{target}/{file.name}", file, manifest.chunk_bytes)
            self._upload_run_files(checkpoint.parent.parent)
            self._put(f"{target}/{MANIFEST}", data)
        return manifest.bytes

    def _copy(self, source: Path, there: str, file: StoredFile, chunk_bytes: int) -> None:
        """Writes a file until it comes back as it was written; what the store did not answer is asked again first."""
        damage = ""
        for _ in range(TRIES):
            self._tried(lambda: self._write(source, there), there)
            damage = self._tried(lambda: self._damage(there, file, chunk_bytes), there)
            if not damage:
                return
        raise self._error(f"{self._name}{self.url}: {_last(there)}: {damage}")

    def _upload_run_files(self, run_dir: Path) -> None:
        for name in RUN_FILES:
            source = run_dir / name
            if source.is_file() and not source.is_symlink():
                self._put(f"{self.root}/{name}", source.read_bytes())

    def _put(self, there: str, data: bytes) -> None:
        """Writes a small file until it comes back as it was written."""
        for _ in range(TRIES):
            self._tried(lambda: self.fs.pipe_file(there, data), there)
            if self._has(there, data):
                return
        raise self._error(f"{self._name}{self.url}: {_last(there)}: other bytes came back than were written")

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole there, ascending."""
        folder = f"{self.root}/{folders.CHECKPOINTS}"

        def found() -> list[int]:
            steps = []
            if not self.fs.exists(folder):
                return steps
            for path in self.fs.ls(folder, detail=False):
                candidate = folders.parse_candidate(Path(), path.rstrip("/").rsplit("/", 1)[-1])
                if candidate is not None and self.fs.exists(f"{path}/{MANIFEST}"):
                    steps.append(candidate.step)
            return sorted(steps)

        return self._tried(found, self.url)

    def remove(self, step: int) -> None:
        """Deletes a copy: its manifest first, so that no half of it is ever taken for one."""
        target = f"{self.root}/{folders.CHECKPOINTS}/{folders.step_name(step)}"

        def remove() -> None:
            self._forget(f"{target}/{MANIFEST}")
            if self.fs.exists(target):
                self.fs.rm(target, recursive=True)

        self._tried(remove, target)

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
            self._fetch(f"{source}/{MANIFEST}", saving / MANIFEST, limit=MANIFEST_LIMIT)
            manifest = read_manifest(saving, step)
            for file in manifest.files:
                self._fetch(f"{source}/{file.name}", saving / file.name, limit=file.bytes)
            _, problems = examine(saving, step, deep=True)
            if problems:
                raise CheckpointError([f"{self.url}: step {step} is damaged", *problems])
            for name in RUN_FILES:
                if not (run_dir / name).exists() and self._tried(
                    lambda name=name: self.fs.exists(f"{self.root}/{name}"), self.url
                ):
                    self._fetch(f"{self.root}/{name}", run_dir / name, limit=_RUN_FILE_LIMIT)
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

    def _has(self, path: str, data: bytes) -> bool:
        """Whether a small file with these bytes is there."""

        def look() -> bool:
            try:
                return self.fs.cat_file(path) == data
            except FileNotFoundError:
                return False

        return self._tried(look, path)

    def _forget(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def _make_folder(self, path: str) -> None:
        # a store has no folders; making a bucket is its owner's affair
        if "file" in self.fs.protocol or "local" in self.fs.protocol:
            self.fs.makedirs(path, exist_ok=True)

    def _write(self, source: Path, there: str) -> None:
        with open(source, "rb") as file, self.fs.open(there, "wb", block_size=PART_BYTES) as out:
            while data := file.read(PART_BYTES):
                out.write(data)

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

    def _fetch(self, source: str, target: Path, *, limit: int) -> None:
        """Downloads a file of at most `limit` bytes."""

        def fetch() -> None:
            taken = 0
            with self.fs.open(source, "rb", block_size=PART_BYTES) as file, open(target, "wb") as out:
                # what an earlier try wrote was cut off by opening
                while data := file.read(PART_BYTES):
                    taken += len(data)
                    if taken > limit:
                        raise CheckpointError(f"{source}: expected at most {limit} bytes, found more")
                    out.write(data)
                out.flush()
                os.fsync(out.fileno())

        self._tried(fetch, source)

    def _tried(self, action: Callable[[], T], what: str) -> T:
        """What an action returns, tried with growing waits. Raises `error` when it failed for good."""
        for wait in _waits(self._wait_seconds):
            try:
                return action()
            except self._errors as error:
                why = in_words(error)
                if wait is None or is_final(error):
                    raise self._error(f"{self._name}{self.url}: {_last(what)}: {why}") from None
            # apart from others that failed at the same moment
            time.sleep(wait * random.uniform(0.5, 1.5))
        raise AssertionError("the last wait is None")


def _waits(first: float) -> Iterator[float | None]:
    """Seconds between tries, doubled each time; None behind the last."""
    wait = first
    for _ in range(TRIES - 1):
        yield min(wait, LONGEST_WAIT_SECONDS)
        wait *= 2
    yield None


def _last(what: str) -> str:
    return what.rstrip("/").rsplit("/", 1)[-1]


def _errors() -> tuple[type[BaseException], ...]:
    """What stores raise: of the libraries that are there."""
    found: list[type[BaseException]] = [OSError, TimeoutError]
    with contextlib.suppress(ImportError):
        from botocore.exceptions import BotoCoreError, ClientError

        found += [BotoCoreError, ClientError]
    with contextlib.suppress(ImportError):
        from aiohttp import ClientError as HttpError

        found += [HttpError]
    return tuple(found)


def is_final(error: BaseException) -> bool:
    """Whether another try meets the same: no such bucket, no right to it."""
    is_known = isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError)
    return is_known or type(error).__name__ in _NO_CREDENTIALS


_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")


def in_words(error: BaseException) -> str:
    """Why it failed, without what a library says: that may hold secrets."""
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        return "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
    if isinstance(error, PermissionError):
        return "access is denied: the credentials are wrong, or have no right to write there"
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or file"
    if name in ("EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError"):
        return "can't be reached"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return f"failed ({name})"


def work(job: dict[str, Any]) -> Any:
    """A job of the copier, in writer.py's process: check, copy or drop."""
    remote = Remote(job["url"], wait_seconds=job["wait_seconds"])
    match job["do"]:
        case "check":
            return remote.check()
        case "copy":
            return remote.upload(Path(job["path"]), job["step"])
        case "drop":
            return remote.remove(job["step"])
    raise AssertionError(f"do={job['do']!r} is no job of a copier")
