"""The process of one point: `megaspec resume RUN` that is asked to stop when the sweep's process dies. Torch-free.

python -P -m megaspec.sweep.child PARENT RUN [memory=ignore] [--plugin=PACKAGE]
"""

import signal
import sys

from megaspec.launcher.stop import REQUESTS

if __name__ == "__main__":
    # What comes before `megaspec resume` has handlers waits for them, past the exec too.
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megaspec.core.errors import Preempted
from megaspec.core.regular_files import open_inside
from megaspec.data.files import write_error
from megaspec_launchers.signals import end_with


def start(
    run: Path, log: Path, *, gpus: Sequence[str], threads: int | None, words: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Starts the run of a point in a session of its own; what it writes is appended to `log`. WriteError.

    `log`: in the logs of the sweep. `threads`: OMP_NUM_THREADS of the ranks, where it is not set already. No `gpus`:
    those that this process sees. `words`: more of the command line.
    """
    environment: dict[str, str] = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    # a folder that packages are found in may be relative; -P keeps the working folder itself out
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in sys.path if p)
    try:
        log_fd = open_inside(log.parent.parent, Path(log.parent.name, log.name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(log_fd, "ab") as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "megaspec.sweep.child", str(os.getpid()), str(run), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
    except OSError as error:
        raise write_error(log, error) from None


def is_run_of(command: Sequence[str], cwd: Path, run: Path) -> bool:
    """Whether the command line of a process that works in `cwd` is that of the run of a point in the folder `run`."""
    if not {"resume", "megaspec.sweep.child"} & set(command) or "-m" not in command:
        return False
    for word in command:
        with suppress(OSError, ValueError):  # not there, or no path at all
            if os.path.samefile(cwd / word, run):
                return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Ties this process to its parent and becomes `megaspec resume RUN`. -> exit code where the parent is gone."""
    parent, run, words = int(arguments[0]), arguments[1], arguments[2:]
    if not end_with(parent):
        return Preempted.exit_code
    os.execv(sys.executable, [sys.executable, "-P", "-m", "megaspec", "resume", run, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
