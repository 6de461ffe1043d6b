"""Whether a supervisor starts a run again, and when. Pure: what attempts came to goes in, a verdict comes out."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaspec.launcher.spec import RestartsSpec
from megaspec_launchers.outcome import DONE, HANG, INTERNAL, PREEMPTED

WRITE = 73
HARDWARE = 77
# What another attempt may not meet again. Of a full disk others may make room; a device that is suspected is kept away.
WORTH_ANOTHER = (INTERNAL, WRITE, HANG, PREEMPTED, HARDWARE)
# Attempts in a row that end with an internal error and save nothing: the second says that it is no accident.
MOST_INTERNAL = 2
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Ended:
    """What an attempt came to."""

    at: float
    """Seconds of the supervisor's monotonic clock."""
    code: int
    has_saved: bool
    """It saved a step that no attempt before it had saved."""
    is_planned: bool = False
    """The supervisor ended it itself, since devices went or came back."""


@dataclass(frozen=True)
class Verdict:
    """What follows an attempt."""

    again: bool
    code: int
    """What the supervisor ends with, unless it starts again."""
    why: str
    """In words; "" for an end that says itself."""
    wait_seconds: float = 0.0


def decide(ends: Sequence[Ended], limits: RestartsSpec, *, spread: float) -> Verdict:
    """What follows the last of these attempts. `ends`: every one of this supervisor, in their order. `spread`: a random
    number from 0 to 1, which varies the wait by a half."""
    last = ends[-1]
    if last.code == DONE:
        return Verdict(False, DONE, "")
    if last.is_planned:
        return _since_devices_changed(ends, limits, spread=spread)
    if last.code not in WORTH_ANOTHER:
        return Verdict(False, last.code, f"exit code {last.code} would be met again")
    failures = [end for end in ends if not end.is_planned]
    in_a_row = _without_progress(ends)
    internal = failures[-MOST_INTERNAL:]
    if last.code == INTERNAL and in_a_row >= MOST_INTERNAL and all(end.code == INTERNAL for end in internal):
        return Verdict(False, INTERNAL, f"{MOST_INTERNAL} internal errors in a row, and no new step was saved")
    if in_a_row >= limits.without_progress:
        why = f"{in_a_row} attempts in a row saved no new step (launcher.restarts.without_progress)"
        return Verdict(False, _code_of_giving_up(last.code), why)
    since = last.at - limits.window_hours * SECONDS_PER_HOUR
    # this failure would be followed by one restart more than there were
    restarts = sum(end.at > since for end in failures[:-1])
    if restarts >= limits.most:
        why = f"{restarts} restarts within {limits.window_hours:g} h (launcher.restarts.most)"
        return Verdict(False, _code_of_giving_up(last.code), why)
    wait = _wait(limits, in_a_row, spread=spread)
    return Verdict(True, last.code, f"again in {wait:.1f} s, restart {restarts + 1} of {limits.most}", wait)


def _since_devices_changed(ends: Sequence[Ended], limits: RestartsSpec, *, spread: float) -> Verdict:
    """What follows an attempt that the supervisor ended itself: no failure. But where a device comes and goes while
    ranks start they would do nothing else."""
    in_vain = 0
    for end in reversed(ends):
        if end.has_saved or not end.is_planned:
            break
        in_vain += 1
    if in_vain <= 1:
        return Verdict(True, ends[-1].code, "at once, since devices have changed")
    wait = _wait(limits, in_vain, spread=spread)
    why = f"in {wait:.1f} s, since devices have changed {in_vain} times before a step was saved"
    return Verdict(True, ends[-1].code, why, wait)


def _wait(limits: RestartsSpec, in_a_row: int, *, spread: float) -> float:
    """Seconds before a restart, after so many attempts in a row that saved no new step."""
    wait = min(limits.longest_wait_seconds, limits.first_wait_seconds * 2.0 ** min(in_a_row, 60))
    return wait * (0.5 + spread)


def _without_progress(ends: Sequence[Ended]) -> int:
    """How many of the last failures, one after the other, saved no new step. Attempts that devices have ended are none,
    but what they saved is progress."""
    count = 0
    for end in reversed(ends):
        if end.has_saved:
            break
        if not end.is_planned:
            count += 1
    return count


def _code_of_giving_up(code: int) -> int:
    """A scheduler starts again after HANG and PREEMPTED: it is told that a person has to look. What names a cause
    stays."""
    if code in (HANG, PREEMPTED):
        return INTERNAL
    return code
