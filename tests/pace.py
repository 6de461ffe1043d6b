"""Bounds on processor time that hold on a slow or busy machine too."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds of `_loop` on an idle core, the quickest of 15.
_USUAL = 0.027


def _loop() -> float:
    start, total, held = time.process_time(), 0, {}
    for i in range(200_000):
        held[i & 1023] = total
        total += i ^ (total & 7)
    return time.process_time() - start


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def within(seconds: float, what: object = "", *, children: bool = False) -> Iterator[None]:
    """Fails where the block, with `children` the processes that ended in it, takes more processor time than `seconds`
    on an idle core."""
    clock = _of_children if children else time.process_time
    start = clock()
    yield
    taken = clock() - start
    if taken >= seconds:
        # twice: how busy the machine was is known from a look afterwards alone
        allowed = 2 * seconds * max(1.0, max(_loop() for _ in range(5)) / _USUAL)
        assert taken < allowed, f"{taken:.2f} s of processor time, allowed {allowed:.2f}: {what}"
