"""Entries of ranks for the launcher's tests. Torch-free."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megaspec.core.errors import CheckpointError, DataError
from megaspec.launcher.stop import stop_requested


def codes(run_dir: str, *, rank: int, codes: list[int | str], **_: Any) -> int:
    """Ends as codes[rank] says; a rank that ends with "wait" waits until it is asked to stop, then returns 74.

    "dies of SIGTERM" is a rank that the interpreter has taken the handlers from, as it does at the end of a crash.
    """
    match codes[rank]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill late":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash late":
            time.sleep(0.3)
            raise IndexError("a plug-in's bug on purpose")
        case "dies of SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _wait(run_dir, stop_requested)
        case "crash":
            raise RuntimeError("a bug on purpose")
        case "bad data":
            raise DataError("data.path=nowhere is missing; run data prepare")
        case "no checkpoint":
            raise CheckpointError("no good checkpoint is left")
        case "wait":
            _wait(run_dir, stop_requested)
            return 74
        case code:
            return int(code)
    return 0


def places(run_dir: str, *, rank: int, **keywords: Any) -> int:
    """Writes what it was called with."""
    keywords["store"] = keywords["store"].path
    keywords |= {"session": os.getsid(0), "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}
    keywords["folder_mode"] = Path(keywords["store"]).parent.stat().st_mode & 0o777
    Path(run_dir, f"place-{rank}").write_text(repr(sorted(keywords.items())))
    return 0


def talk(run_dir: str, *, rank: int, **_: Any) -> int:
    """Says a line on stdout and one on stderr."""
    print(f"out of {rank}")
    print(f"err of {rank}", file=sys.stderr)
    return 0


def once(run_dir: str, *, rank: int, attempt: int, dies_at_rank: int, attempts: int, **_: Any) -> int:
    """One rank kills itself in all attempts before the last; the others then wait for it."""
    Path(run_dir, f"attempt-{attempt}-rank-{rank}").touch()
    if attempt == attempts - 1:
        return 0
    if rank == dies_at_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait(run_dir, stop_requested)
    return 74


def saves(run_dir: str, *, rank: int, **_: Any) -> int:
    """Runs until it is asked to stop, saves, ends with 75."""
    Path(run_dir, f"up-{rank}").write_text(str(os.getpid()))
    _wait(run_dir, stop_requested)
    Path(run_dir, f"saved-{rank}").touch()
    return 75


def stubborn(run_dir: str, *, rank: int, **_: Any) -> int:
    """Has a child, and does not stop."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(run_dir, f"child-{rank}").write_text(str(child.pid))
    Path(run_dir, f"up-{rank}").write_text(str(os.getpid()))
    _wait(run_dir, lambda: False)
    return 0


def frozen(run_dir: str, *, rank: int, **_: Any) -> int:
    """Rank 1 halts where it is, alive; the others wait for it."""
    Path(run_dir, f"up-{rank}").write_text(str(os.getpid()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait(run_dir, lambda: False)
    return 0


def eats(run_dir: str, *, rank: int, **_: Any) -> int:
    """Rank 1 takes 640 MiB, unless the kernel ends it before."""
    taken = []
    while rank == 1 and len(taken) < 40:
        taken.append(os.urandom(1 << 20) * 16)
    _wait(run_dir, stop_requested)
    return 74


def leaves_a_child(run_dir: str, *, rank: int, how: str, **_: Any) -> int:
    """Ends while its child runs on."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(run_dir, f"child-{rank}").write_text(str(child.pid))
    print("no newline at the end", end="")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


def _wait(run_dir: str, done: Any) -> None:
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.01)


def tracebacks(run_dir: str, *, rank: int, **_: Any) -> int:
    """Rank 0 writes a traceback that it survives, a line after it, and one much later."""
    if rank == 0:
        print("Traceback (most recent call last):\n  survived", file=sys.stderr)
        print("after it", file=sys.stderr)
        time.sleep(1.0)
        print("much later", file=sys.stderr)
    return 0
