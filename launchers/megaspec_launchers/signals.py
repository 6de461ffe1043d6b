"""Requests to stop that reach the launcher, as something that a selector can wait for, and the end of a parent."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Self

from megaspec.launcher.stop import REQUESTS, STACKS

# A request that reaches the launcher twice at once (from the terminal and from a wrapper around it) counts once.
SAME_REQUEST_SECONDS = 0.3
PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Has Linux send SIGTERM to this process when its parent dies, also past an exec. -> False: it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


class StopRequests:
    """Counts SIGTERM, SIGINT, SIGHUP and SIGUSR1 while it is entered; afterwards the former handlers are back.

    SIGUSR2 is no request to stop: `stacks` counts it, and ranks then say where they are. Enter it in the main thread.
    SIGHUP stays ignored where it was (nohup).
    """

    def __init__(self) -> None:
        self.count = 0
        self.stacks = 0
        self.last = ""
        self._at = float("-inf")

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._former_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        numbers = [*REQUESTS, STACKS]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.remove(signal.SIGHUP)
        self._former = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Readable after a signal; `clear` makes it wait for the next."""
        return self._read

    def clear(self) -> None:
        """Forgets that signals woke the selector; counts stay."""
        with suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == STACKS:
            self.stacks += 1
            return
        now = time.monotonic()
        if now - self._at > SAME_REQUEST_SECONDS:
            self.count += 1
            self.last = signal.Signals(number).name
            self._at = now
