"""Bounds on processor time that hold on a slow or busy machine too."""

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


@contextmanager
def within(seconds: float, what: object = "") -> Iterator[None]:
    """Fails where the block takes more processor time than `seconds` on an idle core."""
    start = time.process_time()
    yield
    taken = time.process_time() - start
    if taken >= seconds:
        # twice: how busy the machine was is known from a look afterwards alone
        allowed = 2 * seconds * max(1.0, max(_loop() for _ in range(5)) / _USUAL)
        assert taken < allowed, f"{taken:.2f} s of processor time, allowed {allowed:.2f}: {what}"
