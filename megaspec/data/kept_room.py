"""Room on a disk that may fill up, kept for files of a folder that will have to be written anew. Torch-free.

    .room/spec.json        bytes without a meaning, twice as many as spec.json has, to be written over

Writing over bytes that a file has needs no more room, and renaming it puts it in place whole or not at all. The file
that was there before makes room for the next time.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megaspec.core.errors import WriteError
from megaspec.core.regular_files import make_folder_inside, open_inside
from megaspec.data.files import is_no_room, publish, write_atomically

ROOM = ".room"


def keep_room(folder: Path, texts: Mapping[str, bytes]) -> None:
    """Keeps room for files that say about as much as these; a disk that has none does without."""
    with suppress(OSError):
        make_folder_inside(folder, ROOM)
        for name, text in texts.items():
            _keep(folder, name, len(text))


def _keep(folder: Path, name: str, size: int) -> None:
    """Room for twice `size` bytes, or for as many where there is no more. OSError: there is not even that."""
    path = folder / ROOM / name
    with suppress(FileNotFoundError):
        if os.lstat(path).st_size >= size:
            return
        path.unlink()
    for wanted in (2 * size, size):
        try:
            fd = open_inside(folder, Path(ROOM, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with open(fd, "wb") as file:
                # random: a file system that compresses would keep no room for zeros
                file.write(os.urandom(wanted))
                file.flush()
                os.fsync(file.fileno())
            return
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            if wanted == size:
                raise


def write_into_room(folder: Path, name: str, text: bytes) -> None:
    """Writes a file whole or not at all: beside what is there, or, where the disk is full, into the room that was kept
    for it. WriteError: that has none either."""
    try:
        write_atomically(folder / name, [text])
    except WriteError as error:
        if not is_no_room(error) or not _write_over(folder, name, text):
            raise
        keep_room(folder, {name: text})


def _write_over(folder: Path, name: str, text: bytes) -> bool:
    """-> False where no room was kept, or not enough of it."""
    try:
        fd = open_inside(folder, Path(ROOM, name), os.O_RDWR)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        # a folder that was copied by hard links shares its files with the other one
        if found.st_size < len(text) or found.st_nlink != 1:
            return False
        written = 0
        while written < len(text):
            written += os.pwrite(fd, text[written:], written)
        # last, since what is cut off may be another's at once
        os.ftruncate(fd, len(text))
        os.fsync(fd)
        publish(folder / ROOM / name, folder / name)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
