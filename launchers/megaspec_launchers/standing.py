"""What a rank that would not end was doing: the kernel's word on it, and the stacks that it wrote when it was asked.

While one rank is stuck the others wait for it, so most of those that don't end are not to blame. Torch-free.
"""

import linecache
import re
from dataclasses import dataclass

import psutil

# faulthandler's words. It lists threads from the newest to the oldest, and of each the innermost frame first.
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_HALTED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
# Where a rank waits for others, or for its GPU, which waits for others: files, and calls in the innermost line.
_WAITING_FILES = ("/torch/distributed/", "/torch/cuda/")
_WAITING_CALLS = (".wait(", ".synchronize(", ".item(", ".tolist(")
_NOT_OURS = ("/site-packages/", "/lib/python")


@dataclass(frozen=True)
class Frame:
    """A line that a thread is at."""

    file: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        """Not of a library."""
        return not any(part in self.file for part in _NOT_OURS)

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Standing:
    """Where a rank stood when its time was over. `stack`: of its main thread, innermost first; empty: it wrote none."""

    is_halted: bool = False
    """It was stopped by SIGSTOP or held by a debugger."""
    stack: tuple[Frame, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Whether it waited for other ranks or for its GPU."""
        if not self.stack:
            return False
        innermost = self.stack[0]
        if any(part in innermost.file for part in _WAITING_FILES):
            return True
        source = linecache.getline(innermost.file, innermost.line)
        return any(call in source for call in _WAITING_CALLS)

    @property
    def blame(self) -> int:
        """The lower, the likelier it is that the others waited for this rank."""
        if self.is_halted:
            return 0
        if not self.stack:
            return 2
        if self.is_waiting:
            return 3
        return 1

    def __str__(self) -> str:
        if self.is_halted:
            return "it was stopped (SIGSTOP, or a debugger)"
        if not self.stack:
            return "it wrote no stack"
        # the innermost line of the project's own code says more than one inside of a library
        where = next((frame for frame in self.stack if frame.is_ours), self.stack[0])
        if self.is_waiting:
            return f"it waited, in {where}"
        return f"it was in {where}"


UNKNOWN = Standing()


def is_halted(pid: int) -> bool:
    """Whether a process is stopped."""
    try:
        return psutil.Process(pid).status() in _HALTED
    except psutil.NoSuchProcess:
        return False


def main_stack(written: str) -> tuple[Frame, ...]:
    """The main thread's stack in what a rank wrote, innermost first; empty where there is none."""
    frames: list[Frame] = []
    for line in written.splitlines():
        if _THREAD.fullmatch(line):
            frames.clear()  # the main thread is the oldest, and so the last
        found = _FRAME.fullmatch(line)
        if found:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
    return tuple(frames)
