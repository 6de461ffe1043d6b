"""Pipeline passes in time, and when a rank begins to receive what others make.

Note "One order of messages". A host may have to wait for its GPU at any moment: a kernel is loaded when it first runs,
the allocator gives memory back to get other memory. Then all that it has started must come to its end without it, a
receive with the message that it is for, and a message with its receive. So all ranks start passes and messages as one
order of the whole pipeline has them: whatever of it is not done yet, all ranks that the first needs have come to it.
Where a rank begins to receive in that order decides under which of its passes the transfer runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megaspec.parallelism.passes import Message, Pass, Shape, made, needed, orders, passes, rank_of_stage, stage_number


@dataclass(frozen=True)
class Durations:
    """Seconds of a pass, by stage in the order of the model. With a whole backward pass `backward` holds all of it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """Zero where the backward pass is not split."""
    transfer: float = 0.0
    """From one rank to the next."""


@dataclass(frozen=True)
class Timeline:
    """A step's passes in time."""

    seconds: float
    """From the first pass to the last."""
    starts: tuple[tuple[float, ...], ...]
    """When each pass of each rank starts, in the order of the schedule."""


def simulate(shape: Shape, durations: Durations, *, backward: bool = True, until: float = inf) -> Timeline:
    """Every pass starts when its rank is free and what it waits for has arrived. Without `backward` the forward ones
    alone. `until`: only those that start before, and no more of the order is made than they need."""
    pp, last = shape.pp, shape.pp * shape.virtual - 1
    if until == inf:
        todo = [iter(one) for one in orders(shape, backward=backward)]
    else:
        todo = [(one for one in passes(shape, rank) if backward or one.kind == "F") for rank in range(pp)]
    waiting = [next(one, None) for one in todo]
    stage = [[stage_number(r, c, pp=pp, is_v=shape.is_v) for c in range(shape.virtual)] for r in range(pp)]
    rank_at = {stage[r][c]: r for r in range(pp) for c in range(shape.virtual)}
    seconds = {"F": durations.forward, "B": durations.backward, "W": durations.weight}
    ends: dict[tuple[str, int, int], float] = {}
    clock, starts = [0.0] * pp, [[] for _ in range(pp)]
    runnable = list(range(pp))
    while runnable:
        rank = runnable.pop()
        while waiting[rank] is not None:
            kind, micro, chunk = waiting[rank]
            here = stage[rank][chunk]
            before = here - 1 if kind == "F" else here + 1
            ready = 0.0
            if kind != "W" and 0 <= before <= last:
                end = ends.get((kind, before, micro))
                if end is None:
                    break
                ready = end if rank_at[before] == rank else end + durations.transfer
            start = max(clock[rank], ready)
            if start >= until:
                break
            clock[rank] = start + seconds[kind][here]
            starts[rank].append(start)
            waiting[rank] = next(todo[rank], None)
            if kind != "W":
                ends[kind, here, micro] = clock[rank]
                after = here + 1 if kind == "F" else here - 1
                if 0 <= after <= last and rank_at[after] != rank:
                    runnable.append(rank_at[after])
    assert until < inf or not any(waiting), f"{shape} waits for itself"
    return Timeline(max(clock), tuple(tuple(s) for s in starts))


def seconds_if_late(shape: Shape, durations: Durations) -> float:
    """From the first pass to the last where messages are begun as `receives` has them without `overlap`."""
    seconds = {"F": durations.forward, "B": durations.backward, "W": durations.weight}
    clock, there = [0.0] * shape.pp, dict[Message | None, float]()
    for rank, event in _by_time(shape, backward=True):
        if isinstance(event, Pass):
            ready = there.pop(needed(shape, rank, event), 0.0)
            stage = stage_number(rank, event.chunk, pp=shape.pp, is_v=shape.is_v)
            clock[rank] = max(clock[rank], ready) + seconds[event.kind][stage]
        else:
            target = rank_of_stage(shape, event.stage)
            begun = max(clock[rank], clock[target])
            there[event] = clock[rank] if target == rank else begun + durations.transfer
    return max(clock)


def busy_per_micro_batch(shape: Shape, durations: Durations) -> list[float]:
    """Seconds of passes, by rank."""
    whole = [sum(each) for each in zip(durations.forward, durations.backward, durations.weight, strict=True)]
    return by_rank(shape, whole)


def by_rank(shape: Shape, by_stage: Sequence[float]) -> list[float]:
    """Sums over the chunks of each rank."""
    return [
        sum(by_stage[stage_number(rank, chunk, pp=shape.pp, is_v=shape.is_v)] for chunk in range(shape.virtual))
        for rank in range(shape.pp)
    ]


class Receives(NamedTuple):
    """What a rank begins to receive around a pass."""

    before: tuple[Message, ...]
    behind: tuple[Message, ...]
    """Once the pass has been started, before what it makes is sent."""


def receives(shape: Shape, rank: int, *, backward: bool = True, overlap: bool = True) -> tuple[Receives, ...]:
    """By pass of a rank. With `overlap` a message is begun at the latest before the pass before the one that needs it,
    where the order allows that, and nothing behind a pass. Without, behind the pass during which it is made. See the
    note "One order of messages"."""
    return _receives(shape, backward=backward, overlap=overlap)[rank]


@lru_cache(maxsize=8)
def _receives(shape: Shape, *, backward: bool, overlap: bool) -> tuple[tuple[Receives, ...], ...]:
    """Each rank's part of the one order."""
    found: list[list[Receives]] = [[] for _ in range(shape.pp)]
    before: list[list[Message]] = [[] for _ in range(shape.pp)]
    behind: list[list[Message]] = [[] for _ in range(shape.pp)]
    is_making = [False] * shape.pp  # what will be sent
    for rank, event in (_in_turn if overlap else _by_time)(shape, backward=backward):
        if isinstance(event, Pass):
            found[rank].append(Receives(tuple(before[rank]), ()))
            is_making[rank], before[rank] = made(shape, rank, event) is not None, []
        else:
            found[rank][-1] = found[rank][-1]._replace(behind=tuple(behind[rank]))
            is_making[rank], behind[rank] = False, []
            target = rank_of_stage(shape, event.stage)
            if target != rank:
                (behind if is_making[target] else before)[target].append(event)
    assert not any(before + behind), f"{shape} leaves {before}, {behind}"
    return tuple(map(tuple, found))


Event = tuple[int, Pass | Message]
"""A rank starts a pass, or sends what its last one made."""


def _in_turn(shape: Shape, *, backward: bool) -> Iterator[Event]:
    """Pass by pass, what it makes behind it: of those that have what they need the one that ends first, and last those
    that are followed by one whose message is not made yet."""
    todo, times = orders(shape, backward=backward), _times(shape, backward=backward)
    at = [0] * shape.pp
    first: list[tuple[float, int, int]] = []
    last: list[tuple[float, int, int]] = []

    # behind the last pass comes one that needs nothing
    wanted = [[*(needed(shape, rank, one) for one in mine), None] for rank, mine in enumerate(todo)]
    is_made: set[Message | None] = {None}

    def enter(rank: int) -> None:
        index = at[rank]
        if index < len(todo[rank]) and wanted[rank][index] in is_made:
            line = first if wanted[rank][index + 1] in is_made else last
            heappush(line, (times[rank][index][1], rank, index))

    for rank in range(shape.pp):
        enter(rank)
    while first or last:
        _, rank, index = heappop(first or last)
        if index < at[rank]:
            continue  # it was entered twice
        at[rank] += 1
        one = todo[rank][index]
        yield rank, one
        message = made(shape, rank, one)
        if message is not None:
            yield rank, message
            is_made.add(message)
            enter(rank_of_stage(shape, message.stage))
        enter(rank)


def _by_time(shape: Shape, *, backward: bool) -> Iterator[Event]:
    """Passes when they start, messages when the pass that makes them ends."""
    timed: list[tuple[float, bool, int, Pass | Message]] = []
    todo, times = orders(shape, backward=backward), _times(shape, backward=backward)
    for rank in range(shape.pp):
        for one, (start, end) in zip(todo[rank], times[rank], strict=True):
            timed.append((start, True, rank, one))
            message = made(shape, rank, one)
            if message is not None:
                timed.append((end, False, rank, message))
    timed.sort(key=lambda event: event[:3])
    return ((rank, event) for _, _, rank, event in timed)


@lru_cache(maxsize=8)
def _times(shape: Shape, *, backward: bool) -> tuple[list[tuple[float, float]], ...]:
    """When the passes of each rank start and end if all stages take alike: F 1, B and W together 2."""
    stages = shape.pp * shape.virtual
    seconds = {"F": 1.0, "B": 1.0, "W": 1.0} if shape.splits_backward else {"F": 1.0, "B": 2.0, "W": 0.0}
    durations = Durations(*((seconds[kind],) * stages for kind in "FBW"))
    starts = simulate(shape, durations, backward=backward).starts
    return tuple(
        [(start, start + seconds[one.kind]) for start, one in zip(here, passes_here, strict=True)]
        for here, passes_here in zip(starts, orders(shape, backward=backward), strict=True)
    )
