"""The processes of a run, one a rank: started, watched, and all of them ended, whatever became of them.

torchrun puts its ranks into sessions of their own, which outlive it where it is killed and keep their GPUs. So ranks
are started here, each in a session that is ended with all that it has started.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Seconds that ranks get to end by themselves once one of them has failed: what waits for it learns of it, or does not.
AFTER_A_FAILURE = 10.0
_EVERY = 0.1


@dataclass(frozen=True)
class RankProcesses:
    """A run that goes on."""

    processes: tuple[subprocess.Popen, ...]
    folder: Path

    def said(self, rank: int = 0) -> list[str]:
        """The whole lines that a rank has printed."""
        return whole_lines(self.folder / f"out-{rank}")

    def wait(self, seconds: float) -> bool:
        """Until all have ended, or one has failed and the others had time to say so. -> whether that came in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                return True
            if any(codes):
                until = min(until, time.monotonic() + AFTER_A_FAILURE)
                self._wait_for_all(until)
                return True
            time.sleep(min(_EVERY, max(0.0, until - time.monotonic())))
        return False

    def _wait_for_all(self, until: float) -> None:
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))

    @property
    def is_done(self) -> bool:
        """Whether all have ended well."""
        return all(process.poll() == 0 for process in self.processes)

    def why(self, seconds: float) -> str:
        """Of a run that did not end well within so many seconds what became of it: of each rank that did not."""
        reasons: dict[str, list[int]] = {}
        for rank, process in enumerate(self.processes):
            code = process.poll()
            text = last_words((self.folder / f"err-{rank}").read_text(errors="replace"))
            reason = f"ended with {code}: {text}"
            if code is None:
                reason = f"took longer than {seconds:g} s; last it said: {text}"
            if code != 0 or len(self.processes) == 1:
                reasons.setdefault(reason, []).append(rank)
        if len(self.processes) == 1:
            return "".join(reasons)
        return "; ".join(f"rank {', '.join(map(str, ranks))} {reason}" for reason, ranks in reasons.items())

    def everything(self) -> str:
        """What all ranks have written to their error streams."""
        texts = []
        for rank in range(len(self.processes)):
            texts.append(f"--- rank {rank}\n{(self.folder / f'err-{rank}').read_text(errors='replace')}")
        return "\n".join(texts)

    def end(self) -> None:
        """Ends every process and its session, which may have outlived it: the next run needs the GPUs."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def started(command: list[str], path: str, ranks: int) -> Iterator[RankProcesses]:
    """A command on each rank, with what torchrun would tell it; `path`: PYTHONPATH. Nothing of it is left behind."""
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if ranks > 1:
        environment |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        # as torchrun does: ranks share the cores
        environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes: list[subprocess.Popen] = []
        running = RankProcesses((), folder)
        try:
            for rank in range(ranks):
                own = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
                with open(folder / f"out-{rank}", "w") as out, open(folder / f"err-{rank}", "w") as err:
                    process = subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=err,
                        # what it writes goes nowhere near the sources
                        cwd=tempfile.gettempdir(),
                        env=own,
                        start_new_session=True,
                    )
                processes.append(process)
                running = RankProcesses(tuple(processes), folder)
            yield running
        finally:
            running.end()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def whole_lines(file: Path) -> list[str]:
    """Of a file that may be written to."""
    if not file.exists():
        return []
    return file.read_text(errors="replace").split("\n")[:-1]


def last_words(text: str) -> str:
    """Where a dump of Python's stacks says that a process stood; else from the last line that names an error on, else
    the last line."""
    # torch puts it before every line of a traceback
    text = re.sub(r"^(\[rank\d+\]: )+", "", text, flags=re.MULTILINE)
    stack = text.rpartition("(most recent call first):")
    if stack[1]:
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack[2])
        stood = [f"{Path(file).name}:{line} {function}" for file, line, function in frames[:6]]
        return "stood in " + " < ".join(stood)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "nothing"
    begin = len(lines) - 1
    for number, line in enumerate(lines):
        if "Error" in line or "error:" in line:
            begin = number
    return "; ".join(lines[begin:])[:400]
