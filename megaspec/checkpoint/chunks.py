"""Writing a file in chunks by several threads, each chunk hashed as it is written. Torch-free."""

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megaspec.checkpoint.examine import worker_threads
from megaspec.checkpoint.files import pwrite_all
from megaspec.core.faults import failpoint


def write_file(path: Path, views: Iterable[memoryview], *, chunk_bytes: int) -> tuple[int, ...]:
    """Write a new file, whose bytes `views` are one after another, and wait until it is on the disk.

    Returns the CRC-32 of every chunk. Raises OSError. Views are asked for at most a few chunks ahead of the disk.
    """
    threads = worker_threads()
    crcs: list[int] = []
    running: deque[Future[int]] = deque()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                for index, parts in enumerate(_chunks(views, chunk_bytes)):
                    running.append(pool.submit(_write_chunk, fd, parts, index * chunk_bytes))
                    # waiting here bounds how many tensors are on the CPU at once
                    if len(running) > 2 * threads:
                        crcs.append(running.popleft().result())
                while running:
                    crcs.append(running.popleft().result())
            finally:
                pool.shutdown(cancel_futures=True)
        failpoint("after_shard_write")
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    return tuple(crcs)


def _write_chunk(fd: int, parts: list[memoryview], offset: int) -> int:
    """Writes the bytes of a chunk. -> their CRC-32."""
    failpoint("before_chunk_write")
    data = parts[0]
    if len(parts) > 1:
        data = memoryview(b"".join(parts))
    pwrite_all(fd, data, offset)
    return zlib.crc32(data)


def _chunks(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The file's bytes as chunks, each a list of views."""
    chunk: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        while len(view):
            taken = view[:room]
            chunk.append(taken)
            room -= len(taken)
            view = view[len(taken) :]
            if room == 0:
                yield chunk
                chunk = []
                room = chunk_bytes
    if chunk:
        yield chunk
