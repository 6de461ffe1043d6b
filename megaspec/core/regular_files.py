"""Opening files in a folder that somebody else may have filled: only regular files, and no link below the folder.

A run or sweep folder is copied, unpacked and shared. A link in it would have us write over a file elsewhere, a FIFO
would block for ever, and /dev/zero has no end. Torch-free.
"""

import errno
import os
import stat
from pathlib import Path, PurePath


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
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise OSError(errno.EINVAL, "must lie inside its folder", str(folder / name))
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        return open_regular(parts[-1], flags, mode=mode, dir_fd=at)
    except OSError as error:
        raise _told(error, folder / name) from None
    finally:
        os.close(at)


def read_inside(folder: Path, name: str | PurePath, *, limit: int) -> bytes:
    """The whole of a regular file below `folder`. OSError: as open_inside; EFBIG for more than `limit` bytes."""
    with open(open_inside(folder, name), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit:,} bytes", str(folder / name))
    return content


def _told(error: OSError, path: str | Path) -> OSError:
    """The same error with the whole path and, for what is no plain file, a text that says so."""
    texts = {
        errno.ELOOP: "is a link, and links are not followed here",
        errno.ENOTDIR: "lies behind a link or a file, and neither is followed here",
        errno.ENXIO: "is no regular file",
        errno.EISDIR: "is a folder",
    }
    assert error.errno is not None, error
    return OSError(error.errno, texts.get(error.errno, error.strerror), str(path))
