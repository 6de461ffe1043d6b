"""Layers divided by load: no pipeline rank has much more to do than another, with the embedding or head it holds. And
where that needs too much memory, divided so that each rank has room.

What ranks wait for each other is not asked here: division.py goes on from this.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_time import layer_times
from megaspec.estimate.memory import memory_of
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.parallelism.passes import rank_of_stage
from megaspec.parallelism.stages import EVENLY, Chunk, layout_text, stage_sizes
from megaspec.recipe import Recipe

# Of the ranks with most room, those that a layer is offered to; of a rank's stages, those with most layers to give and
# those with fewest.
_MOST_TAKERS = 3
_MOST_STAGES = 3
# What ranks may need on average, of the room, for moving layers to be tried: it changes the sum by what early stages
# keep of more micro batches. Of 110 layouts of Llama-3.1 405B and 3 70B that fit so, none had more than 1.085.
_MOST_ON_AVERAGE = 1.2


class LoadParts(NamedTuple):
    """What ranks have to do for a micro batch, in hundredths of a layer on average."""

    layers: tuple[int, ...]
    """Each layer, in the order of the model."""
    ends: tuple[int, ...]
    """Each stage without its layers: the embedding, the head."""
    ranks: tuple[int, ...]
    """Who holds each stage."""

    def busiest(self, sizes: Sequence[int]) -> int:
        """Of the rank that has most to do, with so many layers on each stage."""
        return max(_loads(sizes, self.layers, self.ends, _stages_by_rank(self.ranks)))


def load_parts(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> LoadParts:
    """By the predicted seconds of each layer, the embedding and the head of a filled recipe."""
    times = layer_times(recipe, hardware, throughput)
    shape = shape_of(recipe)
    n_stages = shape.pp * shape.virtual
    # seconds of each stage without its layers, and of each layer
    ends = [0.0] * n_stages
    ends[0] += times.chunk(Chunk((), embedding=True)).total
    ends[-1] += times.chunk(Chunk((), head=True)).total
    layers = times.layers(n_stages)
    # whole numbers, so that cases that are alike are divided once
    unit = sum(layers) / len(layers) / 100
    return LoadParts(
        layers=tuple(round(seconds / unit) for seconds in layers),
        ends=tuple(round(seconds / unit) for seconds in ends),
        ranks=tuple(rank_of_stage(shape, stage) for stage in range(n_stages)),
    )


def divided_by_load(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> Recipe:
    """A filled recipe whose pipeline.layout leaves no rank more to do than it has to have."""
    return with_sizes(recipe, divided(*load_parts(recipe, hardware, throughput)))


def with_sizes(recipe: Recipe, sizes: Sequence[int]) -> Recipe:
    """The recipe with so many layers on each stage, in the order of the model."""
    parallelism = recipe.parallelism
    pipeline = parallelism.pipeline.model_copy(update={**EVENLY, "layout": layout_text(sizes)})
    return recipe.model_copy(update={"parallelism": parallelism.model_copy(update={"pipeline": pipeline})})


def divided_within(recipe: Recipe, room: int) -> Recipe | None:
    """A filled recipe whose ranks of some stages need more than `room` bytes, with as many layers moved from the
    fullest ranks to those with most room as it takes until all have room. None: moving layers does not get there.

    Early stages keep more micro batches than late ones, and the first and the last have tables besides: so the fullest
    rank may need twice what others do though all have equally much to do.
    """
    shape = shape_of(recipe)
    sizes = stage_sizes(recipe.model.n_layers, recipe.parallelism)
    stages_by_rank = _stages_by_rank([rank_of_stage(shape, stage) for stage in range(len(sizes))])
    totals = [one.total for one in memory_of(recipe)]
    while max(totals) > room:
        if min(totals) > room or sum(totals) > _MOST_ON_AVERAGE * room * len(totals):
            return None
        eased = _eased(recipe, sizes, totals, stages_by_rank)
        if eased is None:
            return None
        sizes, totals = eased
    return with_sizes(recipe, sizes)


def _eased(
    recipe: Recipe, sizes: Sequence[int], totals: Sequence[int], stages_by_rank: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[int]] | None:
    """The division, and the bytes of each rank, with a layer moved from the fullest rank to one with room, or to
    another stage of its own, of which fewer micro batches wait. None: none of these moves helps."""
    in_order = sorted(range(len(totals)), key=totals.__getitem__)
    fullest_rank = in_order[-1]
    by_size = sorted(stages_by_rank[fullest_rank], key=lambda stage: -sizes[stage])
    givers = [stage for stage in by_size[:_MOST_STAGES] if sizes[stage]]
    for rank in (*in_order[:_MOST_TAKERS], fullest_rank):
        eased = None
        least = totals
        # of equal ones the late: fewer micro batches wait there
        takers = sorted(stages_by_rank[rank], key=lambda stage: (sizes[stage], -stage))
        for giver, taker in product(givers, takers[:_MOST_STAGES]):
            if giver == taker:
                continue
            changed = list(sizes)
            changed[giver] -= 1
            changed[taker] += 1
            changed_totals = [one.total for one in memory_of(with_sizes(recipe, changed))]
            if _falling(changed_totals) < _falling(least):
                eased = tuple(changed)
                least = changed_totals
        if eased is not None:
            return eased, list(least)
    return None


@lru_cache(maxsize=4096)
def divided(
    layers: tuple[int, ...], ends: tuple[int, ...], ranks: tuple[int, ...], *, to_first: bool = False
) -> tuple[int, ...]:
    """How many layers each stage gets. `layers`: what each takes, in the order of the model; `ends`, `ranks`: by stage,
    what it takes without layers, and who holds it. Of equal ranks the first gets more, which shortens the way to the
    last stage; of a rank's equal stages the last does, so that the first micro batch comes to all ranks sooner, or the
    first with `to_first`."""
    stages_by_rank = _stages_by_rank(ranks)
    if len(stages_by_rank) == len(ends):
        return _in_a_row(layers, ends)
    # a layer at a time, as if all took the mean, to the rank that has least to do
    mean = sum(layers) / len(layers)
    sizes = [0] * len(ends)
    busy: list[float] = [sum(ends[stage] for stage in stages) for stages in stages_by_rank]
    for _ in layers:
        rank = busy.index(min(busy))
        stages = stages_by_rank[rank] if to_first else stages_by_rank[rank][::-1]
        stage = min(stages, key=lambda one: ends[one] + sizes[one] * mean)
        busy[rank] += mean
        sizes[stage] += 1
    if max(layers) > min(layers):
        sizes = _moved(sizes, layers, ends, stages_by_rank)
    return tuple(sizes)


def _stages_by_rank(ranks: Sequence[int]) -> list[list[int]]:
    """The stages of each rank, in the order of the model. `ranks`: who holds each stage."""
    found: list[list[int]] = [[] for _ in range(max(ranks) + 1)]
    for stage, rank in enumerate(ranks):
        found[rank].append(stage)
    return found


def _in_a_row(layers: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """One stage a rank: no division leaves the busiest less to do, and of those this one is as even as whole layers
    go."""
    busiest = _least_busiest(layers, ends)
    starts = _earliest_starts(layers, ends, busiest)
    assert starts is not None, (layers, ends)
    # what the layers before each one take
    before = [0, *accumulate(layers)]
    left = sum(layers) + sum(ends)
    start = 0
    sizes = []
    for stage, end in enumerate(ends):
        # an equal share of what is left, for this stage and each one behind it
        fair = left / (len(ends) - stage)
        stop = start
        while stop < len(layers) and end + before[stop + 1] - before[start] <= busiest:
            # a layer more once the stages behind can hold the rest, unless more than half of it lies past the share
            halfway = end + before[stop] - before[start] + layers[stop] / 2
            if stop >= starts[stage + 1] and halfway >= fair:
                break
            stop += 1
        sizes.append(stop - start)
        left -= end + before[stop] - before[start]
        start = stop
    return tuple(sizes)


def _least_busiest(layers: Sequence[int], ends: Sequence[int]) -> int:
    """The least that the busiest stage can take, found by halving: what holds all layers still does with more."""
    low = max(*ends, sum(layers) // len(ends))
    high = sum(layers) + max(ends)
    while low < high:
        middle = (low + high) // 2
        if _earliest_starts(layers, ends, middle) is not None:
            high = middle
        else:
            low = middle + 1
    return low


def _earliest_starts(layers: Sequence[int], ends: Sequence[int], most: int) -> list[int] | None:
    """The layer that each stage may start with at the earliest, where none may take more than `most`; None where they
    can't hold all layers."""
    start = len(layers)
    starts = [start]
    # from the last stage on, each takes as many of the layers before as it can
    for end in reversed(ends):
        taken = end
        while start and taken + layers[start - 1] <= most:
            start -= 1
            taken += layers[start]
        starts.append(start)
    if start > 0 or max(ends) > most:
        return None
    return starts[::-1]


def _moved(
    sizes: list[int], layers: Sequence[int], ends: Sequence[int], stages_by_rank: Sequence[Sequence[int]]
) -> list[int]:
    """Where layers differ and ranks hold several stages: one layer after the other goes from a rank that has most to do
    to one that has least, as long as that leaves the busiest less."""
    loads = _loads(sizes, layers, ends, stages_by_rank)
    while True:
        by_load = sorted(range(len(loads)), key=loads.__getitem__)
        busiest = loads[by_load[-1]]
        # every stage with a layer to give, of each rank that has most; every stage of the two ranks that have least
        givers = []
        for rank in by_load:
            if loads[rank] == busiest:
                givers += [stage for stage in stages_by_rank[rank] if sizes[stage]]
        takers = []
        for rank in by_load[:2]:
            takers += stages_by_rank[rank]
        best = sizes
        best_loads = loads
        for giver, taker in product(givers, takers):
            changed = list(sizes)
            changed[giver] -= 1
            changed[taker] += 1
            changed_loads = _loads(changed, layers, ends, stages_by_rank)
            if _falling(changed_loads) < _falling(best_loads):
                best = changed
                best_loads = changed_loads
        if best is sizes:
            return sizes
        sizes = best
        loads = best_loads


def _loads(
    sizes: Sequence[int], layers: Sequence[int], ends: Sequence[int], stages_by_rank: Sequence[Sequence[int]]
) -> list[int]:
    """What each rank takes, with so many layers on each stage."""
    before = [0, *accumulate(layers)]
    stage_loads = []
    start = 0
    for size, end in zip(sizes, ends, strict=True):
        stop = start + size
        stage_loads.append(end + before[stop] - before[start])
        start = stop
    return [sum(stage_loads[stage] for stage in stages) for stages in stages_by_rank]


def _falling(loads: Sequence[int]) -> list[int]:
    """The busiest rank first: so two divisions are compared by it, and where it has the same by the next."""
    return sorted(loads, reverse=True)
