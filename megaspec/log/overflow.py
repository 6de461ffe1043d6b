"""Lines of a metrics.jsonl that its own disk had no room for: in another place, until it has. Torch-free.

    {"after": 51234}
    {"event": "step", "time": 1764000000.123, "step": 41, "loss": 3.25, ...}

They follow the first `after` bytes of the file. Who brings them home appends them there and then removes them here: a
kill between the two leaves lines in both places, which `after` tells.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path
from typing import BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.regular_files import open_inside

# Bytes of a header.
_LIMIT = 256
# What two files are compared by.
_BLOCK = 1 << 16
_NO_LINES = "holds no lines of a run"
_ANOTHER_COURSE = "holds lines of another course of the run"


class Overflow:
    """The file in the other place, which is there as long as lines wait in it."""

    def __init__(self, path: Path):
        self.path = path
        self._after = 0
        """Bytes of the run's file that its lines follow."""
        self._moved = 0
        """Bytes of its lines that are home already."""
        self.is_begun = False
        """Whether there are lines that are not home."""

    def adopt(self, home: int, *, length: int, until: Callable[[bytes], int]) -> bytes:
        """Takes over what an earlier start left. -> its lines that are not home yet.

        `home`: the run's file, whose first `length` bytes stay. `until`: how many bytes of lines the run goes on with.
        OSError: it can't be read, or does not follow what is home; it is left as it is until lines are added.
        """
        with open(open_inside(self.path.parent, self.path.name), "rb") as file:
            after = _after(file.readline(_LIMIT))
            body = file.read()
        if after is None:
            raise OSError(EINVAL, _NO_LINES)
        # a kill came between writing these there and removing them here
        already = min(max(length - after, 0), len(body))
        if os.pread(home, already, after) != body[:already]:
            raise OSError(EINVAL, _ANOTHER_COURSE)
        self._after = after
        self._moved = already
        self.is_begun = True
        left = body[already:]
        left = left[: until(left)]
        self._leave(left, length=length)
        return left

    def append(self, lines: Sequence[bytes], *, after: int) -> None:
        """Adds whole lines, all of them or none. `after`: bytes of the run's file now. OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = b"".join(lines)
        fd = open_inside(self.path.parent, self.path.name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            if not self.is_begun:
                # of a time whose lines are all home
                os.ftruncate(fd, 0)
                self._after = after
                self._moved = 0
                text = _header(after) + text
            length = os.fstat(fd).st_size
            try:
                written = 0
                while written < len(text):
                    written += os.write(fd, text[written:])
            except OSError:
                os.ftruncate(fd, length)
                raise
        finally:
            os.close(fd)
        self.is_begun = True

    def move(self, write: Callable[[bytes], None]) -> None:
        """Gives each line that is not home yet to `write`, and then removes the file. What `write` raises goes through:
        the lines before that one are home."""
        if not self.is_begun:
            return
        with open(open_inside(self.path.parent, self.path.name), "rb") as file:
            file.readline(_LIMIT)
            file.seek(self._moved, os.SEEK_CUR)
            for line in file:
                write(line)
                self._moved += len(line)
        self._remove()

    def cut(self, until: Callable[[bytes], int], *, length: int) -> None:
        """Takes lines away behind those that `until` counts the bytes of. `length`: of the run's file now. OSError."""
        if not self.is_begun:
            return
        with open(open_inside(self.path.parent, self.path.name), "rb") as file:
            file.readline(_LIMIT)
            file.seek(self._moved, os.SEEK_CUR)
            left = file.read()
        self._leave(left[: until(left)], length=length)

    def _leave(self, lines: bytes, *, length: int) -> None:
        """Takes away what is behind these, which are the first that are not home. OSError."""
        if not lines:
            self._remove()
        elif length < self._after:
            # somebody has taken lines away there: these follow others now
            new = Overflow(self.path.with_name(f"{self.path.name}.new"))
            new.append([lines], after=length)
            os.replace(new.path, self.path)
            self._after = length
            self._moved = 0
        else:
            fd = open_inside(self.path.parent, self.path.name, os.O_RDWR)
            try:
                # needs no room
                os.ftruncate(fd, len(_header(self._after)) + self._moved + len(lines))
            finally:
                os.close(fd)

    def _remove(self) -> None:
        self._moved = 0
        self.is_begun = False
        with suppress(OSError):
            self.path.unlink()
            # the run's folder there, unless something is in it
            self.path.parent.rmdir()


@dataclass(frozen=True)
class WaitingLines:
    """Lines in the other place, for who only reads: the run may be writing there, and may bring them home meanwhile."""

    file: BinaryIO
    after: int
    """Bytes of the run's file that they follow."""
    header: int
    """Bytes in front of them."""

    @property
    def length(self) -> int:
        """Bytes of them that there are now."""
        return max(0, os.fstat(self.file.fileno()).st_size - self.header)

    def seek(self, n_bytes: int) -> None:
        """The next bytes that are read of `file` are those behind so many of the lines."""
        self.file.seek(self.header + n_bytes)

    def refuse_another_course(self, home: BinaryIO, *, length: int, most: int) -> None:
        """OSError: the run's file, of `length` bytes, goes on with other lines behind `after`. `most` bytes of it are
        looked at."""
        already = max(0, min(length - self.after, self.length, most - self.after))
        home.seek(self.after)
        self.seek(0)
        while already > 0:
            # empty where the run takes lines away meanwhile
            block = home.read(min(already, _BLOCK))
            if not block:
                return
            if self.file.read(len(block)) != block:
                raise OSError(EINVAL, _ANOTHER_COURSE)
            already -= len(block)


@contextmanager
def waiting_lines(path: Path) -> Iterator[WaitingLines | None]:
    """The lines in the other place; None: there are none. To be entered before the run's file is read: lines that
    come home after that are read in one of the two.

    OSError: it can't be read, or holds no lines of a run.
    """
    try:
        fd = open_inside(path.parent, path.name)
    except FileNotFoundError:
        yield None
        return
    except ValueError:
        # a NUL in it, or what no encoding has
        raise OSError(EINVAL, "is no path") from None
    with open(fd, "rb") as file:
        header = file.readline(_LIMIT)
        after = _after(header)
        if after is not None and header.endswith(b"\n"):
            yield WaitingLines(file, after, len(header))
        elif len(header) < _LIMIT and not header.endswith(b"\n"):
            # it is just being written, and nothing is behind it
            yield None
        else:
            raise OSError(EINVAL, _NO_LINES)


def _after(header: bytes) -> int | None:
    """None: it is none of ours."""
    try:
        found = parse_json(header)
    except ValueError:
        return None
    after = found.get("after") if isinstance(found, dict) else None
    return after if type(after) is int and after >= 0 else None


def _header(after: int) -> bytes:
    return json.dumps({"after": after}).encode() + b"\n"
