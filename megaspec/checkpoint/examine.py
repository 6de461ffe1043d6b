"""Is a checkpoint on disk what its manifest says? Torch-free."""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megaspec.checkpoint.files import (
    DiskError,
    UnreadableError,
    open_folder,
    open_regular,
    opened_read_failure,
    pread_into,
    read_limited,
)
from megaspec.checkpoint.folders import candidates
from megaspec.checkpoint.format import MANIFEST, MANIFEST_LIMIT, Manifest, OtherFormatError, StoredFile
from megaspec.core.errors import CheckpointError

MOST_PROBLEMS = 8

# What a run has against the checkpoint of a manifest, a line each: that it is another run's, for example. The bytes of
# its files are not read for it.
Inspect = Callable[[Manifest], list[str]]


def no_objections(manifest: Manifest) -> list[str]:
    """Nothing: any whole checkpoint will do."""
    return []


def worker_threads() -> int:
    """How many threads read, write and check at once: the cores that this process may use, at most 8."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return min(8, cores)


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of a folder that must be the checkpoint of `step`.

    Raises CheckpointError; UnreadableError when it may still be whole.
    """
    fd = open_folder(folder)
    try:
        manifest = read_manifest_at(folder, fd)
    finally:
        os.close(fd)
    if manifest.step != step:
        raise CheckpointError(f"{folder / MANIFEST}: expected step {step}, found step {manifest.step}")
    return manifest


def read_manifest_at(folder: Path, folder_fd: int) -> Manifest:
    """As read_manifest, of a folder that is open; `folder` names it in errors."""
    from megaspec.checkpoint.codec import decode  # numpy, only where there is a manifest

    data = read_limited(folder, folder_fd, MANIFEST, limit=MANIFEST_LIMIT)
    try:
        return decode(data, str(folder / MANIFEST))
    except OtherFormatError as error:
        raise UnreadableError(str(error)) from None


def open_stored(folder: Path, folder_fd: int, file: StoredFile) -> int:
    """A descriptor of a stored file. Raises CheckpointError when it is missing, no file, or of another size."""
    try:
        fd = open_regular(folder, folder_fd, file.name)
    except UnreadableError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}, expected {file.bytes} bytes") from None
    try:
        size = os.fstat(fd).st_size
    except OSError as error:
        os.close(fd)
        raise opened_read_failure(folder / file.name, error) from None
    if size != file.bytes:
        os.close(fd)
        raise CheckpointError(f"{folder / file.name}: expected {file.bytes} bytes, found {size}")
    return fd


def read_chunk(fd: int, path: Path, file: StoredFile, index: int, chunk_bytes: int, out: memoryview) -> None:
    """Read chunk `index` into `out`, which has its size, and check it. Raises CheckpointError."""
    offset = index * chunk_bytes
    try:
        count = pread_into(fd, out, offset)
    except OSError as error:
        raise opened_read_failure(path, error) from None
    if count != len(out):
        raise CheckpointError(f"{path}: expected {file.bytes} bytes, found {offset + count}")
    expected = int(file.crc32[index])
    found = zlib.crc32(out)
    if found != expected:
        raise CheckpointError(
            f"{path}: bytes {offset} to {offset + len(out)}: crc32 expected {expected:08x}, found {found:08x}"
        )


def chunk_length(file: StoredFile, index: int, chunk_bytes: int) -> int:
    """Bytes of a chunk: all have `chunk_bytes` but the last."""
    return min(chunk_bytes, file.bytes - index * chunk_bytes)


@dataclass(frozen=True)
class _ChunkRange:
    """Chunks first <= index < stop of a file."""

    file: StoredFile
    first: int
    stop: int


def _share(manifest: Manifest, part: int, parts: int) -> list[_ChunkRange]:
    """The chunks that the part-th of `parts` workers checks: chunks low <= index < high, counted over all files."""
    total = sum(len(file.crc32) for file in manifest.files)
    low = total * part // parts
    high = total * (part + 1) // parts
    ranges = []
    # index, over all files, of the file's first chunk
    base = 0
    for file in manifest.files:
        n_chunks = len(file.crc32)
        first = max(low - base, 0)
        stop = min(high - base, n_chunks)
        if first < stop:
            ranges.append(_ChunkRange(file, first, stop))
        base += n_chunks
    return ranges


def find_damage(folder: Path, manifest: Manifest, *, part: int = 0, parts: int = 1) -> list[str]:
    """Check every byte of this worker's share of the files. Returns what is wrong, a line each, at most MOST_PROBLEMS.

    The shares of `part` = 0 ... parts-1 together are all files. Raises UnreadableError for troubles of this machine.
    """
    problems: list[str] = []
    fd = open_folder(folder)
    try:
        with ThreadPoolExecutor(worker_threads()) as pool:
            for chunks in _share(manifest, part, parts):
                problems += _check_chunks(pool, folder, fd, chunks, manifest.chunk_bytes)
                if len(problems) >= MOST_PROBLEMS:
                    break
    finally:
        os.close(fd)
    return problems[:MOST_PROBLEMS]


def _check_chunks(
    pool: ThreadPoolExecutor, folder: Path, folder_fd: int, chunks: _ChunkRange, chunk_bytes: int
) -> list[str]:
    """What is wrong with chunks of a file, a line each. Raises UnreadableError: the file may be whole all the same."""
    file = chunks.file
    try:
        fd = open_stored(folder, folder_fd, file)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return [str(error)]
    path = folder / file.name

    def check(indices: range) -> list[str]:
        # one buffer for all chunks of a thread
        buffer = memoryview(bytearray(min(chunk_bytes, file.bytes)))
        found = []
        for index in indices:
            try:
                read_chunk(fd, path, file, index, chunk_bytes, buffer[: chunk_length(file, index, chunk_bytes)])
            except UnreadableError:
                raise
            except CheckpointError as error:
                found.append(str(error))
        return found

    # thread t takes every n_threads-th chunk from the t-th on
    n_threads = min(worker_threads(), chunks.stop - chunks.first)
    problems: list[str] = []
    try:
        for found in pool.map(check, [range(chunks.first + t, chunks.stop, n_threads) for t in range(n_threads)]):
            problems += found
    finally:
        os.close(fd)
    return problems


def examine(
    folder: Path, step: int, *, deep: bool, inspect: Inspect = no_objections
) -> tuple[Manifest | None, list[str]]:
    """A checkpoint's manifest, where it can be read, and what is wrong with the checkpoint.

    `deep` checks every byte; otherwise the manifest and the sizes of the files. What `inspect` objects to comes first.
    DiskError: it can't be read now, which is nothing that is wrong with it.
    """
    try:
        manifest = read_manifest(folder, step)
    except DiskError:
        raise
    except CheckpointError as error:
        return None, [str(error)]
    problems = [f"{folder / MANIFEST}: {line}" for line in inspect(manifest)]
    try:
        if deep:
            problems += find_damage(folder, manifest)
        else:
            problems += _wrong_sizes(folder, manifest)
    except DiskError:
        raise
    # Of this machine, or the folder was removed meanwhile.
    except CheckpointError as error:
        problems.append(str(error))
    return manifest, problems


def whole_steps(folder: Path, inspect: Inspect) -> set[int]:
    """The steps of the checkpoints in a folder of them that are whole.

    Their manifests and the sizes of their files are right, and `inspect` has nothing against them; bytes are not read.
    DiskError: of one that can't be told now.
    """
    found = set()
    for candidate in candidates(folder):
        _, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
        if not problems:
            found.add(candidate.step)
    return found


def newest_whole(folder: Path, inspect: Inspect) -> int | None:
    """The step of the newest checkpoint in a folder of checkpoints that is whole; None when there is none.

    Its manifest and the sizes of its files are right, and `inspect` has nothing against it; bytes are not read.
    DiskError: that can't be told now.
    """
    for candidate in candidates(folder):
        _, problems = examine(candidate.path, candidate.step, deep=False, inspect=inspect)
        if not problems:
            return candidate.step
    return None


def _wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    problems = []
    fd = open_folder(folder)
    try:
        for file in manifest.files:
            try:
                os.close(open_stored(folder, fd, file))
            except DiskError:
                raise
            except CheckpointError as error:
                problems.append(str(error))
    finally:
        os.close(fd)
    return problems[:MOST_PROBLEMS]
