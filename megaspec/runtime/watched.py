"""What a rank shows of itself to who watches it: that it gets on, at what, and its collectives."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

from megaspec.core import counted
from megaspec.core.collective_word import words_of_collective
from megaspec.launcher import beat as beats
from megaspec.launcher.beat import Beat, PageState, Word
from megaspec.runtime.position import Position, innermost, pending_collective, stack_of

# How long a rank whose collective failed waits until the others' places are told: they are lost when it ends.
_TOLD_SECONDS = 4.0


def begin_watched() -> None:
    """From now on this rank is expected to get on, if somebody watches it."""
    beat = beats.current()
    if beat is None:
        return
    counted.publish(beat.page.words, Word.COLLECTIVE, tell_groups=beat.page.write_groups)
    beat.expect(PageState.STARTING)


@contextmanager
def watched(position: Position) -> Iterator[None]:
    """While entered, the rank is expected to get on as its position says."""
    beat = beats.current()
    if beat is None:
        yield
        return
    show = _Shown(position, beat)
    beat.progress = show.progress
    beat.where = show.where
    beat.more = show.more
    position.page = beat.page
    beat.page.write_where(position.what)
    beat.expect(PageState.WATCHED)
    try:
        yield
    finally:
        beat.expect(PageState.LEFT)


def is_told_by_watcher(error: BaseException) -> bool:
    """A collective of this rank failed: whoever watches it says where every rank stands, before this returns.

    False: nobody watches.
    """
    beat = beats.current()
    if beat is None or not beat.has_watcher():
        return False
    beat.failed_at = extract_tb(error.__traceback__)
    beat.expect(PageState.FAILED)
    beat.wait_until_told(_TOLD_SECONDS)
    return True


class _Shown:
    """Called by the side thread."""

    def __init__(self, position: Position, beat: Beat):
        self._position = position
        self._beat = beat
        self._thread = threading.get_ident()
        self._where = position.what

    def progress(self) -> int:
        self._where, count = self._position.reached()
        return count

    def where(self) -> str:
        return self._where

    def more(self) -> dict[str, Any]:
        pending = ""
        if self._position.device.type == "cuda":
            # inside of compiled blocks only NCCL knows
            pending = pending_collective().removeprefix(", ")
        return {
            "collective": pending or words_of_collective(counted.latest(), counted.group_names()),
            "counts": counted.group_counts(),
            "line": innermost(self._beat.failed_at or stack_of(self._thread)).removeprefix(", "),
        }
