"""Layers divided by time: no pipeline rank has much more to do than another, with the embedding or head it holds."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_time import layer_times
from megaspec.estimate.schedule import shape_of
from megaspec.parallelism.passes import rank_of_stage
from megaspec.parallelism.stages import EVENLY, Chunk, layout_text
from megaspec.recipe import Recipe


def divided_by_time(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> Recipe:
    """A filled recipe whose pipeline.layout divides stages by the predicted seconds of each layer, the embedding and
    the head."""
    times, shape = layer_times(recipe, hardware, ceilings), shape_of(recipe)
    ends = [0.0] * (shape.pp * shape.virtual)
    ends[0] += times.chunk(Chunk((), embedding=True)).total
    ends[-1] += times.chunk(Chunk((), head=True)).total
    ranks = [rank_of_stage(shape, stage) for stage in range(len(ends))]
    layers = times.layers(len(ends))
    # in hundredths of a layer, so that cases that are alike are divided once
    unit = sum(layers) / len(layers) / 100
    parts = (tuple(round(one / unit) for one in some) for some in (layers, ends))
    layout = layout_text(divided(*parts, tuple(ranks)))
    own = recipe.parallelism
    pipeline = own.pipeline.model_copy(update={**EVENLY, "layout": layout})
    return recipe.model_copy(update={"parallelism": own.model_copy(update={"pipeline": pipeline})})


@lru_cache(maxsize=4096)
def divided(layers: tuple[int, ...], ends: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """How many layers each stage gets. `layers`: what each takes, in the order of the model; `ends`, `ranks`: by stage,
    what it takes without layers, and who holds it. Of equal ranks the first gets more, which shortens the way to the
    last stage."""
    by_rank = [[stage for stage, rank in enumerate(ranks) if rank == one] for one in range(max(ranks) + 1)]
    if len(by_rank) == len(ends):
        return _in_a_row(layers, ends)
    sizes, mean = [0] * len(ends), sum(layers) / len(layers)
    busy: list[float] = [sum(ends[stage] for stage in stages) for stages in by_rank]
    for _ in layers:
        rank = busy.index(min(busy))
        stage = min(by_rank[rank], key=lambda one: ends[one] + sizes[one] * mean)
        busy[rank] += mean
        sizes[stage] += 1
    return tuple(sizes if max(layers) == min(layers) else _moved(sizes, layers, ends, by_rank))


def _in_a_row(layers: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """One stage a rank: no division leaves the busiest less to do, and of those this one is as even as whole layers
    go."""
    low, high = max(*ends, sum(layers) // len(ends)), sum(layers) + max(ends)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _earliest_starts(layers, ends, middle) else (middle + 1, high)
    starts, before = _earliest_starts(layers, ends, low), [0, *accumulate(layers)]
    assert starts is not None, (layers, ends)
    left, start, sizes = sum(layers) + sum(ends), 0, []
    for stage, end in enumerate(ends):
        fair, stop = left / (len(ends) - stage), start
        while stop < len(layers) and end + before[stop + 1] - before[start] <= low:
            halfway = end + before[stop] - before[start] + layers[stop] / 2
            if stop >= starts[stage + 1] and halfway >= fair:
                break
            stop += 1
        sizes.append(stop - start)
        left -= end + before[stop] - before[start]
        start = stop
    return tuple(sizes)


def _earliest_starts(layers: Sequence[int], ends: Sequence[int], most: int) -> list[int] | None:
    """The layer that each stage may start with at the earliest, where none may take more than `most`; None where they
    can't hold all layers."""
    starts, start = [len(layers)], len(layers)
    for end in reversed(ends):
        taken = end
        while start and taken + layers[start - 1] <= most:
            start -= 1
            taken += layers[start]
        starts.append(start)
    return starts[::-1] if start == 0 and max(ends) <= most else None


def _moved(sizes: list[int], layers: Sequence[int], ends: Sequence[int], by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Where layers differ and ranks hold several stages: one layer after the other goes from a rank that has most to do
    to one that has least, as long as that leaves the busiest less."""
    before = [0, *accumulate(layers)]

    def busy(sizes: Sequence[int]) -> list[int]:
        starts = [0, *accumulate(sizes)]
        stages = [end + before[starts[i + 1]] - before[starts[i]] for i, end in enumerate(ends)]
        return [sum(stages[stage] for stage in of_rank) for of_rank in by_rank]

    def exchanged(taken: int, given: int) -> list[int]:
        return [size - (stage == taken) + (stage == given) for stage, size in enumerate(sizes)]

    now = busy(sizes)
    while True:
        by_load = sorted(range(len(now)), key=now.__getitem__)
        most = [stage for rank in by_load if now[rank] == now[by_load[-1]] for stage in by_rank[rank] if sizes[stage]]
        least = [stage for rank in by_load[:2] for stage in by_rank[rank]]
        options = [exchanged(taken, given) for taken in most for given in least]
        best = min(options, key=lambda one: sorted(busy(one), reverse=True), default=sizes)
        then = busy(best)
        if sorted(then, reverse=True) >= sorted(now, reverse=True):
            return sizes
        sizes, now = best, then
