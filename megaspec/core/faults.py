"""Named places at which a test may make a process fail. Nothing happens at them unless a fault was armed.

The environment variable MEGASPEC_FAULT="name:count" makes the process kill itself (SIGKILL) the count-th time it comes
to `name`; `name` alone means the first time.
"""

import os
import signal
from collections.abc import Callable

ENVIRONMENT = "MEGASPEC_FAULT"

_armed: dict[str, tuple[int, Callable[[], None]]] = {}


def kill_self() -> None:
    """End this process at once, as the kernel does when memory runs out or a job's time is up."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, action: Callable[[], None] = kill_self, *, count: int = 1) -> None:
    """Run `action` the count-th time that `failpoint(name)` is called, and every time after it."""
    assert count >= 1, f"count={count} must be at least 1"
    _armed[name] = (count, action)


def disarm() -> None:
    """Forget every armed fault."""
    _armed.clear()


def failpoint(name: str) -> None:
    """Say that execution has come to `name`."""
    if name not in _armed:
        return
    left, action = _armed[name]
    _armed[name] = (left - 1, action)
    if left <= 1:
        action()


def arm_from_environment() -> None:
    """Arm what MEGASPEC_FAULT asks for. Called once, when this module is imported."""
    wanted = os.environ.get(ENVIRONMENT, "")
    if wanted:
        name, _, count = wanted.partition(":")
        arm(name, count=int(count or 1))


arm_from_environment()
