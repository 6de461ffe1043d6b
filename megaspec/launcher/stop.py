"""Whether this process was asked to stop. Torch-free, and imported before all else: it has to be cheap."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

PREEMPTED = 75
# SIGUSR1 is what SLURM sends ahead of the end, as --signal=USR1@120 asks; SIGHUP comes from a terminal that was closed.
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The rank writes the stack of each of its threads to stderr, and goes on.
STACKS = signal.SIGUSR2
_STDERR = 2
# Commands that a scheduler stops and starts again.
_TRAIN = {"train", "resume"}

_asked: list[int] = []
"""Numbers of signals; 0: this process asks itself."""
_reasons: list[str] = []
_asked_at: list[float] = []
_watching: list[int] = []
_before_leaving: list[Callable[[], object]] = []


def leave_on_request(words: Sequence[str]) -> None:
    """From now on a request to stop ends this process at once, with 75: a run that has not begun has nothing to save.

    For the first lines of a process, before imports that take seconds; nothing happens unless the `words` of its
    command line train. Ctrl-C stays Python's own KeyboardInterrupt, and STACKS shows where the process is. What follows
    may take the signals over, as `watch_signals` does.
    """
    if not _TRAIN & set(words):
        return
    for number in REQUESTS:
        if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
    faulthandler.register(STACKS, file=_STDERR, all_threads=True)
    # held back by who started this process, so that none came before it could be heard
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


@contextmanager
def before_leaving(act: Callable[[], object]) -> Iterator[None]:
    """While entered, a request to stop that ends this process at once, see `leave_on_request`, calls `act` first.

    What has begun outside this process is then brought to an end that others can read. `act` may run between any two
    statements, so it changes nothing that this process goes on with; what it raises is lost. The last one entered runs
    first.
    """
    _before_leaving.append(act)
    try:
        yield
    finally:
        _before_leaving.remove(act)


def watch_signals() -> None:
    """From now on a signal of REQUESTS asks this process to stop instead of ending it, and STACKS shows where it is.

    A second call changes nothing. SIGHUP stays ignored where it was (nohup). The local launcher calls it in every rank
    before anything else runs there, so that no request is lost; a process that was started otherwise calls it itself,
    in its main thread.
    """
    if _watching:
        return
    for number in REQUESTS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
            _watching.append(number)
    faulthandler.register(STACKS, file=_STDERR, all_threads=True)


def stop_requested() -> bool:
    """True once a signal of REQUESTS has arrived. Costs nothing: ask as often as you like."""
    return bool(_asked)


def ask_to_stop(reason: str) -> None:
    """From now on this process is asked to stop, as by a signal of REQUESTS; the first reason counts."""
    _reasons.append(reason)
    _note(0, None)


def stopped_because() -> str:
    """The reason of `ask_to_stop`; empty where nobody gave one, or a signal came before it."""
    if not _reasons or _asked[0] != 0:
        return ""
    return _reasons[0]


def seconds_since_request() -> float | None:
    """Since the first signal of REQUESTS arrived; None while there was none."""
    if not _asked_at:
        return None
    return time.monotonic() - _asked_at[0]


def _note(number: int, _: FrameType | None) -> None:
    _asked_at.append(time.monotonic())
    _asked.append(number)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    text = f"megaspec: {signal.Signals(number).name} while no rank runs: nothing is lost, start again to go on\n"
    # another request while this one is answered would cut it off
    for request in REQUESTS:
        signal.signal(request, signal.SIG_IGN)
    try:
        os.write(_STDERR, text.encode())
    finally:
        _act_and_leave()


def _act_and_leave() -> NoReturn:
    try:
        while _before_leaving:
            act = _before_leaving.pop()
            act()
    finally:
        # also where one raises: who asked does not wait
        os._exit(PREEMPTED)
