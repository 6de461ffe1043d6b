"""From how each rank ended to one exit code. Torch-free, pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

DONE, INTERNAL, HANG, PREEMPTED = 0, 70, 74, 75
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
    killed_by_launcher: bool = False
    """The launcher had sent it SIGKILL."""

    @property
    def is_clean(self) -> bool:
        return self.code in (DONE, PREEMPTED)

    def __str__(self) -> str:
        if self.signal is None:
            return f"rank {self.rank} ended with exit code {self.code}"
        name = signal.Signals(self.signal).name
        if self.killed_by_launcher:
            return f"rank {self.rank} did not end in time and was killed"
        out_of_memory = ", by hand or because memory ran out" if self.signal == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {name}{out_of_memory}"


@dataclass(frozen=True)
class Outcome:
    """What an attempt came to. `cause` is the rank that decided it; None when every rank ended well."""

    code: int
    cause: RankEnd | None


def judge(ends: Sequence[RankEnd]) -> Outcome:
    """One exit code for all ranks. `ends`: in the order in which they ended, at least one.

    A rank that names the cause (bad data, no good checkpoint, ...) wins; then a rank that a signal killed, since the
    others fail because of it; then the first that failed by itself; then one that the launcher had to kill. Without a
    failure: 75 when any rank was preempted, else 0.
    """
    failed = [end for end in ends if not end.is_clean]
    if not failed:
        return Outcome(PREEMPTED if any(end.code == PREEMPTED for end in ends) else DONE, None)
    for end in failed:
        if end.code in CAUSES:
            return Outcome(end.code, end)
    for end in failed:
        if end.signal is not None and not end.killed_by_launcher:
            return Outcome(HANG, end)
    for end in failed:
        if not end.killed_by_launcher:
            return Outcome(HANG if end.code == HANG else INTERNAL, end)
    return Outcome(HANG, failed[0])
