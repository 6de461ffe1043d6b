"""Pipeline passes in time, and when a rank begins to receive what others make.

Note "One order of messages". A host may have to wait for its GPU at any moment: a kernel is loaded when it first runs,
the allocator gives memory back to get other memory. Then all that it has started must come to its end without it, a
receive with the message that it is for, and a message with its receive. So all ranks start passes and messages as one
order of the whole pipeline has them: whatever of it is not done yet, all ranks that the first needs have come to it.
Where a rank begins to receive in that order decides under which of its passes the transfer runs.
"""

# A rank is one of the pp pipeline ranks and holds `virtual` chunks; each chunk is one of the pp · virtual stages, which
# are numbered in the order of the model. Kinds of passes: F forward, B backward, W weight gradient (see passes.py).

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    pp = shape.pp
    last_stage = pp * shape.virtual - 1
    if until == inf:
        todo = list(map(iter, orders(shape, backward=backward)))
    else:
        todo = [passes(shape, rank, backward=backward) for rank in range(pp)]
    # the next pass of each rank; None: it is through
    waiting = [next(passes_of_rank, None) for passes_of_rank in todo]
    # the loop below runs for every layout that `tune` looks at: stages are looked up in it, not computed
    stage_of = _stages_of_ranks(shape)
    rank_at = [rank_of_stage(shape, stage) for stage in range(last_stage + 1)]
    seconds = _by_kind(durations)

    ends: dict[tuple[str, int, int], float] = {}  # (kind, stage, micro batch) -> when that pass ends
    clock = [0.0] * pp  # when each rank is free
    starts: list[list[float]] = [[] for _ in range(pp)]
    runnable = list(range(pp))
    while runnable:
        rank = runnable.pop()
        # As far as this rank comes. Where it lacks something, the rank that makes that enters it again.
        while waiting[rank] is not None:
            kind, micro, chunk = waiting[rank]
            stage = stage_of[rank][chunk]
            step = 1 if kind == "F" else -1  # activations go down the model, their gradients up
            sender = stage - step
            receiver = stage + step
            ready = 0.0
            if kind != "W" and 0 <= sender <= last_stage:
                end = ends.get((kind, sender, micro))
                if end is None:
                    break
                ready = end
                if rank_at[sender] != rank:
                    ready += durations.transfer
            start = max(clock[rank], ready)
            if start >= until:
                break
            clock[rank] = start + seconds[kind][stage]
            starts[rank].append(start)
            waiting[rank] = next(todo[rank], None)
            if kind != "W":
                ends[kind, stage, micro] = clock[rank]
                if 0 <= receiver <= last_stage and rank_at[receiver] != rank:
                    runnable.append(rank_at[receiver])
    assert until < inf or not any(waiting), f"{shape} waits for itself"
    return Timeline(max(clock), tuple(map(tuple, starts)))


def seconds_if_late(shape: Shape, durations: Durations) -> float:
    """From the first pass to the last where messages are begun as `receives` has them without `overlap`."""
    seconds = _by_kind(durations)
    clock = [0.0] * shape.pp  # when each rank is free
    arrivals: dict[Message | None, float] = {}
    for rank, event in _by_time(shape, backward=True):
        if isinstance(event, Pass):
            ready = arrivals.pop(needed(shape, rank, event), 0.0)
            stage = stage_number(rank, event.chunk, pp=shape.pp, is_v=shape.is_v)
            clock[rank] = max(clock[rank], ready) + seconds[event.kind][stage]
        else:
            receiver = rank_of_stage(shape, event.stage)
            if receiver == rank:
                arrivals[event] = clock[rank]
            else:
                # send and receive meet: the transfer runs once both ranks have come to it
                begun = max(clock[rank], clock[receiver])
                arrivals[event] = begun + durations.transfer
    return max(clock)


def busy_per_micro_batch(shape: Shape, durations: Durations) -> list[float]:
    """Seconds of passes, by rank."""
    by_stage = []
    for forward, backward, weight in zip(durations.forward, durations.backward, durations.weight, strict=True):
        by_stage.append(forward + backward + weight)
    return by_rank(shape, by_stage)


def by_rank(shape: Shape, by_stage: Sequence[float]) -> list[float]:
    """Sums over the chunks of each rank."""
    sums = []
    for stages in _stages_of_ranks(shape):
        sums.append(sum(by_stage[stage] for stage in stages))
    return sums


def _stages_of_ranks(shape: Shape) -> list[list[int]]:
    """The stages that each rank holds, by chunk."""
    found: list[list[int]] = []
    for rank in range(shape.pp):
        found.append([stage_number(rank, chunk, pp=shape.pp, is_v=shape.is_v) for chunk in range(shape.virtual)])
    return found


def _by_kind(durations: Durations) -> dict[str, tuple[float, ...]]:
    """Seconds of a pass by its kind, then by stage."""
    return {"F": durations.forward, "B": durations.backward, "W": durations.weight}


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


@dataclass
class _ReceivesSoFar:
    """What is known of a rank's receives on the way through the order."""

    found: list[Receives] = field(default_factory=list)
    before: list[Message] = field(default_factory=list)
    """That it begins to receive before its next pass."""
    behind: list[Message] = field(default_factory=list)
    """That it begins to receive behind the pass that it has started."""
    has_to_send: bool = False
    """It is between a pass that makes a message and the sending of it."""


@lru_cache(maxsize=8)
def _receives(shape: Shape, *, backward: bool, overlap: bool) -> tuple[tuple[Receives, ...], ...]:
    """Each rank's part of the one order."""
    events = _in_turn(shape, backward=backward) if overlap else _by_time(shape, backward=backward)
    ranks = [_ReceivesSoFar() for _ in range(shape.pp)]
    for rank, event in events:
        here = ranks[rank]
        if isinstance(event, Pass):
            here.found.append(Receives(tuple(here.before), ()))
            here.before.clear()
            here.has_to_send = made(shape, rank, event) is not None
        else:
            here.found[-1] = here.found[-1]._replace(behind=tuple(here.behind))
            here.behind.clear()
            here.has_to_send = False
            receiver = rank_of_stage(shape, event.stage)
            if receiver == rank:
                continue
            if ranks[receiver].has_to_send:
                ranks[receiver].behind.append(event)
            else:
                ranks[receiver].before.append(event)
    for here in ranks:
        assert not here.before, f"{shape} leaves {here.before}"
        assert not here.behind, f"{shape} leaves {here.behind}"
    return tuple(tuple(here.found) for here in ranks)


Event = tuple[int, Pass | Message]
"""A rank starts a pass, or sends what its last one made."""


class _TurnQueue:
    """Ranks whose next pass has what it needs, the one whose pass ends first at the front.

    Last come the passes that are followed by one whose message is not made yet: what they would begin to receive is not
    on its way before somebody else has been given a turn.
    """

    def __init__(self, shape: Shape, *, backward: bool):
        self._todo = orders(shape, backward=backward)
        self._times = _times(shape, backward=backward)
        # by rank, what each pass needs; behind the last pass comes one that needs nothing
        self._needs: list[list[Message | None]] = []
        for rank, passes_of_rank in enumerate(self._todo):
            self._needs.append([*(needed(shape, rank, pass_) for pass_ in passes_of_rank), None])
        self._next = [0] * shape.pp  # number of each rank's next pass
        self._made: set[Message | None] = {None}
        # (end of the pass, rank, number of the pass)
        self._first: list[tuple[float, int, int]] = []
        self._last: list[tuple[float, int, int]] = []
        for rank in range(shape.pp):
            self.enter(rank)

    def enter(self, rank: int) -> None:
        """A rank whose pass may have got what it needs. It may be entered twice."""
        number = self._next[rank]
        if number == len(self._todo[rank]) or self._needs[rank][number] not in self._made:
            return
        _, end = self._times[rank][number]
        is_followed_at_once = self._needs[rank][number + 1] in self._made
        heappush(self._first if is_followed_at_once else self._last, (end, rank, number))

    def has_made(self, message: Message) -> None:
        """Passes may need this message from now on."""
        self._made.add(message)

    def __iter__(self) -> Iterator[tuple[int, Pass]]:
        while self._first or self._last:
            _, rank, number = heappop(self._first or self._last)
            if number < self._next[rank]:
                continue  # it was entered twice
            self._next[rank] += 1
            yield rank, self._todo[rank][number]


def _in_turn(shape: Shape, *, backward: bool) -> Iterator[Event]:
    """Pass by pass, with what it makes behind it, in the order of a _TurnQueue."""
    queue = _TurnQueue(shape, backward=backward)
    for rank, pass_ in queue:
        yield rank, pass_
        message = made(shape, rank, pass_)
        if message is not None:
            yield rank, message
            queue.has_made(message)
            queue.enter(rank_of_stage(shape, message.stage))
        queue.enter(rank)


def _by_time(shape: Shape, *, backward: bool) -> Iterator[Event]:
    """Passes when they start, messages when the pass that makes them ends."""
    todo = orders(shape, backward=backward)
    times = _times(shape, backward=backward)
    # (when, whether it is a pass, rank, event): what is sent comes before a pass that starts at the same moment
    timed: list[tuple[float, bool, int, Pass | Message]] = []
    for rank in range(shape.pp):
        for pass_, (start, end) in zip(todo[rank], times[rank], strict=True):
            timed.append((start, True, rank, pass_))
            message = made(shape, rank, pass_)
            if message is not None:
                timed.append((end, False, rank, message))
    timed.sort(key=lambda entry: entry[:3])
    for _, _, rank, event in timed:
        yield rank, event


@lru_cache(maxsize=8)
def _times(shape: Shape, *, backward: bool) -> tuple[list[tuple[float, float]], ...]:
    """When the passes of each rank start and end if all stages take alike: F 1, B and W together 2."""
    stages = shape.pp * shape.virtual
    seconds = {"F": 1.0, "B": 2.0, "W": 0.0}
    if shape.splits_backward:
        seconds = {"F": 1.0, "B": 1.0, "W": 1.0}
    alike = Durations(
        forward=(seconds["F"],) * stages, backward=(seconds["B"],) * stages, weight=(seconds["W"],) * stages
    )
    timeline = simulate(shape, alike, backward=backward)
    found: list[list[tuple[float, float]]] = []
    for starts, passes_of_rank in zip(timeline.starts, orders(shape, backward=backward), strict=True):
        times = [(start, start + seconds[pass_.kind]) for start, pass_ in zip(starts, passes_of_rank, strict=True)]
        found.append(times)
    return tuple(found)
