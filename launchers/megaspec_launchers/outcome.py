"""From how each rank ended to one exit code, and to the rank that was the first cause. Torch-free, pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaspec_launchers.standing import UNKNOWN, Standing

# Exit codes of core/errors.py that are told apart here.
DONE = 0
MEMORY = 64
INTERNAL = 70
HANG = 74
PREEMPTED = 75
# Codes by which a rank names the cause; what the other ranks report is then a consequence.
CAUSES = (64, 65, 66, 73, 76, 77, 78)
# Failures that another attempt may not meet again.
WORTH_ANOTHER_ATTEMPT = (INTERNAL, HANG)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: with an exit code, or killed by a signal (then `code` is None)."""

    rank: int
    code: int | None
    signal: int | None = None
    by_launcher: bool = False
    """The launcher had sent it that signal."""
    standing: Standing = UNKNOWN
    """What it was doing, where the launcher had to kill it."""
    for_memory: bool = False
    """The kernel killed it because memory ran out."""
    ended_at: float = 0.0
    """Seconds on this machine's monotonic clock when it was found to have ended; equal for those found at one look."""

    @property
    def is_clean(self) -> bool:
        return self.code in (DONE, PREEMPTED)

    @property
    def explains_others(self) -> bool:
        """It failed by itself: what others report of a collective is a consequence, and tells nothing more."""
        return not self.is_clean and not self.by_launcher and self.code != HANG

    def __str__(self) -> str:
        if self.signal is None:
            return f"rank {self.rank} ended with exit code {self.code}"
        name = signal.Signals(self.signal).name
        if self.by_launcher and self.signal == signal.SIGKILL:
            return f"rank {self.rank} did not end in time and was killed: {self.standing}"
        if self.by_launcher:
            return f"rank {self.rank} was ended by {name} because the run was ending"
        if self.for_memory:
            return (
                f"rank {self.rank} was killed because memory ran out on this machine or in this job, and another "
                "attempt would meet that again; give the job more memory, or run fewer or smaller ranks on a machine"
            )
        may_be_memory = ", by hand or because memory ran out" if self.signal == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {name}{may_be_memory}"


@dataclass(frozen=True)
class Outcome:
    """What an attempt came to. `cause` is the rank that decided it; None when every rank ended well."""

    code: int
    cause: RankEnd | None
    why: str = ""
    """Where no rank decided it: what did."""

    def __str__(self) -> str:
        if self.cause is not None:
            return str(self.cause)
        return self.why


def judge(ends: Sequence[RankEnd], *, memory_kills: int = 0) -> Outcome:
    """One exit code for all ranks, and the first cause. `ends`: at least one, in any order.

    The order in which ranks are heard of is not that in which they failed: a large process takes seconds to die, while
    those that miss it are gone at once. So what an end is decides, not when it came; see `_likelihood`. Of ends that
    are equally likely the cause the earliest is named, and the lowest rank where times don't order them. Without a
    failure: 75 when any rank was preempted, else 0.

    `memory_kills`: processes of this job that the kernel killed meanwhile because memory ran out. A rank that was
    killed then ends the run with 64, as one does that needs more memory than its GPU has: another attempt would meet
    it again.
    """
    failed = [end for end in ends if not end.is_clean]
    if not failed:
        is_preempted = any(end.code == PREEMPTED for end in ends)
        return Outcome(PREEMPTED if is_preempted else DONE, None)
    cause = min(failed, key=_precedence)
    if cause.code in CAUSES:
        assert cause.code is not None, cause
        return Outcome(cause.code, cause)
    is_killed = cause.signal == signal.SIGKILL and not cause.by_launcher
    if is_killed and memory_kills:
        return Outcome(MEMORY, replace(cause, for_memory=True))
    is_crash = cause.signal is None and cause.code != HANG
    if is_crash:
        return Outcome(INTERNAL, cause)
    return Outcome(HANG, cause)


def _precedence(end: RankEnd) -> tuple[int, int, float, int]:
    """The lower, the sooner an end is named as the cause."""
    kind, detail = _likelihood(end)
    # when the launcher ended a rank says nothing about when the rank went wrong
    ended_at = 0.0 if end.by_launcher else end.ended_at
    return kind, detail, ended_at, end.rank


def _likelihood(end: RankEnd) -> tuple[int, int]:
    """The lower, the likelier an end is the cause of the others."""
    if end.by_launcher:
        if end.signal != signal.SIGKILL:
            return 7, 0  # a survivor: it was asked to end
        kind = 4 if end.standing.is_halted else 6
        return kind, end.standing.blame
    if end.code in CAUSES:
        return 0, 0  # it named the cause
    if end.signal == signal.SIGKILL:
        return 1, 0  # nothing that another rank does sends this
    if end.signal == signal.SIGABRT:
        return 3, 0  # NCCL's way to end a rank that misses another one
    if end.signal is not None:
        return 1, 1
    if end.code == HANG:
        return 5, 0  # a collective failed, as they do when another rank is gone
    # an error of its own; ranks that hear of another's through a collective end with the code of an internal one
    return 2, int(end.code == INTERNAL)
