"""The hosts of a job of several nodes: which of them the run keeps away from, and how its scheduler is told.

Each node looks at its own ranks and writes what the script of the job, which outlives them all, reads in the job's
folder:

    hosts            all names, as the scheduler wrote them there
    nodes/NUMBER     the name of a node, since a rank that is suspected has a number
    ended/NAME       how its ranks ended, one of the words below; a host that was lost leaves none
    left-out/NAME    the hosts that stand in avoided.jsonl when it ends, a line each

Names are the scheduler's (SLURMD_NODENAME), which it takes back in ExcNodeList: that of socket.gethostname() may have a
domain behind it, or be another one. Never imports torch.
"""

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from megaspec.core.errors import HardwareError, RecipeError, printable
from megaspec.core.regular_files import read_inside, write_beside
from megaspec.launcher.stop import REQUESTS
from megaspec.launcher.suspects import (
    AVOIDED,
    FAILED_HOSTS,
    HOST_FAILURES,
    Avoided,
    avoid_host,
    count_suspicions,
    failures_of_host,
    read_avoided,
    read_suspects,
    read_whole_avoided,
    tell_failed_host,
)
from megaspec_launchers.outcome import HANG, Outcome

HARDWARE = HardwareError.exit_code
# How the ranks of a host ended.
FAILED = "failed"
"""One was killed by a signal that nobody sent."""
MISSED = "missed"
"""They missed ranks of another host, or hung."""
STOPPED = "stopped"
"""They were asked to stop."""
ENDED = "ended"
"""They were done, or said themselves what was wrong."""
# A name that SLURM takes as one host: in its lists brackets and commas mean more.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LIMIT = 4 << 20
# The ranks of a job count no attempts: each start of the job begins with the first.
_ATTEMPT = 0


@dataclass(frozen=True)
class JobHosts:
    """The hosts of one start of a job, as one node of it sees them."""

    folder: Path
    """Of the job."""
    run_dir: Path
    start: str
    """Names this start of the job."""
    restarts: int
    """How often the job was started before."""
    name: str
    """Of this node, in the scheduler's words."""
    node: int
    ranks: int
    """Ranks of each node."""
    lost: str = ""
    """`START HOST`, of a host that was lost in the start before this one; "": none was."""

    def begin(self) -> int:
        """Says which node this is. -> how many suspicions were told before, for `leave_out`.

        HardwareError: the run keeps away from a host of this job. RecipeError: a line of avoided.jsonl can't be read,
        or a file can't be.
        """
        self._count_lost()
        self._write("nodes", str(self.node), self.name)
        try:
            avoided = read_avoided(self.run_dir).hosts
            found = [name for name in self._names() if name in avoided]
            before = count_suspicions(self.run_dir)
        except OSError as error:
            raise RecipeError(f"{error.filename}: {error.strerror}; no rank was started") from None
        if not found:
            return before
        self._write("ended", self.name, ENDED)
        self._tell_scheduler()
        text = "; ".join(f"{name} ({avoided[name]})" for name in found)
        raise HardwareError(
            f"the run keeps away from host {text}; no rank was started. Once it is mended, delete its line in "
            f"{self.run_dir / AVOIDED}"
        )

    def note_stop(self) -> None:
        """This node was asked to stop: it may be killed before it can say how it ended."""
        self._write("ended", self.name, STOPPED)

    def note_end(self, outcome: Outcome, *, was_asked: bool) -> None:
        """Says how the ranks of this node ended."""
        how = ENDED
        if was_asked:
            how = STOPPED
        elif _failed_by_itself(outcome):
            how = FAILED
            try:
                tell_failed_host(self.run_dir, self.name, start=self.start, why=str(outcome))
            except OSError as error:
                _say(
                    f"{self.run_dir / FAILED_HOSTS}: {error.strerror}; this failure of host {self.name} is not counted"
                )
        elif outcome.code == HANG:
            how = MISSED
        self._write("ended", self.name, how)

    def leave_out(self, code: int, *, suspicions: int) -> None:
        """Keeps the run away from hosts that are suspected, or from this one where it failed again, and tells the
        scheduler. `code`: of the run. `suspicions`: how many were told before this start."""
        try:
            if code == HARDWARE:
                self._avoid_suspects(suspicions)
            elif code == HANG:
                self._avoid_itself()
        except OSError as error:
            _say(f"{error.filename}: {error.strerror}; a host that failed is not kept away from")
        self._tell_scheduler()

    def _avoid_suspects(self, suspicions: int) -> None:
        for rank, why in read_suspects(self.run_dir, _ATTEMPT, after=suspicions).items():
            name = self._name_of(rank // self.ranks)
            if name is not None:
                self._avoid(name, f"rank {rank}: {why}")

    def _avoid_itself(self) -> None:
        failures = failures_of_host(self.run_dir, self.name)
        if self.start in failures and len(failures) >= HOST_FAILURES:
            self._avoid(self.name, f"failed {len(failures)} times, the last: {failures[self.start]}")

    def _count_lost(self) -> None:
        """A host that was lost could not say so: all nodes of the next start come to the same about it."""
        start, _, host = self.lost.partition(" ")
        if not host:
            return
        why = "it was lost with its ranks"
        try:
            failures = failures_of_host(self.run_dir, host)
            if self.node == 0 and start not in failures:
                tell_failed_host(self.run_dir, host, start=start, why=why)
            times = len({*failures, start})
            if times >= HOST_FAILURES:
                self._avoid(host, f"failed {times} times, the last: {why}")
        except OSError as error:
            _say(f"{error.filename}: {error.strerror}; that host {host} was lost is not counted")

    def _avoid(self, name: str, why: str) -> None:
        """OSError."""
        if avoid_host(self.run_dir, Avoided(name, None, self.restarts, why)):
            _say(f"the run keeps away from host {name} from now on: {why}")

    def _tell_scheduler(self) -> None:
        try:
            avoided = read_whole_avoided(self.run_dir)
        except OSError as error:
            # without a word of any node the scheduler's list stays as it is
            _say(f"{error.filename}: {error.strerror}; which hosts are avoided can't be read")
            return
        for problem in avoided.problems:
            self._say_once(f"{problem.message}; mend it, or the next start ends with {RecipeError.exit_code}")
        names = []
        for name in avoided.hosts:
            if _NAME.fullmatch(name):
                names.append(name)
            else:
                self._say_once(f"{self.run_dir / AVOIDED}: {name} is no name of a host, and is not left out")
        self._write("left-out", self.name, "".join(f"{name}\n" for name in names))

    def _names(self) -> list[str]:
        """All hosts of this job. OSError."""
        return read_inside(self.folder, "hosts", limit=_LIMIT).decode(errors="replace").split()

    def _name_of(self, node: int) -> str | None:
        try:
            return read_inside(self.folder, f"nodes/{node}", limit=_LIMIT).decode(errors="replace")
        except OSError:
            return None

    def _write(self, kind: str, name: str, text: str) -> None:
        """A file of the job's folder, whole. One that can't be written costs what it says, never the run."""
        try:
            write_beside(self.folder / kind / name, [text.encode()]).replace(self.folder / kind / name)
        except OSError as error:
            _say(f"{self.folder / kind / name}: {error.strerror}; the run goes on")

    def _say_once(self, text: str) -> None:
        """By the first node alone."""
        if self.node == 0:
            _say(text)


def _failed_by_itself(outcome: Outcome) -> bool:
    """Whether a rank of this node was killed by a signal that nobody sent. SIGABRT is NCCL's way to end a rank that
    misses another one; a request to stop is none of this; and what needs too much memory needs it everywhere."""
    cause = outcome.cause
    if cause is None or cause.signal is None:
        return False
    is_asked = cause.by_launcher or cause.signal == signal.SIGABRT or cause.signal in REQUESTS
    return not is_asked and not cause.for_memory


def _say(text: str) -> None:
    print(printable(f"megaspec: {text}"), file=sys.stderr, flush=True)
