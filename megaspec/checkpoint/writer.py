"""The process beside a rank that writes its checkpoints, so that training goes on meanwhile.

Run as `python -P writer.py FD`; FD is one end of a stream socket to the rank. One JSON object a line:

    open     {"do": "open", "path": [...], "run_dir", "token", "chunk_bytes"}
    buffer   {"do": "buffer", "bytes"} + 1 open file: the memory that it shares with the rank
    write    {"do": "write", "folder", "save": {...}, "rank", "header", "bytes", "need"}   -> {"value": CRC-32s}
    publish  {"do": "publish", "folder", "save": {...}, "entries", "spec", "state"}        -> {"value": null}
    remove   {"do": "remove", "paths": [...]}                                              -> {"value": null}
    check, claim, copy, drop, list, look                    of a copier: remote.py         -> {"value"}

What fails is answered with {"kind", "lines"}, see failures.py. It never touches a GPU and never loads torch. It dies
with its rank: PR_SET_PDEATHSIG, and the end of the socket. It ignores requests to stop, which are the rank's to
answer.
"""

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
# REQUESTS and STACKS of megaspec.launcher.stop: sent to every process of a job by some schedulers, and by Ctrl-C.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Training goes first where both want a core.
NICENESS = 10


class Writer:
    """What has been opened so far."""

    def __init__(self, message: dict[str, Any]):
        sys.path[:] = message["path"]
        # only now: the search path comes with the first message
        self._publish = importlib.import_module("megaspec.checkpoint.publish")
        self._files = importlib.import_module("megaspec.checkpoint.files")
        self._failures = importlib.import_module("megaspec.checkpoint.failures")
        self._errors = importlib.import_module("megaspec.core.errors")
        self._regular_files = importlib.import_module("megaspec.core.regular_files")
        lock = importlib.import_module("megaspec.checkpoint.lock").RunLock
        self._lock = None
        if message["token"]:
            self._lock = lock.held(message["run_dir"], message["token"])
        self._chunk_bytes = message["chunk_bytes"]
        self._publishers: dict[str, Any] = {}
        self._buffer = memoryview(b"")

    def share(self, fd: int, n_bytes: int) -> None:
        """Maps the rank's memory."""
        self._buffer = memoryview(mmap.mmap(fd, n_bytes, prot=mmap.PROT_READ))
        os.close(fd)

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Does one job."""
        try:
            with self._regular_files.disk_failures_told():
                return {"value": self._do(message)}
        except self._errors.MegaspecError as error:
            return self._failures.failure_of(error)
        except Exception as error:  # what nobody expects ends the run by its own text, not by silence
            traceback.print_exc()
            return {"kind": "other", "lines": [f"the writer of checkpoints failed: {type(error).__name__}: {error}"]}

    def _do(self, message: dict[str, Any]) -> Any:
        if message["do"] in ("check", "claim", "copy", "drop", "list", "look"):
            return importlib.import_module("megaspec.checkpoint.remote").work(message)
        if message["do"] == "remove":
            # what can't be removed now is removed before a later save
            for path in message["paths"]:
                with suppress(OSError):
                    self._files.remove_tree(Path(path))
            return None
        publisher = self._publisher(message["folder"])
        save = self._publish.BegunSave(**message["save"])
        match message["do"]:
            case "write":
                views = [memoryview(message["header"].encode("latin-1")), self._buffer[: message["bytes"]]]
                return publisher.write(save, message["rank"], views, need=message["need"])
            case "publish":
                publisher.publish(save, message["entries"], message["spec"], message["state"])
                return None
        raise AssertionError(f"do={message['do']!r} is no job of a writer")

    def _publisher(self, folder: str) -> Any:
        if folder not in self._publishers:
            made = self._publish.Publisher(Path(folder), lock=self._lock, chunk_bytes=self._chunk_bytes)
            self._publishers[folder] = made
        return self._publishers[folder]


def serve(control: socket.socket) -> None:
    """Does one job after another until the rank is gone."""
    writer = None
    data = bytearray()
    files: list[int] = []
    while True:
        came, fds, _, _ = socket.recv_fds(control, 1 << 20, 1)
        files += fds
        if not came:
            return
        data += came
        while (end := data.find(b"\n")) >= 0:
            message = json.loads(data[:end])
            del data[: end + 1]
            if message["do"] == "open":
                writer = Writer(message)
            elif message["do"] == "buffer":
                writer.share(files.pop(0), message["bytes"])
            else:
                answer = json.dumps(writer.answer(message)).encode() + b"\n"
                with suppress(BrokenPipeError):  # the rank is gone: the next read says so
                    control.sendall(answer)


def main() -> None:
    """Sets this process up and serves."""
    parent = int(sys.argv[2])
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # held back by the rank until here
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with suppress(OSError):
        os.nice(NICENESS)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
