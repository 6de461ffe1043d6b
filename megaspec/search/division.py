"""Layers divided so that a step is predicted to be shortest.

Ranks with equally much to do (balance.py) may still wait for each other: which stages have a layer more decides how a
pipeline fills and empties. So the division by load is where a local search begins that asks for the predicted time of
one division after the other. A move takes a layer from a stage and gives it to any other, the stages between pass
theirs on; it stays where a step is shorter with it and what it needs fits. Where the division by load needs too much
memory the search begins with one that does not.
"""

from itertools import permutations
from typing import Any

from megaspec.estimate.hardware import Hardware
from megaspec.estimate.memory import fullest_within
from megaspec.estimate.schedule import passes_to_simulate, shape_of
from megaspec.estimate.step_time import RankEnds, step_time
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.parallelism.stages import stage_sizes
from megaspec.recipe import Recipe
from megaspec.search.balance import divided, divided_by_load, divided_within, load_parts, with_sizes
from megaspec.search.remedies import broken

# Share of a step's time. Passes are simulated in rounded durations (estimate/step_time.py): what saves less is noise.
WORTH_MOVING = 0.0005
# Divisions that one search may weigh, and passes that it may simulate for them: about half a second each.
MOST_WEIGHED = 400
MOST_PASSES = 250_000
# Searches that are remembered.
_MOST_KEPT = 256
# What a search depends on.
_SECTIONS = {"model", "precision", "kernels", "data", "optim", "train", "parallelism"}

Sizes = tuple[int, ...]
"""Layers of each stage, in the order of the model."""

_KEPT: dict[tuple[Any, ...], tuple[Sizes, MeasuredThroughput]] = {}


def fastest_division(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> Recipe:
    """A filled recipe of several stages, with the pipeline.layout that a search finds fastest: of those that need no
    more memory than `hardware.room` and break no rule that the division by load keeps. That one itself where none is
    faster, or where none is found that fits.

    The layout that the recipe has says nothing here.
    """
    by_load = divided_by_load(recipe, hardware, throughput)
    # by value: `resolve` and `plan` ask for the same with other objects
    content = by_load.model_dump_json(include=_SECTIONS)
    key = (content, hardware.name, hardware.memory, id(throughput))
    if key not in _KEPT:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        # the speeds are held, so that no other object gets their identity
        _KEPT[key] = (DivisionSearch(by_load, hardware, throughput).run(), throughput)
    sizes, _ = _KEPT[key]
    return with_sizes(recipe, sizes)


class DivisionSearch:
    """A search that begins with the division of `by_load`, and the divisions that it has weighed."""

    def __init__(self, by_load: Recipe, hardware: Hardware, throughput: MeasuredThroughput):
        self._recipe = by_load
        self._hardware = hardware
        self._throughput = throughput
        self._ends: RankEnds = {}
        self._broken = broken(by_load, hardware)
        self._parts = load_parts(by_load, hardware, throughput)
        # seconds of a step, what is waited for left out, for each unit of the busiest rank's load
        self._seconds_of_load = 0.0
        # what is left of MOST_PASSES
        self._passes = MOST_PASSES
        self.seconds: dict[Sizes, float] = {}
        """Of a step, by division."""

    def run(self) -> Sizes:
        """The fastest division that was found. It depends on nothing but the arguments: what is spent is counted in
        divisions and passes."""
        by_load = stage_sizes(self._recipe.model.n_layers, self._recipe.parallelism)
        begin = by_load
        if not self.fits(by_load):
            within = divided_within(self._recipe, self._hardware.room)
            if within is None:
                return by_load
            begin = stage_sizes(within.model.n_layers, within.parallelism)
            if not self.fits(begin):
                return by_load
        step = step_time(self._recipe, self._hardware, self._throughput, ends=self._ends)
        self.seconds[by_load] = step.seconds
        self._seconds_of_load = (step.seconds - step.parts["pipeline bubble"]) / self._parts.busiest(by_load)
        if not self._weigh(begin):
            return begin
        best = self._descended(begin)
        # what a descent ends at depends on where it begins
        first_larger = divided(*self._parts, to_first=True)
        starts = [first_larger]
        if first_larger[-1]:
            # the last stage has the head besides, and all micro batches wait for it at the end
            starts.append(_moved(first_larger, giver=len(first_larger) - 1, taker=0))
        for start in starts:
            if self.fits(start) and self._weigh(start):
                found = self._descended(start)
                if self._is_faster(found, best):
                    best = found
        return best

    def _descended(self, sizes: Sizes) -> Sizes:
        """The end of a way on which every move makes a step shorter; at it no move does, unless all is spent."""
        last = None
        while last != sizes:
            last = sizes
            for giver, taker in permutations(range(len(sizes)), 2):
                # of earlier moves this stage may have nothing left
                if not sizes[giver]:
                    continue
                moved = _moved(sizes, giver, taker)
                # not faster even if nothing were waited for
                if self._seconds_of_load * self._parts.busiest(moved) >= self.seconds[sizes]:
                    continue
                if not self._weigh(moved):
                    return sizes
                if self._is_faster(moved, sizes) and self.fits(moved):
                    sizes = moved
        return sizes

    def _weigh(self, sizes: Sizes) -> bool:
        """Whether the time of a step is known; it is not where all that may be spent is."""
        if sizes in self.seconds:
            return True
        recipe = with_sizes(self._recipe, sizes)
        passes = passes_to_simulate(shape_of(recipe))
        if len(self.seconds) >= MOST_WEIGHED or passes > self._passes:
            return False
        self._passes -= passes
        self.seconds[sizes] = step_time(recipe, self._hardware, self._throughput, ends=self._ends).seconds
        return True

    def _is_faster(self, sizes: Sizes, than: Sizes) -> bool:
        """By as much as is worth it."""
        return self.seconds[sizes] < (1 - WORTH_MOVING) * self.seconds[than]

    def fits(self, sizes: Sizes) -> bool:
        """Whether a division keeps within the memory and the rules: of some settings a stage has to have as many layers
        as they say."""
        recipe = with_sizes(self._recipe, sizes)
        if fullest_within(recipe, self._hardware.room) is None:
            return False
        return broken(recipe, self._hardware) <= self._broken


def _moved(sizes: Sizes, giver: int, taker: int) -> Sizes:
    """With a layer less on one stage and one more on another."""
    found = list(sizes)
    found[giver] -= 1
    found[taker] += 1
    return tuple(found)
