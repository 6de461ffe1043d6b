"""The process of a supervised run's attempts, seen from its supervisor: start it, watch it, leave nothing of it behind.

It is the launcher of the ranks, and lives from attempt to attempt, so that ranks start in milliseconds; where it dies,
another one is started. One JSON object a line over a socket: an attempt there, what it came to back. Never imports
torch.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from megaspec.launcher.stop import STACKS
from megaspec_launchers.outcome import HANG, INTERNAL, PREEMPTED
from megaspec_launchers.signals import PR_SET_PDEATHSIG, StopRequests
from megaspec_launchers.standing import is_halted

PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 1.0
"""Between two looks at whether the process, or the one that it forks ranks from, was stopped."""
HALTED_LOOKS = 10
"""So many looks in a row that find it stopped, and it is killed."""
AFTER_GRACE_SECONDS = 75.0
"""What the process gets beyond the grace of its ranks to kill them and to say how the attempt ended."""
LEAVES_SECONDS = 3.0
"""What processes get that outlive it: they end by themselves once they are alone."""


@dataclass(frozen=True)
class AttemptResult:
    """What an attempt came to."""

    code: int
    why: str
    layout: str = ""
    """In words; "" where it ended before it had one."""
    world_size: int = 0
    is_planned: bool = False
    """It was asked to end since devices went or came back."""
    has_no_layout: bool = False
    """No layout fits the devices that are left."""


def adopt_orphans() -> None:
    """From now on what a dead process of this one's leaves behind becomes a child of this one, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class AttemptProcess:
    """`command` and the number of its socket; `environment`: variables beside those of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.environment = dict(environment)
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            # SIGKILL reaches a process that is stopped, too; its ranks end with it
            if sys.platform == "linux":
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(HANG)

        # in a session of its own, so that Ctrl-C reaches the supervisor alone
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | self.environment,
            preexec_fn=die_with_parent,
        )
        theirs.close()
        self._socket = ours
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """For a selector: readable when `receive` would not wait."""
        return self._socket.fileno()

    def send(self, job: Mapping[str, Any]) -> bool:
        """Gives it an attempt to make. -> False: it is gone."""
        try:
            self._socket.sendall(json.dumps(job).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What it tells of an attempt, see `Attempts.make` of megaspec/commands/attempt.py; None when it is gone."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: int) -> None:
        """Signals it; nothing happens when it has ended."""
        self._process.send_signal(number)

    def ended(self) -> AttemptResult:
        """What an attempt came to whose process ended without a word. It is waited for."""
        try:
            code = self._process.wait(timeout=LEAVES_SECONDS)
        except subprocess.TimeoutExpired:
            # it closed its socket and stays
            self._process.kill()
            code = self._process.wait()
        if code == PREEMPTED:
            return AttemptResult(PREEMPTED, "the launcher was asked to stop while no rank ran")
        if code < 0:
            return AttemptResult(HANG, f"the launcher was killed by {signal.Signals(-code).name}")
        return AttemptResult(INTERNAL, f"the launcher ended with exit code {code}")

    def close(self) -> None:
        """Ends it. What it left behind is for `end_orphans`."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=LEAVES_SECONDS)
        self._process.kill()
        self._process.wait()

    def server_pid(self) -> int | None:
        """Of the process that ranks are forked from; None while there is none."""
        try:
            children = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return None
        for child in children:
            return child.pid
        return None


def end_orphans() -> None:
    """Ends and reaps what became a child of this process because its parent died: children of ranks, too.

    It ends every child, so it is for a process that has called `adopt_orphans` and starts nothing but attempts.
    """
    give_up = time.monotonic() + LEAVES_SECONDS
    while True:
        _reap()
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        if time.monotonic() > give_up:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.02)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def watch_attempt(
    process: AttemptProcess,
    stop: StopRequests,
    *,
    look: Callable[[], str],
    look_seconds: float,
    grace_seconds: float,
    is_silent: Callable[[], bool],
    timeout_seconds: float,
) -> AttemptResult:
    """Waits until an attempt has ended. Requests to stop, and to show stacks, are passed on.

    `look`: why the attempt is to save and end because devices went or came back, "" where it goes on; asked every
    `look_seconds`. `is_silent`: whether heartbeats of the process are missed. A process that is found stopped (SIGSTOP)
    for a while is killed, one that is silent for `timeout_seconds`, and one that does not end in time.
    """
    layout: dict[str, Any] = {}
    stops_told = 0
    stacks_told = stop.stacks
    replaced_for = ""
    killed_for = ""
    # Looks in a row that found it so. They are counted and no clock is read: time in which this process was stopped
    # together with that one, or by which a clock was set, counts for nothing.
    halted = 0
    silent = 0
    most_silent = max(HALTED_LOOKS, round(timeout_seconds / LOOK_SECONDS))
    deadline = float("inf")
    next_look = time.monotonic() + look_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process, selectors.EVENT_READ)
        selector.register(stop, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(LOOK_SECONDS):
                if key.fileobj is stop:
                    stop.clear()
                    continue
                messages = process.receive()
                if messages is None:
                    result = process.ended()
                    if killed_for:
                        result = AttemptResult(HANG, killed_for)
                    return replace(result, **layout)
                for message in messages:
                    if "code" not in message:
                        layout = message
                        continue
                    result = AttemptResult(**message, **layout)
                    if replaced_for and result.code == PREEMPTED and not stop.count:
                        result = replace(result, why=replaced_for, is_planned=True)
                    return result
            now = time.monotonic()
            if stop.stacks > stacks_told:
                stacks_told = stop.stacks
                process.signal(STACKS)
            if stop.count > stops_told:
                stops_told = stop.count
                process.signal(signal.SIGTERM)
                deadline = min(deadline, now + grace_seconds + AFTER_GRACE_SECONDS)
            if not stop.count and not replaced_for and now >= next_look:
                next_look = now + look_seconds
                replaced_for = look()
                if replaced_for:
                    process.signal(signal.SIGTERM)
                    deadline = now + grace_seconds + AFTER_GRACE_SECONDS
            halted = halted + 1 if _is_stuck(process) else 0
            silent = silent + 1 if is_silent() else 0
            if halted >= HALTED_LOOKS and not killed_for:
                killed_for = "the launcher, or the process that it forks ranks from, was stopped (SIGSTOP)"
            elif silent >= most_silent and not killed_for:
                killed_for = "the launcher was silent: it wrote no heartbeat, and looked after no rank"
            elif now >= deadline and not killed_for:
                killed_for = f"the launcher did not end its ranks within {grace_seconds + AFTER_GRACE_SECONDS:g} s"
            if killed_for:
                process.signal(signal.SIGKILL)


def _is_stuck(process: AttemptProcess) -> bool:
    """Whether the process, or the one that it forks ranks from, is stopped."""
    if is_halted(process.pid):
        return True
    server = process.server_pid()
    return server is not None and is_halted(server)
