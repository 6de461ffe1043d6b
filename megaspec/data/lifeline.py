"""A worker never outlives the process that started it: killed (SIGKILL) that process can tell nobody."""

import os
import threading
import time
from collections.abc import Sequence

_LOOK_SECONDS = 0.5
_ORPHANED = 74


def end_with_parent(words: Sequence[str]) -> None:
    """Ends this process within a second of its parent's end, in the middle of whatever it does.

    `words`: its command line, whose last is the parent's process id, so that a parent that is gone before this is
    called is missed, too. The kernel's own word for it (PR_SET_PDEATHSIG) would come when the parent's thread ends.
    """
    parent = int(words[-1])
    thread = threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True)
    thread.start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    # not sys.exit: the main thread may be busy for long, and nobody reads what it makes
    os._exit(_ORPHANED)
