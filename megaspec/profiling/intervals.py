"""Arithmetic on intervals of time: what was busy, what lay beside what, and how a stretch of time is shared out.

An interval is (start, end) in one unit, microseconds where it comes from a profile. Torch-free.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megaspec.profiling.kinds import COMMUNICATION, COPIES, IDLE

Interval = tuple[float, float]

# What runs beside arithmetic costs no time of its own: copy engines and links work by themselves. Of what is under way
# at a moment, that of the lowest number gets it.
_BEHIND = {COPIES: 1, COMMUNICATION: 2}


@dataclass(frozen=True)
class Where:
    """Milliseconds of one rank, a step."""

    step_ms: float
    compute_ms: float
    """Kernels and copies that are no messages."""
    messages_ms: float
    """NCCL's kernels, waiting for other ranks included."""
    exposed_ms: float
    """Messages beside which nothing is computed."""
    idle_ms: float
    """Neither."""


class Span(NamedTuple):
    """An interval, and what kind of work was under way in it."""

    start: float
    end: float
    kind: str


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time as intervals that don't touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in intervals)


def within(intervals: Iterable[Interval], windows: Iterable[Interval]) -> list[Interval]:
    """What of some intervals lies in others, as intervals that don't touch."""
    found: list[Interval] = []
    outer = union(windows)
    first = 0
    for start, end in union(intervals):
        while first < len(outer) and outer[first][1] <= start:
            first += 1
        for low, high in outer[first:]:
            if low >= end:
                break
            found.append((max(start, low), min(end, high)))
    return found


def without(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """What of some intervals lies in no hole, as intervals that don't touch."""
    left: list[Interval] = []
    cut = union(holes)
    first = 0
    for start, end in union(intervals):
        while first < len(cut) and cut[first][1] <= start:
            first += 1
        for low, high in cut[first:]:
            if low >= end:
                break
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def where(compute: Iterable[Interval], messages: Iterable[Interval], *, steps: int) -> Where:
    """From the kernels of some steps, in microseconds."""
    compute = union(compute)
    messages = union(messages)
    both = union([*compute, *messages])
    whole = 0.0
    if both:
        whole = both[-1][1] - both[0][0]
    parts = (whole, length(compute), length(messages), length(both) - length(compute), whole - length(both))
    return Where(*(round(part / 1e3 / steps, 3) for part in parts))


def shared_out(spans: Sequence[Span], windows: Iterable[Interval]) -> dict[str, float]:
    """How the time of `windows` is spent, by kind; IDLE is what no span covers. Adds up to the windows.

    Every moment counts once. Where several kinds of arithmetic are under way each gets its share by the number of its
    spans; copies count where nothing is computed, and messages where neither is.
    """
    windows = union(windows)
    found: Counter[str] = Counter()
    begins = sorted(spans)
    ends = sorted((span.end, span.kind) for span in spans)
    under_way: Counter[str] = Counter()
    moments = sorted({*(s.start for s in spans), *(s.end for s in spans), *(t for window in windows for t in window)})
    begun = 0
    ended = 0
    number = 0
    for moment, following in pairwise(moments):
        while ended < len(ends) and ends[ended][0] <= moment:
            under_way[ends[ended][1]] -= 1
            ended += 1
        while begun < len(begins) and begins[begun].start <= moment:
            # one that takes no time has ended already
            under_way[begins[begun].kind] += 1
            begun += 1
        while number < len(windows) and windows[number][1] <= moment:
            number += 1
        if number == len(windows):
            break
        if windows[number][0] > moment:
            continue
        for kind, share in _shares(under_way).items():
            found[kind] += share * (following - moment)
    return dict(found)


def _shares(under_way: Counter[str]) -> dict[str, float]:
    """Kind -> its share of a moment."""
    here = {kind: count for kind, count in under_way.items() if count > 0}
    if not here:
        return {IDLE: 1.0}
    first = min(_BEHIND.get(kind, 0) for kind in here)
    counted = {kind: count for kind, count in here.items() if _BEHIND.get(kind, 0) == first}
    total = sum(counted.values())
    return {kind: count / total for kind, count in counted.items()}
