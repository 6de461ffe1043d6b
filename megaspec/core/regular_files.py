"""Opening files in a folder that somebody else may have filled: only regular files, and no link below the folder.

A run or sweep folder is copied, unpacked and shared. A link in it would have us write over a file elsewhere, a FIFO
would block for ever, and /dev/zero has no end. Torch-free.
"""

import errno
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from megaspec.core.errors import WriteError

# Errors of a disk, or of a user's share of it, that is full.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors of a disk that is full or fails, or of a file server that is away: nothing is wrong with what was asked for.
DISK_ERRORS = NO_ROOM | {errno.EFBIG, errno.EIO, errno.ENOLCK, errno.EREMOTEIO, errno.EROFS, errno.ESTALE}
# Errors that a file whose server is away has in common with a socket: of a file where the error names one.
_SERVER_AWAY = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT})
# Of a regular file whose disk is gone, and in common with a socket, a FIFO that nobody reads and a device that nothing
# drives: of a file where the error names one that is opened as one (`open_regular`).
_NO_DEVICE = frozenset({errno.ENXIO, errno.ENODEV})

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TEXTS = {
    errno.ELOOP: "is a link, and links are not followed here",
    errno.ENOTDIR: "lies behind a link or a file, and neither is followed here",
    errno.EISDIR: "is a folder",
}


def disk_failure(error: OSError) -> WriteError | None:
    """What to raise in place of an error of a file operation that nobody has dealt with: a disk that is full or fails
    is no internal error. None: it is no error of a disk."""
    is_of_a_file = error.errno in _SERVER_AWAY | _NO_DEVICE and error.filename is not None
    if error.errno not in DISK_ERRORS and not is_of_a_file:
        return None
    what = error.filename or "a file"
    deed = "can't be written" if error.errno in NO_ROOM | {errno.EFBIG} else "can't be read or written"
    return WriteError(f"{what} {deed}: {os.strerror(error.errno)}; make room there, or mend it, and start again")


def raise_disk_failure(error: OSError) -> None:
    """Raises WriteError where an error is one of a disk; returns for any other, for which the caller has words."""
    failure = disk_failure(error)
    if failure is not None:
        raise failure from error


@contextmanager
def disk_failures_told() -> Iterator[None]:
    """What is done inside raises WriteError in place of an error of a disk; any other error goes through."""
    try:
        yield
    except OSError as error:
        raise_disk_failure(error)
        raise


def open_regular(name: str | Path, flags: int = os.O_RDONLY, *, mode: int = 0o644, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file whose last part is no link. `flags`, `mode` and `dir_fd` are those of os.open.

    OSError: as os.open; ELOOP for a link and EINVAL for a device, FIFO, socket or folder, with a text that says so.
    """
    # O_NONBLOCK: a FIFO without another end would block before it could be looked at; regular files ignore it.
    # O_TRUNC comes after the look, since truncating is the harm.
    wanted = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(name, wanted, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _NO_DEVICE and _is_of_another_kind(name, dir_fd):
            raise OSError(errno.EINVAL, "is no regular file", str(name)) from None
        raise _told(error, name) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(name))
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_inside(folder: Path, name: str | PurePath, flags: int = os.O_RDONLY, *, mode: int = 0o644) -> int:
    """A descriptor of the regular file `folder / name`; `name` may have several parts.

    `folder` is the user's own word and may be reached through links; below it none is followed.
    OSError: as open_regular, with the whole path as its filename; EINVAL for a name that leads out of the folder.
    """
    try:
        *above, last = _parts(folder, name)
        at = _open_folders(folder, above)
        try:
            return open_regular(last, flags, mode=mode, dir_fd=at)
        finally:
            os.close(at)
    except OSError as error:
        raise _told(error, folder / name) from None


def read_inside(folder: Path, name: str | PurePath, *, limit: int) -> bytes:
    """The whole of a regular file below `folder`. OSError: as open_inside; EOVERFLOW for more than `limit` bytes."""
    with open(open_inside(folder, name), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EOVERFLOW, f"has more than {limit:,} bytes", str(folder / name))
    return content


def append_line(folder: Path, name: str, line: str) -> None:
    """Appends a line to a file below `folder`, which is made where it is not there. A last line without its end, as a
    crash or an editor leaves it, stays a line of its own. OSError: as open_inside."""
    fd = open_inside(folder, name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        data = line.encode() + b"\n"
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        os.write(fd, data)
    finally:
        os.close(fd)


def make_folder_inside(folder: Path, name: str | PurePath) -> None:
    """Makes the folder `folder / name` where it is not there. OSError: as open_inside; ENOTDIR for no folder."""
    try:
        *above, last = _parts(folder, name)
        at = _open_folders(folder, above)
        try:
            os.mkdir(last, dir_fd=at)
        except FileExistsError:
            _check_kind(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode, folder / name, is_folder=True)
        finally:
            os.close(at)
    except OSError as error:
        raise _told(error, folder / name) from None


def check_kinds(folder: Path, *, files: Collection[str] = (), folders: Collection[str] = ()) -> None:
    """Looks at what is there of these names below `folder`; one that is not there is no matter.

    OSError, with the whole path: a file that is none, or a folder that is none; ELOOP for a link in place of either.
    """
    for name in (*folders, *files):
        try:
            mode = os.lstat(folder / name).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        _check_kind(mode, folder / name, is_folder=name in folders)


def write_beside(path: Path, chunks: Iterable[Any]) -> Path:
    """Writes bytes to a new file beside `path` and brings it to the disk. -> its path, for a rename to `path`.

    Its name can't be foreseen, so nobody can have put a link there. OSError: no file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    # 0o666: what the process's umask leaves of it, as open() does
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    is_whole = False
    try:
        with open(fd, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        is_whole = True
    finally:
        if not is_whole:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    return temporary


def _parts(folder: Path, name: str | PurePath) -> tuple[str, ...]:
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise OSError(errno.EINVAL, "must lie inside its folder", str(folder / name))
    return parts


def _open_folders(folder: Path, below: Iterable[str]) -> int:
    """A descriptor of the last of the folders that lie in each other; only `folder` may be a link."""
    at = os.open(folder, _FOLDER)
    for part in below:
        try:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def _is_of_another_kind(name: str | Path, dir_fd: int | None) -> bool:
    """Whether something of that name is no regular file; False where that can't be told."""
    with suppress(OSError):
        return not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    return False


def _check_kind(mode: int, path: Path, *, is_folder: bool) -> None:
    """OSError: `mode` is that of a link, or not that of a folder or regular file."""
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, _TEXTS[errno.ELOOP], str(path))
    if is_folder and not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, "is no folder", str(path))
    if not is_folder and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))


def _told(error: OSError, path: str | Path) -> OSError:
    """The same error with the whole path and, for what is no plain file, a text that says so."""
    assert error.errno is not None, error
    is_plain = error.strerror == os.strerror(error.errno)
    text = _TEXTS.get(error.errno, error.strerror) if is_plain else error.strerror
    return OSError(error.errno, text, str(path))
