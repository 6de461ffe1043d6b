"""Pipeline passes in time, and when a rank begins to receive what others make.

Note "One order of messages". A host may have to wait for its GPU at any moment: a kernel is loaded when it first runs,
the allocator gives memory back to get other memory. Then all that it has started must come to its end without it, a
receive with the message that it is for, and a message with its receive. So all ranks start passes and messages as one
order of the whole pipeline has them, that in which passes end if stages take alike: whatever of it is not done yet, the
first has all its ranks there. A message is begun before the pass during which it arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from megaspec.parallelism.passes import Message, Shape, made, orders, passes, rank_of_stage, stage_number


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
    busy: tuple[float, ...]
    """Seconds of passes, by rank."""
    starts: tuple[tuple[float, ...], ...]
    """When each pass of each rank starts, in the order of the schedule."""


def simulate(shape: Shape, durations: Durations, *, backward: bool = True, until: float = inf) -> Timeline:
    """Every pass starts when its rank is free and what it waits for has arrived. Without `backward` the forward ones
    alone. `until`: only those that start before, and no more of the order is made than they need."""
    pp, last = shape.pp, shape.pp * shape.virtual - 1
    whole = orders(shape, backward=backward) if until == inf else [passes(shape, rank) for rank in range(pp)]
    todo = [iter(one) for one in whole]
    waiting = [next(one, None) for one in todo]
    stage = [[stage_number(r, c, pp=pp, is_v=shape.is_v) for c in range(shape.virtual)] for r in range(pp)]
    rank_at = {stage[r][c]: r for r in range(pp) for c in range(shape.virtual)}
    seconds = {"F": durations.forward, "B": durations.backward, "W": durations.weight}
    ends: dict[tuple[str, int, int], float] = {}
    clock, starts = [0.0] * pp, [[] for _ in range(pp)]
    runnable = list(range(pp))
    while runnable:
        rank = runnable.pop()
        while waiting[rank] is not None and clock[rank] < until:
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
            clock[rank] = start + seconds[kind][here]
            starts[rank].append(start)
            waiting[rank] = next(todo[rank], None)
            if kind != "W":
                ends[kind, here, micro] = clock[rank]
                after = here + 1 if kind == "F" else here - 1
                if 0 <= after <= last and rank_at[after] != rank:
                    runnable.append(rank_at[after])
    assert until < inf or not any(waiting), f"{shape} waits for itself"
    busy = tuple(b * shape.micro_batches for b in busy_per_micro_batch(shape, durations))
    return Timeline(max(clock), busy, tuple(tuple(s) for s in starts))


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


@lru_cache(maxsize=64)
def receives(shape: Shape, rank: int, *, backward: bool = True, overlap: bool = True) -> tuple[Receives, ...]:
    """By pass of a rank; `overlap`: what arrives during a pass is begun before it, otherwise behind. See the note "One
    order of messages"."""
    times = _times(shape, backward=backward)
    todo = orders(shape, backward=backward)
    arriving = []
    for sender in {(rank - 1) % shape.pp, (rank + 1) % shape.pp} - {rank}:
        sent = zip(times[sender], (made(shape, sender, one) for one in todo[sender]), strict=True)
        arriving += [
            (end, sender, message)
            for (_, end), message in sent
            if message is not None and rank_of_stage(shape, message.stage) == rank
        ]
    arriving.sort()
    found, number = [], 0
    for start, end in times[rank]:
        before: list[Message] = []
        behind: list[Message] = []
        while number < len(arriving) and arriving[number][:2] < (end, rank):
            there, _, message = arriving[number]
            (before if overlap or there <= start else behind).append(message)
            number += 1
        found.append(Receives(tuple(before), tuple(behind)))
    assert number == len(arriving), f"rank {rank} of {shape} does not receive {arriving[number:]}"
    return tuple(found)


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
