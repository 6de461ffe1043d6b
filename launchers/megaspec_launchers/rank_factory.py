"""The launcher's side of the rank server: start ranks, signal them, hear how they ended. Never imports torch."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from megaspec.launcher.loopback import loopback_variables

_SERVER = Path(__file__).with_name("rank_server.py")
# How long the server may take to end once nobody speaks to it. It sends signals and leaves, and waits for nothing.
_LEAVES_SECONDS = 10.0


class ServerGone(Exception):
    """The rank server ended; `killed_by` says how."""


class RankFactory:
    """Ranks on demand, forked from one warm process.

    `modules` are imported once, in that process; importing them must neither open a GPU nor leave a thread running.
    `threads`: OMP_NUM_THREADS of the ranks where the environment does not set it. Ranks find packages where this
    process finds them, without the folder that it was started in.

    A factory may serve any number of launches, one after the other; close it, or use it in a `with`.
    """

    def __init__(self, modules: Sequence[str] = ("torch",), *, threads: int = 1):
        self._modules = list(modules)
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Starts the process unless it runs; `is_ready` once its imports are done."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        # in its own session, so that Ctrl-C reaches the launcher alone
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SERVER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"OMP_NUM_THREADS": str(self._threads)} | dict(os.environ) | loopback_variables(),
        )
        theirs.close()
        self._socket = ours
        path = [os.path.abspath(p) for p in sys.path if p]
        self._send({"do": "prepare", "path": path, "modules": self._modules})

    def close(self) -> None:
        """Ends the process, and with it every rank that still runs."""
        if self._process is None:
            return
        self._socket.close()
        if not self.is_ready:
            self._process.kill()  # it has no ranks yet, and would finish its imports first
        try:
            self._process.wait(timeout=_LEAVES_SECONDS)
        except subprocess.TimeoutExpired:
            # stopped by SIGSTOP it would never see that nobody speaks to it; its ranks die with it
            self._process.kill()
            self._process.wait()
        self._process = None
        self._forget()

    def kill(self) -> None:
        """Kills the process, and with it every rank: also when it is stopped and hears nothing."""
        assert self._process is not None, "no process"
        self._process.kill()

    def killed_by(self) -> int | None:
        """The signal that killed the process, after ServerGone. None: it left, and what it wrote to stderr says why."""
        assert self._process is not None, "no process"
        try:
            code = self._process.wait(timeout=_LEAVES_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        if code >= 0:
            return None
        return -code

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None, "no process"
        return self._process.pid

    def _forget(self) -> None:
        self.is_ready = False
        self._started: list[int] = []
        self._ended: list[dict[str, Any]] = []
        self._buffer = b""

    def fileno(self) -> int:
        """For a selector: readable when `receive` would not wait."""
        return self._socket.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """Waits for the server and returns how ranks ended: {"ended": process id, "code", "signal", "at"}.

        The list may be empty. ServerGone: the server ended.
        """
        self._read()
        return self.ended()

    def ended(self) -> list[dict[str, Any]]:
        """What `receive` would return, of what has been read already."""
        ended = self._ended
        self._ended = []
        return ended

    def start(self, *, entry: str, run_dir: str, keywords: dict[str, Any], files: tuple[int, int, int]) -> int:
        """Forks a rank that calls `entry` ("module:function") in the current folder, with stdin, stdout and stderr as
        given. -> process id."""
        job = {"entry": entry, "folder": os.getcwd(), "run_dir": run_dir, "keywords": keywords}
        self._send({"do": "start", **job}, files)
        while not self._started:
            self._read()
        return self._started.pop()

    def signal(self, pid: int, number: int, *, group: bool = False) -> None:
        """Signals a rank, or with `group` the rank and its children. Nothing happens when it has ended."""
        self._send({"do": "signal", "pid": pid, "signal": int(number), "group": group})

    def _send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [data], files)
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            raise ServerGone from None

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ServerGone
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "ready" in message:
                self.is_ready = True
            elif "started" in message:
                self._started.append(message["started"])
            else:
                self._ended.append(message)
