"""A rank's side of the process that writes its checkpoints, see writer.py. Torch-free."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaspec.checkpoint.writer import IGNORED

_WRITER = Path(__file__).with_name("writer.py")


class WriterProcess:
    """One job at a time: `send` it, then ask `poll` or `wait` for its answer.

    Jobs and answers: writer.py. Where the process died, that is the answer, and the next `send` starts another one.
    `opening`: what every new process is told before all else.
    """

    def __init__(self, opening: dict[str, Any]):
        path = [os.path.abspath(p) for p in sys.path if p]
        self._opening = {"do": "open", "path": path, **opening}
        self._shared: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._data = bytearray()
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self._is_busy

    @property
    def pid(self) -> int | None:
        """None: no process."""
        if self._process is None:
            return None
        return self._process.pid

    def start(self) -> None:
        """Starts the process where none runs, so that the first job does not wait for it."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        # a request to stop that comes before the process ignores it would end it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WRITER), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._socket = ours
        self._data.clear()
        self._tell(self._opening)
        if self._shared is not None:
            fd, n_bytes = self._shared
            self._tell({"do": "buffer", "bytes": n_bytes}, [fd])

    def share(self, fd: int, n_bytes: int) -> None:
        """The memory that jobs are about, of this process and of those after it; `fd` stays the caller's."""
        self._shared = (fd, n_bytes)
        if self._process is not None:
            self._tell({"do": "buffer", "bytes": n_bytes}, [fd])

    def send(self, job: dict[str, Any]) -> None:
        """Gives it a job. None may be under way."""
        assert not self._is_busy, "a job is under way"
        self.start()
        self._is_busy = True
        self._tell(job)

    def poll(self) -> dict[str, Any] | None:
        """The answer, if there is one by now."""
        return self._receive(timeout=0)

    def wait(self) -> dict[str, Any]:
        """The answer, however long it takes."""
        while True:
            answer = self._receive(timeout=None)
            if answer is not None:
                return answer

    def wait_some(self, seconds: float) -> dict[str, Any] | None:
        """The answer, if it comes within so many seconds."""
        return self._receive(timeout=seconds)

    def abandon(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is None:
            return
        self._process.kill()
        self._gone()

    def _receive(self, timeout: float | None) -> dict[str, Any] | None:
        assert self._is_busy, "no job is under way"
        while select.select([self._socket], [], [], timeout)[0]:
            try:
                came = self._socket.recv(1 << 20)
            except ConnectionResetError:
                came = b""
            if not came:
                self._is_busy = False
                return self._told_dead(self._gone())
            self._data += came
            line, found, rest = self._data.partition(b"\n")
            if found:
                self._data = rest
                self._is_busy = False
                return json.loads(line)
        return None

    def _tell(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [data], files)
            self._socket.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died: reading the answer says so

    def _gone(self) -> int:
        """Waits for the process that has ended, or was killed. -> how it ended."""
        assert self._process is not None, "no process"
        code = self._process.wait()
        self._socket.close()
        self._process = None
        self._is_busy = False
        return code

    def _told_dead(self, code: int) -> dict[str, Any]:
        how = f"ended with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return {"kind": "write", "lines": [f"the process that writes checkpoints {how}"], "died": True}
