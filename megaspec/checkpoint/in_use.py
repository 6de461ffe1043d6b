"""Who reads a checkpoint keeps it from being deleted meanwhile, by a shared flock(2) on its manifest. Torch-free.

The kernel drops it when the reader ends, however that is. Where the file system knows no flock, a checkpoint that is
read may go: the reader then finds a file missing, and says so.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from megaspec.checkpoint.files import open_folder, read_failure
from megaspec.checkpoint.format import MANIFEST
from megaspec.core.errors import CheckpointError

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
HELD = (BlockingIOError, PermissionError)
# Who deletes a checkpoint takes its name away at once; so long it is waited for.
_WAIT_SECONDS = 2.0


def hold(folder: Path, folder_fd: int) -> int | None:
    """Keeps a checkpoint that is open as `folder_fd` until the descriptor that this returns is closed.

    None: its file system has no such locks, or it has no manifest that can be opened. CheckpointError: it is being
    deleted. DiskError: whether it is can't be told now.
    """
    try:
        fd = os.open(MANIFEST, os.O_RDONLY | _FLAGS, dir_fd=folder_fd)
    except OSError:
        return None  # who reads it says what is wrong with it
    try:
        has_locks = _wait_for_lock(fd, folder, folder_fd)
        # it may have lost its name between being opened and being held
        if has_locks and not _has_its_name(folder, folder_fd):
            raise CheckpointError(f"{folder}: was deleted")
    except CheckpointError:
        os.close(fd)
        raise
    if not has_locks:
        os.close(fd)
        return None
    return fd


def _wait_for_lock(fd: int, folder: Path, folder_fd: int) -> bool:
    """Holds `fd` for reading. -> False: its file system has no such locks. CheckpointError: as `hold`."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except HELD:
            # until its name is gone: who looks it up again then finds where it is now
            if _has_its_name(folder, folder_fd) and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise CheckpointError(f"{folder}: is being deleted") from None
        except OSError:
            return False
        return True


def _has_its_name(folder: Path, folder_fd: int) -> bool:
    """DiskError: that can't be told now."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(folder_fd))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise read_failure(folder, error) from None


@contextlib.contextmanager
def held_for_reading(folder: Path) -> Iterator[None]:
    """While entered, a checkpoint is not deleted. CheckpointError: it is not there, or being deleted."""
    folder_fd = open_folder(folder)
    held_fd = None
    try:
        held_fd = hold(folder, folder_fd)
        yield
    finally:
        if held_fd is not None:
            os.close(held_fd)
        os.close(folder_fd)


@contextlib.contextmanager
def unless_held(folder: Path) -> Iterator[bool]:
    """Whether nobody reads a checkpoint; while entered nobody begins to."""
    try:
        # writable, as network file systems want it of an exclusive lock
        fd = os.open(folder / MANIFEST, os.O_RDWR | _FLAGS)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except HELD:
            yield False
        except OSError:
            yield True
        else:
            yield True
    finally:
        os.close(fd)
