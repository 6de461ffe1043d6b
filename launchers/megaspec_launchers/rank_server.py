"""The process that ranks are forked from. It imports the heavy packages once, so that a rank starts in milliseconds.

Run as `python -P rank_server.py FD`; FD is one end of a stream socket. One JSON object a line:

    prepare  {"do": "prepare", "path": [...], "modules": [...]}            -> {"ready": pid}
    start    {"do": "start", "entry", "folder", "run_dir", "keywords"} + 3 open files  -> {"started": pid}
    signal   {"do": "signal", "pid", "signal", "group"}
    (a rank ends)                                                          -> {"ended": pid, "code", "signal", "at"}

"at" is when it was found to have ended: seconds on the monotonic clock, which all processes of a machine share.

It never touches a GPU, has one thread, and lives in its own session: only its launcher speaks to it. When the launcher
is gone (end of file), it kills every rank with its children and leaves.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
# Held back in the server, and in a rank until it has handlers for them: one that comes too early waits, none is lost.
# They are REQUESTS and STACKS of megaspec.launcher.stop, which this process can't import yet.
HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Job:
    """What a freshly forked rank has to do."""

    entry: str
    folder: str
    """It starts here."""
    run_dir: str
    keywords: dict[str, Any]
    files: tuple[int, int, int]
    parent: int


def serve(control: socket.socket) -> Job | None:
    """Answers the launcher until it is gone. -> in a forked rank its job, in the server None."""
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    ranks: set[int] = set()
    buffer = b""  # the beginning of a line that has not come whole
    files: list[int] = []  # that came with it
    while True:
        readable, _, _ = select.select([control, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _report_ended(control, ranks)
        if control not in readable:
            continue
        data, came, _, _ = socket.recv_fds(control, 1 << 16, 3)
        files += came
        if not data:
            for pid in ranks:
                _kill(pid, signal.SIGKILL, group=True)
            return None
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            match message["do"]:
                case "prepare":
                    _prepare(message["path"], message["modules"])
                    _send(control, {"ready": os.getpid()})
                case "start":
                    parent = os.getpid()
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for fd in (wake_read, wake_write):
                            os.close(fd)
                        control.close()
                        first, second, third = files
                        what = {name: message[name] for name in ("entry", "folder", "run_dir", "keywords")}
                        return Job(**what, files=(first, second, third), parent=parent)
                    ranks.add(pid)
                    for fd in files:
                        os.close(fd)
                    files.clear()
                    _send(control, {"started": pid})
                case "signal" if message["pid"] in ranks:
                    _kill(message["pid"], message["signal"], group=message["group"])


def _prepare(path: list[str], modules: list[str]) -> None:
    sys.path[:] = path
    # what imports make stays: looking through it again and again for garbage takes a sixth of their time
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    assert threading.active_count() == 1, f"{modules} left threads running, which a fork would lose"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), f"{modules} opened the GPU, which no fork could use again"
    # so that a collection in a rank does not touch, and so copy, the pages that all ranks share
    gc.collect()
    gc.freeze()


def _report_ended(control: socket.socket, ranks: set[int]) -> None:
    # one time for all that are found at this look: in what order they ended can't be told
    at = time.monotonic()
    for pid in list(ranks):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        # its children, if it left any; before it is waited for, while its number is still its own
        _kill(pid, signal.SIGKILL, group=True)
        _, status = os.waitpid(pid, 0)
        ranks.discard(pid)
        # one of the two says how it ended
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        _send(control, {"ended": pid, "code": code, "signal": number, "at": at})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the launcher is gone: the next read says so
        control.sendall(json.dumps(message).encode() + b"\n")


def _kill(pid: int, number: int, *, group: bool) -> None:
    """Signals a rank that has not been waited for, so that its number can't belong to anything else."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)  # forked a moment ago: it has no group of its own yet


def run(job: Job) -> int:
    """Makes a rank out of a forked process and calls its entry. -> exit code."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:
        return 74
    for here, fd in enumerate(job.files):
        os.dup2(fd, here)
        os.close(fd)
    os.chdir(job.folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable()
    # imported here, not at the top: the server learns its search path from the first message
    importlib.import_module("megaspec.core.standard_error").survive_full_disk()
    importlib.import_module("megaspec.launcher.stop").watch_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    errors = importlib.import_module("megaspec.core.errors")
    module, _, function = job.entry.partition(":")
    main = getattr(importlib.import_module(module), function)
    store = importlib.import_module("megaspec.launcher.rendezvous").FileRendezvous(**job.keywords["store"])
    # before anything that can take long: from here on the launcher sees whether this rank lives
    beat = importlib.import_module("megaspec.launcher.beat")
    beat.begin(beat.page_path(store.path, job.keywords["rank"]))
    try:
        return main(job.run_dir, **(job.keywords | {"store": store}))
    except errors.MegaspecError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def leave(code: int) -> NoReturn:
    """Ends this process with a code, whatever the interpreter would meet while it takes a large process apart.

    Taking it apart costs more than starting it: every page that is shared with the server would be copied first.
    """
    with suppress(OSError):  # a terminal that was closed
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    todo = serve(socket.socket(fileno=int(sys.argv[1])))
    leave(0 if todo is None else run(todo))
