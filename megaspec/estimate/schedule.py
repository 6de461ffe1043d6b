"""Pipeline schedules: what the passes of parallelism/passes.py wait for each other, and what is held in between."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from megaspec.estimate.batch_sizes import data_parallel
from megaspec.parallelism.passes import (
    MESSAGES_KEPT,
    Pass,
    Shape,
    made,
    needed,
    order,
    passes,
    rank_of_stage,
    source,
    warm_up,
)
from megaspec.parallelism.timeline import Durations, busy_per_micro_batch, by_rank, receives, seconds_if_late, simulate
from megaspec.recipe import Recipe

# Steps of more passes than this, past those that only repeat, are not simulated: about a tenth of a second.
MOST_PASSES = 60_000


@dataclass(frozen=True)
class Bubble:
    """Time lost by waiting, over the busy time of the busiest rank."""

    ratio: float
    seconds: float


def shape_of(recipe: Recipe) -> Shape:
    """The schedule of a filled recipe, at its full batch."""
    own, train = recipe.parallelism, recipe.train
    micro_batches = max(1, train.global_batch // (train.micro_batch * data_parallel(own)))
    pipeline = own.pipeline
    return Shape(pipeline.schedule, own.pp, micro_batches, pipeline.virtual_stages, pipeline.micro_batch_group)


def in_flight(recipe: Recipe) -> tuple[float, ...]:
    """Activations that are held at the peak, by pipeline rank, in units of a whole rank's share for a micro batch."""
    return held(shape_of(recipe))


@lru_cache(maxsize=4096)
def held(shape: Shape) -> tuple[float, ...]:
    """Micro batches whose activations a rank holds at the peak, a chunk counted 1 / virtual."""
    pp, m, v = shape.pp, shape.micro_batches, shape.virtual
    if shape.schedule == "gpipe":
        return (float(m),) * pp
    if shape.schedule == "1f1b":
        return tuple(float(min(pp - rank, m)) for rank in range(pp))
    if shape.schedule == "interleaved":
        return tuple(min(m * v, warm_up(shape, rank) + 1) / v for rank in range(pp))
    if shape.schedule == "zb_h1":
        return (float(min(pp, m)),) * pp
    return tuple(min(2 * m, 2 * pp, m + 1 + rank) / v for rank in range(pp))


class Later(NamedTuple):
    """Micro batches that a rank holds at most, a chunk counted 1 / virtual, after the peak of its forward passes."""

    behind: float
    """When a backward pass begins behind another one, on the first rank behind one of its first stage."""
    at_embedding: float
    """When a backward pass of its first stage ends."""


@lru_cache(maxsize=4096)
def held_later(shape: Shape, rank: int) -> Later:
    """Found along the passes of a step, of which many micro batches repeat some."""
    enough = 4 * max(shape.pp, shape.group)
    if shape.micro_batches > enough:
        return held_later(replace(shape, micro_batches=enough), rank)
    if shape.micro_batches * shape.virtual > MOST_PASSES:
        # at least as much
        return Later(held(shape)[rank], held(shape)[rank])
    now, behind, at_embedding, is_behind = 0, 0, 0, False
    for one in passes(shape, rank):
        if one.kind == "B":
            behind = max(behind, now * is_behind)
            is_first = one.chunk == 0
            is_behind = is_behind or rank > 0 or is_first
            at_embedding = max(at_embedding, (now - 1) * is_first)
        now += {"F": 1, "B": -1, "W": 0}[one.kind]
    return Later(behind / shape.virtual, at_embedding / shape.virtual)


class Waiting(NamedTuple):
    """Micro batches of a chunk that a rank holds."""

    for_backward: float
    """Whose backward pass has not begun, or begins."""
    for_weights: int
    """Whose weight gradients are deferred."""


Moment = tuple[Waiting, ...]
"""What a rank holds of each of its chunks."""


class Moments(NamedTuple):
    """When a rank may be at its peak. It depends on what either kind takes, and on the layers of a chunk."""

    at_head: tuple[Moment, ...]
    """While its last chunk runs: of the rank that has the output head."""
    at_layers: tuple[Moment, ...]
    """When a backward pass begins."""


@lru_cache(maxsize=4096)
def held_by_chunk(shape: Shape, rank: int, *, alike: bool = False) -> Moments:
    """Where most weight gradients are deferred, where most is held, and where most waits for its backward pass. Of
    moments that differ in the chunks only, one where these are `alike`."""
    if shape.virtual == 1 and not shape.splits_backward:
        whole = ((Waiting(held(shape)[rank], 0),),)
        return Moments(whole, whole)
    enough = 4 * max(shape.pp, shape.group) + shape.micro_batches % shape.group
    if shape.micro_batches > enough:
        return held_by_chunk(replace(shape, micro_batches=enough), rank, alike=alike)
    if shape.micro_batches * shape.virtual > MOST_PASSES:
        # so many that chunks hold about the same
        of_chunk = Waiting(held(shape)[rank], rank if shape.splits_backward else 0)
        every = ((of_chunk,) * shape.virtual,)
        return Moments(every, every)
    now = [Waiting(0, 0)] * shape.virtual
    at_head: set[Moment] = set()
    at_layers: set[Moment] = set()
    for one in passes(shape, rank):
        is_last = one.chunk == shape.virtual - 1
        if one.kind == "B":
            at_layers.add(tuple(now))
        if one.kind == "B" and is_last:
            at_head.add(tuple(now))
        before, later = now[one.chunk]
        deferred = int(shape.splits_backward)
        now[one.chunk] = {
            "F": Waiting(before + 1, later),
            "B": Waiting(before - 1, later + deferred),
            "W": Waiting(before, later - 1),
        }[one.kind]
        if one.kind == "F" and is_last:
            at_head.add(tuple(now))
    return Moments(_fullest(at_head, alike=alike), _fullest(at_layers, alike=alike))


def _fullest(moments: set[Moment], *, alike: bool) -> tuple[Moment, ...]:
    """Those that hold most in one of three ways."""
    found: set[Moment] = set()
    sums = {moment: tuple(map(sum, zip(*moment, strict=True))) for moment in moments}
    for size in (lambda a, b: (b, a), lambda a, b: (a + b, a), lambda a, b: (a, b)):
        most = max(size(*one) for one in sums.values())
        found |= {moment for moment, one in sums.items() if size(*one) == most}
    every = sorted(found)
    return tuple({sums[moment]: moment for moment in every}.values() if alike else every)


@lru_cache(maxsize=4096)
def catch_ups(shape: Shape, rank: int) -> tuple[int, ...]:
    """By chunk of a pipeline rank: how often in a step no weight gradient of a pass that has begun is missing. Of long
    steps each further micro batch adds the same."""
    enough = 4 * shape.pp
    if shape.micro_batches > enough:
        some, more = (catch_ups(replace(shape, micro_batches=enough + n), rank) for n in (-1, 0))
        further = shape.micro_batches - enough
        return tuple(b + further * (b - a) for a, b in zip(some, more, strict=True))
    late, times = [0] * shape.virtual, [0] * shape.virtual
    for one in passes(shape, rank):
        late[one.chunk] += {"F": 0, "B": int(shape.splits_backward), "W": -1}[one.kind]
        times[one.chunk] += one.kind == ("W" if shape.splits_backward else "B") and not late[one.chunk]
    return tuple(times)


@lru_cache(maxsize=4096)
def messages_held(shape: Shape, rank: int, *, overlap: bool) -> int:
    """Messages of a pipeline rank that are begun and not needed yet, or sent and kept, at most while a pass runs."""
    if shape.pp == 1:
        return 0
    enough = 2 * max(shape.pp, shape.group) + shape.micro_batches % shape.group
    if shape.micro_batches > enough:
        return messages_held(replace(shape, micro_batches=enough), rank, overlap=overlap)
    if shape.pp * shape.virtual * shape.micro_batches > MOST_PASSES:
        return _messages_of_a_shorter(shape, rank, overlap=overlap)
    now = most = 0
    targets = set()
    for one, due in zip(order(shape, rank), receives(shape, rank, overlap=overlap), strict=True):
        wanted, message = needed(shape, rank, one), made(shape, rank, one)
        now += len(due.before) - (wanted is not None and source(shape, wanted) != rank)
        most = max(most, now)
        now += len(due.behind)
        if message is not None:
            targets.add(rank_of_stage(shape, message.stage))
    return most + MESSAGES_KEPT * len(targets - {rank})


def _messages_of_a_shorter(shape: Shape, rank: int, *, overlap: bool) -> int:
    """Chunks behind the third add nothing, ranks in the middle hold the same, and groups that are longer by one at most
    one message more."""
    pp, group, few = shape.pp, shape.group, 16
    if shape.virtual > 3:
        return messages_held(replace(shape, virtual=3), rank, overlap=overlap)
    if pp > few:
        near = rank if rank < few // 2 else max(few // 2, few - (pp - rank))
        if shape.schedule == "interleaved":
            shorter = few + group - pp
            smaller = replace(
                shape, pp=few, group=shorter, micro_batches=shorter * min(2, shape.micro_batches // group)
            )
        else:
            smaller = replace(shape, pp=few, group=few, micro_batches=max(1, shape.micro_batches * few // pp))
        return messages_held(smaller, near, overlap=overlap)
    some, more = (
        messages_held(replace(shape, group=n * pp, micro_batches=2 * n * pp), rank, overlap=overlap) for n in (3, 4)
    )
    return more + (more - some) * (group - 4 * pp) // pp


def bubble_formula(shape: Shape) -> float:
    """Idle over busy time where all stages take the same, and of a split backward B and W each as long as F; zb_v from
    2 pp - 1 micro batches on."""
    return _idle(shape) * (shape.pp - 1) / shape.micro_batches


def _idle(shape: Shape) -> float:
    """The part of another rank's passes of a micro batch that a rank waits for."""
    return {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / shape.virtual, "zb_h1": 1 / 3, "zb_v": 1 / 6}[shape.schedule]


def bubble(shape: Shape, durations: Durations, *, overlap: bool = True) -> Bubble:
    """Of a whole step. Long steps are simulated in part: past the first micro batches each adds the same. Without
    `overlap` messages are begun late, but in steps of more than MOST_PASSES."""
    if shape.pp == 1:
        return Bubble(0.0, 0.0)
    busiest = max(busy_per_micro_batch(shape, durations)) * shape.micro_batches
    lost = max(0.0, _makespan(shape, durations, overlap=overlap) - busiest)
    return Bubble(lost / busiest if busiest else 0.0, lost)


def chart(shape: Shape, *, width: int = 72, most_ranks: int = 16) -> list[str]:
    """Ranks over time, a line each: digits are forward passes by micro batch, letters backward passes (a is micro batch
    0), + weight gradients on their own, . waiting. A chunk's forward pass is one column. What exceeds the width is cut.
    """
    # what is shown of more ranks than this is the same: the first are still in their first passes, the last has none
    few = replace(shape, pp=min(shape.pp, 2 * width))
    stages = few.pp * few.virtual
    backward = 1.0 if shape.splits_backward else 2.0
    durations = Durations((1.0,) * stages, (backward,) * stages, (2.0 - backward,) * stages)
    starts = simulate(few, durations, until=width + 1.0).starts
    shown = [r for r in range(shape.pp) if shape.pp <= most_ranks or r < most_ranks - 2 or r == shape.pp - 1]
    lines = []
    for rank in shown:
        cells: list[str] = []
        here = min(rank, few.pp - 1)
        for start, one in zip(starts[here], passes(few, here), strict=False):
            cells += ["."] * (round(start) - len(cells))
            cells += [_cell(one)] * (round(backward) if one.kind == "B" else 1)
        lines.append(f"{rank:>4} {''.join(cells[:width])}{'>' if len(cells) > width else ''}")
    return [*lines[:-1], " ...", lines[-1]] if len(shown) < shape.pp else lines


def _cell(one: Pass) -> str:
    return {"F": str(one.micro % 10), "B": chr(ord("a") + one.micro % 26), "W": "+"}[one.kind]


def _makespan(shape: Shape, durations: Durations, *, overlap: bool) -> float:
    passes_a_chunk = 3 if shape.splits_backward else 2
    count = shape.pp * shape.virtual * _shorter(shape).micro_batches * passes_a_chunk
    return _simulated(shape, durations, overlap) if count <= MOST_PASSES else makespan_formula(shape, durations)


@lru_cache(maxsize=2048)
def _simulated(shape: Shape, durations: Durations, overlap: bool) -> float:
    def seconds(of: Shape) -> float:
        return simulate(of, durations).seconds if overlap else seconds_if_late(of, durations)

    short = _shorter(shape)
    first = seconds(short)
    if short == shape:
        return first
    step = _period(shape)
    longer = replace(short, micro_batches=short.micro_batches + step)
    second = seconds(longer)
    return first + (second - first) * (shape.micro_batches - short.micro_batches) / step


def makespan_formula(shape: Shape, durations: Durations) -> float:
    """A step without simulating it: the busiest rank's passes, what it waits for while the pipeline fills and empties,
    and the way between ranks. Exact for gpipe and 1f1b with equal stages; for all else see its test."""
    pp, m, transfer = shape.pp, shape.micro_batches, durations.transfer
    busy = busy_per_micro_batch(shape, durations)
    top = max(busy)
    seconds = m * top + _idle(shape) * (sum(busy) - top)
    if shape.splits_backward:
        # few micro batches: their way through all stages, and what weight gradients can't fill
        most = max(one - weight for one, weight in zip(busy, by_rank(shape, durations.weight), strict=True))
        way = sum(durations.forward) + sum(durations.backward)
        seconds = max(seconds, way + (m - 1) * most)
    if shape.schedule == "1f1b" and m > pp:
        # a rank has no more micro batches on their way than there are ranks from it on
        behind = list(accumulate(reversed(busy), initial=0.0))
        slowest = max((behind[n] + 2 * (n - 1) * transfer) / n for n in range(1, pp + 1))
        seconds += (m - pp) * (slowest - top if slowest > top else 0.0)
    return seconds + 2 * (pp - 1) * transfer


def _period(shape: Shape) -> int:
    """Micro batches after which an order repeats itself."""
    return shape.group if shape.schedule == "interleaved" else 1


def _shorter(shape: Shape) -> Shape:
    """The same schedule with so many micro batches that one more only adds another round in the middle."""
    period = _period(shape)
    enough = 2 * shape.pp + period
    if shape.micro_batches <= enough + period:
        return shape
    return replace(shape, micro_batches=enough + (shape.micro_batches - enough) % period)
