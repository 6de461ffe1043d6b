"""Whether this process was asked to stop. Torch-free."""

import signal
from types import FrameType

_asked: list[int] = []
_watching: list[int] = []


def watch_signals() -> None:
    """From now on SIGTERM and SIGINT ask this process to stop instead of ending it. A second call changes nothing.

    The local launcher calls it in every rank before anything else runs there, so that no request is lost; a process
    that was started otherwise calls it itself, in its main thread.
    """
    if _watching:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note)
        _watching.append(number)


def stop_requested() -> bool:
    """True once SIGTERM or SIGINT has arrived. Costs nothing: ask as often as you like."""
    return bool(_asked)


def _note(number: int, _: FrameType | None) -> None:
    _asked.append(number)
