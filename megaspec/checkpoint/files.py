"""Opening, writing, renaming and removing files so that a crash leaves either the old or the new, and so that no name
in a checkpoint leads out of its folder. Torch-free."""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megaspec.core import regular_files
from megaspec.core.errors import CheckpointError, WriteError
from megaspec.core.regular_files import NO_ROOM

# Errors of the machine, not of the file: nothing is known about the bytes, so nothing is put aside because of them.
MACHINE_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# Of what stands there, which is no file of a checkpoint, or has no name that could be one. Not ENXIO and ENODEV: a
# socket or device is known by its kind (core/regular_files.py), so that these tell of a device that is gone.
_WRONG_KIND = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR})
_NO_NAME = frozenset({errno.EINVAL, errno.ENAMETOOLONG})
# The file system has checked the bytes, or what leads to them, and found them wrong: damage, as where our checksums
# find it. Reading again finds the same, so that a run which waited for better would never start, while an older
# checkpoint may be good. (A file system that says EIO of it can't be told from one that is away for a moment.)
FOUND_DAMAGED = frozenset({errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN})

_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


class UnreadableError(CheckpointError):
    """A checkpoint that this machine or this version can't read, though it may be whole. It is left where it is."""


class DiskError(UnreadableError):
    """A checkpoint, or a folder of them, that can't be read now since a disk fails or a file server is away. What is
    there may all be good: another start may read it."""

    exit_code = WriteError.exit_code


def safe_join(folder: Path, name: str) -> Path:
    """`folder / name` for a plain file name; a name with a separator, `.` or `..` is refused (CheckpointError)."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise CheckpointError(f"file name {name!r} must be plain: letters, digits, dot, dash, underscore")
    return folder / name


def read_failure(path: Path, error: OSError) -> CheckpointError:
    """What to raise when `path` could not be read: damage only where the error tells of the file itself. Any other is
    one of a disk or a file server (DiskError), and says nothing of the bytes."""
    why = os.strerror(error.errno or 0)
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{path}: missing")
    if error.errno in _WRONG_KIND:
        return CheckpointError(
            f"{path}: expected a file or folder of the checkpoint itself, found a link or another kind"
        )
    if error.errno in _NO_NAME:
        return CheckpointError(f"{path}: cannot be read: {why}")
    if error.errno in FOUND_DAMAGED:
        return CheckpointError(f"{path}: its file system found it damaged: {why}")
    if error.errno in MACHINE_ERRORS:
        return UnreadableError(f"{path}: cannot be read on this machine: {why}")
    return DiskError(f"{path}: cannot be read now: {why}")


def opened_read_failure(path: Path, error: OSError) -> CheckpointError:
    """`read_failure` of a file that was opened as a regular one: what then tells of another kind, or of a wrong name,
    is a device that is gone."""
    if error.errno in _WRONG_KIND | _NO_NAME:
        return DiskError(f"{path}: cannot be read now: {os.strerror(error.errno or 0)}")
    return read_failure(path, error)


def write_failure(path: Path, error: OSError, *, need: int | None = None) -> WriteError:
    """What to raise when `path` could not be written; `need` is the size in bytes of what was to be written."""
    text = f"cannot write {error.filename or path}: {os.strerror(error.errno or 0)}"
    remedy = ""
    if error.errno in NO_ROOM | {errno.EFBIG}:
        remedy = "make room there, lower checkpoint.keep or "
        if need is not None:
            text += f"; need {need:,} bytes"
            with contextlib.suppress(OSError):
                text += f", {free_bytes(path):,} bytes are free"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = "make it writable or "
    return WriteError(f"{text}; {remedy}set another run_dir")


def free_bytes(path: Path) -> int:
    """Bytes that a user may still write on the file system of `path`, or of its nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def open_folder(path: Path) -> int:
    """A descriptor of a folder that is no link. Raises CheckpointError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise read_failure(path, error) from None


def open_regular(folder: Path, folder_fd: int, name: str) -> int:
    """A descriptor of a regular file in an opened folder; links and devices are refused (CheckpointError)."""
    path = safe_join(folder, name)
    try:
        return regular_files.open_regular(name, dir_fd=folder_fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CheckpointError(f"{path}: expected a regular file, found another kind") from None
        raise read_failure(path, error) from None


def read_limited(folder: Path, folder_fd: int, name: str, *, limit: int) -> bytes:
    """A whole small file; one of more than `limit` bytes is refused (CheckpointError)."""
    fd = open_regular(folder, folder_fd, name)
    return read_limited_fd(fd, folder / name, limit=limit)


def read_limited_fd(fd: int, path: Path, *, limit: int) -> bytes:
    """`read_limited` of what is open, which it closes. `path`: for errors."""
    with open(fd, "rb") as file:
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                raise CheckpointError(f"{path}: expected at most {limit} bytes, found {size}")
            return file.read(limit + 1)
        except OSError as error:
            raise opened_read_failure(path, error) from None


def pread_into(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` (bytes) from `offset`. Returns how many bytes there were; fewer at the end of the file."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` (bytes) at `offset`. Raises OSError."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def refuse_existing(path: Path) -> None:
    """WriteError: there is something of that name, a link too. Asked before anything is spent on what comes there."""
    if os.path.lexists(path):
        raise WriteError(f"{path} exists; name one that does not, or remove it")


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk; an existing file is not touched. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        pwrite_all(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename_durably(source: Path, target: Path) -> None:
    """Rename and wait until both parents know it. `target` must not exist, or be an empty folder. Raises OSError."""
    before = os.lstat(source)
    try:
        os.rename(source, target)
    except FileNotFoundError:
        # A network file system may send a rename twice and answer with the second result: then it is there.
        if not os.path.lexists(target) or not os.path.samestat(os.lstat(target), before):
            raise
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder with all that is in it, or a link or file in its place. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def published_whole(out: Path) -> Iterator[Path]:
    """A new hidden folder beside `out`, which gets its name at the end: who sees `out` sees all of it.

    WriteError: `out` is there, or can't be written. Whatever is raised, nothing is left then.
    """
    refuse_existing(out)
    saving = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
    try:
        saving.mkdir(parents=True)
        yield saving
        sync_folder(saving)
        rename_durably(saving, out)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise WriteError(f"cannot write {error.filename or out}: {why}; name another folder, or make room") from None
    finally:
        if os.path.lexists(saving):
            with contextlib.suppress(OSError):
                remove_tree(saving)
