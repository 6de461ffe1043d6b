"""Reading a metrics.jsonl that grows. Torch-free."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from megaspec.core.bounded_json import parse_json
from megaspec.core.frozen import MOST
from megaspec.core.regular_files import open_inside
from megaspec.log.jsonl import MAX_LINE
from megaspec.log.overflow import WaitingLines, waiting_lines
from megaspec.log.sinks import METRICS

# What is read of one file.
MOST_BYTES = 1 << 30


class LineFollower:
    """Reads a metrics.jsonl that grows, each line once, and from its beginning again when it was cut. Lines that wait
    in the other place, since its disk is full, are read behind those that are home, and not again when they come home.

    Who derives says in `take` what is made of an event, and in `forget` how to begin anew. The file may be anybody's:
    what is no event of a run is passed over and counted, and no file makes `follow` raise, or take more than so much
    memory and time.
    """

    def __init__(self, folder: Path, name: str | Path = METRICS, *, elsewhere: Path | None = None):
        """`folder / name`; below `folder` no link is followed. `elsewhere`: the file in the other place; None: there is
        no such place."""
        self._folder = folder
        self._name = Path(name)
        self.path = folder / name
        self.elsewhere = elsewhere
        self.trouble = ""
        """Why lines can't be read; begins with the path of their file."""
        self.restart()

    def take(self, event: dict[str, Any]) -> None:
        """Takes an event in. ValueError, KeyError, TypeError, OverflowError: it is none, and nothing was kept of it."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drops all that was taken."""
        raise NotImplementedError

    def restart(self) -> None:
        """Forget what was read: the run goes on from an earlier step."""
        self.passed_over = 0
        """Lines that are no event of a run."""
        self.first_passed_over = ""
        """Which was the first of them, and why."""
        self.is_there = False
        """The file exists."""
        self.is_cut = False
        """Its last line has no end: it is just being written, or was when the machine stopped."""
        self.is_elsewhere = False
        """The newest lines are not home: they were read in the other place."""
        self._offset = 0
        """Bytes of lines that were read, as if all of them were home."""
        self.line = 0
        """Number of the line that was taken last."""
        self._is_inside = False
        """The last block ended inside of a line that is too long."""
        self.forget()

    def follow(self) -> None:
        """Takes the lines that have come."""
        self.trouble = ""
        with ExitStack() as stack:
            # before the run's file is read: lines that come home meanwhile are then read in one of the two
            waiting = self._waiting(stack)
            try:
                home = stack.enter_context(open(open_inside(self._folder, self._name), "rb"))
                self._follow(home, waiting)
            except FileNotFoundError:
                self.trouble = ""
            except OSError as error:
                self.trouble = f"{self.path} {error.strerror}"

    def _waiting(self, stack: ExitStack) -> WaitingLines | None:
        """The lines in the other place; None: there are none, or they can't be read, which is told."""
        if self.elsewhere is None:
            return None
        try:
            return stack.enter_context(waiting_lines(self.elsewhere))
        except OSError as error:
            self.trouble = f"{self.elsewhere} {error.strerror}; it is left out"
            return None

    def _follow(self, home: BinaryIO, waiting: WaitingLines | None) -> None:
        """Takes the lines that have come to the run's file, and those that wait behind them."""
        size = os.fstat(home.fileno()).st_size
        if waiting is not None:
            try:
                waiting.refuse_another_course(home, length=size, most=MOST_BYTES)
            except OSError as error:
                self.trouble = f"{self.elsewhere} {error.strerror}; it is left out"
                waiting = None
        # bytes that there would be if all lines were home
        length = size
        # where those that wait begin: behind what is left of a file that somebody has cut
        after = size
        if waiting is not None:
            after = min(waiting.after, size)
            length = max(size, after + waiting.length)
        if length < self._offset:
            self.restart()
        self.is_there = True
        self.is_elsewhere = length > size
        home.seek(self._offset)
        self._take_lines(home)
        if waiting is not None and after <= self._offset < length:
            waiting.seek(self._offset - after)
            self._take_lines(waiting.file)

    def _take_lines(self, file: BinaryIO) -> None:
        self.is_cut = False
        while line := file.readline(MAX_LINE):
            is_end = line.endswith(b"\n")
            if not is_end and len(line) < MAX_LINE:
                self.is_cut = True
                return  # it is just being written
            if self._offset >= MOST_BYTES:
                self.trouble = f"{self.path} has more than {MOST_BYTES:,} bytes; the rest is not read"
                return
            self._offset += len(line)
            if not self._is_inside:
                self.line += 1
                self._take_or_tell(line if is_end else None)
            self._is_inside = not is_end

    def _take_or_tell(self, line: bytes | None) -> None:
        """Takes a line in. `None`: one of more than MAX_LINE bytes."""
        try:
            if line is None:
                raise ValueError(f"longer than {MAX_LINE:,} bytes")
            event = parse_json(line)
            if not isinstance(event, dict):
                raise TypeError("no object")
            self.take(event)
        except KeyError as error:
            self._pass_over(f"it lacks {error}")
        except (ValueError, TypeError, OverflowError) as error:
            # also where the file was cut and has grown past the place that was read to
            self._pass_over(str(error))

    def _pass_over(self, why: str) -> None:
        """Counts a line that is no event of a run, and keeps why the first of them is none."""
        self.passed_over += 1
        if self.passed_over == 1:
            self.first_passed_over = f"{self.path}:{self.line}: {why}"


def count_of(event: dict[str, Any], name: str) -> int:
    """A whole number of an event that counts something. KeyError, ValueError."""
    value = event[name]
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{name} is no count")
    return value
