"""Files that are written whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaspec.core.errors import WriteError
from megaspec.core.regular_files import DISK_ERRORS, NO_ROOM, write_beside


def write_error(path: str | Path, error: OSError, need: int | None = None) -> WriteError:
    """The error for a failed write: path, cause, and for a full disk what is needed and what is free."""
    text = f"{path}: can't be written: {error.strerror or error}"
    if error.errno in NO_ROOM | {errno.EFBIG}:
        if need is not None:
            text += f", need {need} bytes"
        text += f", free {_free_bytes(Path(path))} bytes; make room or choose another folder"
    else:
        text += "; choose another folder"
    return WriteError(text)


def write_atomically(path: Path, chunks: Iterable[Any], *, need: int | None = None) -> None:
    """Write bytes to a new file beside `path`, bring it to the disk and put it in place.

    Raises WriteError with the path; a file that was there before stays as it was. A link there is replaced, and what
    it points to stays.
    """
    temporary: Path | None = None
    try:
        temporary = write_beside(path, chunks)
        publish(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise write_error(path, error, need) from error


def is_no_room(error: WriteError) -> bool:
    """Whether a write failed since the disk, or the user's share of it, is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in NO_ROOM


def is_of_disk(error: WriteError) -> bool:
    """Whether a write failed since a disk is full, or fails: nothing is wrong with what was to be written."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in DISK_ERRORS


def write_text(path: Path, text: str) -> None:
    """Write a text file that a user has asked for, with the folders that it lies in. WriteError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from None
    write_atomically(path, [text.encode()])


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file into place and bring the folder entry to the disk."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _free_bytes(path: Path) -> int:
    """Free on the disk of a path, or where it isn't there of the nearest folder above it that is."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
