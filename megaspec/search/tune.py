"""Search for a layout: every legal division of a recipe among its ranks, by the memory and the time that it is
predicted to take.

Legal is what the rules let pass. Layouts are compared at the recipe's own global batch. At one layout and micro batch
the search takes the least recomputation that fits, since more of it only costs time. What a layout takes at least, the
passes of its busiest rank, is found first: memory and time in full are worked out of those alone that may be among the
fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import product
from math import gcd, inf

from megaspec.core.axes import fewest_gpus
from megaspec.core.divisors import divisors
from megaspec.core.frozen import AUTO
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.memory import StageMemory, fullest, fullest_within, memory_of
from megaspec.estimate.step_time import StepTime, least_seconds, step_time
from megaspec.estimate.target import Target
from megaspec.model.kinds import moe_of
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec, RecomputeSpec
from megaspec.parallelism.stages import EVENLY
from megaspec.recipe import Recipe
from megaspec.rules.case import Case, can_split_sequences
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import is_legal
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.balance import divided_by_time
from megaspec.train.batch_schedule import BatchSchedule

# Fields that a search may decide, as dotted paths.
SEARCHED = (
    "parallelism.tp",
    "parallelism.pp",
    "parallelism.pipeline.schedule",
    "parallelism.pipeline.virtual_stages",
    "parallelism.pipeline.layout",
    "parallelism.cp",
    "parallelism.ep",
    "parallelism.etp",
    "parallelism.dp_strategy",
    "parallelism.recompute.kind",
    "train.micro_batch",
)
# Other words for how layers are divided than the layout, which a search decides.
DIVIDES = tuple(f"parallelism.pipeline.{name}" for name in EVENLY)
STRATEGIES = ("replicate", "zero1", "zero2", "fsdp", "hsdp")
_RECOMPUTE = {
    "none": RecomputeSpec(),
    "selective": RecomputeSpec(kind="selective"),
    "full": RecomputeSpec(kind="full"),
}
_MAX_VIRTUAL = 8
# By chunks of a rank; gpipe is never faster than 1f1b, and holds more.
_SCHEDULES = {1: ("1f1b", "zb_h1"), 2: ("interleaved", "zb_v")}


@dataclass(frozen=True)
class Candidate:
    """A layout that was weighed."""

    recipe: Recipe
    """Filled, with this layout."""
    memory: StageMemory
    """Of the fullest rank."""
    time: StepTime
    fits: bool

    @property
    def limit(self) -> str:
        """What costs this layout most beside its own arithmetic."""
        lost = self.time.lost()
        worst = max(lost, key=lambda name: lost[name])
        return f"{worst} {lost[worst] / self.time.seconds:.0%}" if lost[worst] > 0 else "arithmetic"


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    best: tuple[Candidate, ...]
    """Those that fit, fastest first, of each division among ranks the best pipeline alone; when none fits, the one that
    needs least memory."""
    considered: int
    """Layouts, pipelines and micro batches; those that may be among the fastest were weighed in full."""


@dataclass(frozen=True)
class Grid:
    """What a search may choose from and what it is held to."""

    recipe: Recipe
    """Filled; the fields of `open` are what the search replaces."""
    target: Target
    facts: Facts
    hardware: Hardware
    ceilings: Ceilings
    open: frozenset[str]
    """Those of SEARCHED that are free."""
    is_for_training: bool = False
    """Only what can be trained today, not all that can be planned."""

    def options(self, key: str, free: Sequence[object]) -> list[object]:
        """The values of a field: those given when it is open, else its own."""
        section, _, name = key.rpartition(".")
        own: object = self.recipe
        for part in (*section.split("."), name):
            own = getattr(own, part)
        return list(free) if key in self.open else [own]


@dataclass(frozen=True, order=True)
class _Entry:
    """A layout with a micro batch that was not weighed in full yet."""

    least: float
    """Seconds that a step takes at least."""
    number: int
    layout: int = field(compare=False)
    """In the order of `layouts`."""
    strategy: dict[str, object] = field(compare=False)
    micro_batch: int = field(compare=False)
    kinds: tuple[str, ...] = field(compare=False)
    """Of recomputation, least first: the first is what `least` is for, the others what may be tried after it."""


class _Queue:
    """What can be weighed, the layout that may be the fastest first."""

    def __init__(self, grid: Grid):
        self._grid, self._layouts = grid, list(layouts(grid))
        self._computed: dict[tuple[int, str], Recipe] = {}
        self._recipes: dict[tuple[int, int, str], tuple[Recipe, float]] = {}
        self._heap: list[_Entry] = []
        self._kinds = tuple(grid.options("parallelism.recompute.kind", list(_RECOMPUTE)))
        for number, layout in enumerate(self._layouts):
            for strategy, micro_batch in _divisions(grid, layout):
                self._put(_Entry(0.0, len(self._heap), number, strategy, micro_batch, self._kinds))

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def least(self) -> float:
        """Seconds that any layout of the queue takes at least."""
        return self._heap[0].least

    def take(self) -> tuple[_Entry, Recipe]:
        """The first entry, and what it stands for."""
        entry = heappop(self._heap)
        recipe, _ = self._recomputing(entry)
        return entry, _changed(recipe, recipe.parallelism.model_copy(update=entry.strategy), entry.micro_batch)

    def smallest(self, layout: int) -> list[Recipe]:
        """What takes least memory of a layout: the smallest micro batch, most recomputation, by strategy."""
        divisions = list(_divisions(self._grid, self._layouts[layout]))
        least = min(micro_batch for _, micro_batch in divisions)
        recipe = self._computing(layout, self._kinds[-1])
        own = recipe.parallelism
        return [_changed(recipe, own.model_copy(update=s), least) for s, micro in divisions if micro == least]

    def compute_more(self, entry: _Entry) -> None:
        """Puts what takes the next kind of recomputation back."""
        if entry.kinds[1:]:
            self._put(replace(entry, kinds=entry.kinds[1:]))

    def _put(self, entry: _Entry) -> None:
        heappush(self._heap, replace(entry, least=self._recomputing(entry)[1]))

    def _recomputing(self, entry: _Entry) -> tuple[Recipe, float]:
        """The layout at its micro batch and recomputation, and the least; neither depends on the strategy."""
        kind = entry.kinds[0]
        key = entry.layout, entry.micro_batch, kind
        if key not in self._recipes:
            layout = self._computing(entry.layout, kind)
            recipe = _changed(layout, layout.parallelism, entry.micro_batch)
            self._recipes[key] = recipe, least_seconds(recipe, self._grid.hardware, self._grid.ceilings)
        return self._recipes[key]

    def _computing(self, number: int, kind: str) -> Recipe:
        """A layout with a kind of recomputation, which makes layers take longer beside the head."""
        if (number, kind) not in self._computed:
            layout = self._layouts[number]
            own = layout.parallelism
            if own.recompute.kind != kind:
                own = own.model_copy(update={"recompute": _RECOMPUTE[kind]})
                layout = _by_time(self._grid, layout.model_copy(update={"parallelism": own}))
            self._computed[number, kind] = layout
        return self._computed[number, kind]


def tune(grid: Grid, *, most: int = 10) -> Found:
    """The fastest layouts that fit."""
    queue = _Queue(grid)
    considered, best, limit = len(queue), dict[tuple[object, ...], Candidate](), inf
    smallest: tuple[int, Recipe] | None = None
    may_fit: dict[int, bool] = {}
    while queue and queue.least < limit:
        entry, recipe = queue.take()
        if not may_fit.get(entry.layout, True) or not _counts(grid, recipe):
            continue
        memory = fullest_within(recipe, grid.hardware.room)
        if memory is not None:
            one = Candidate(recipe, memory, step_time(recipe, grid.hardware, grid.ceilings), True)
            own = recipe.parallelism
            key = own.tp, own.pp, own.cp, own.ep, own.etp, own.dp_strategy, own.dp_shard, entry.micro_batch
            if key not in best or one.time.seconds < best[key].time.seconds:
                best[key] = one
                limit = _slowest(best, most)
            continue
        queue.compute_more(entry)
        if entry.layout not in may_fit:
            # if what takes least of it does not fit, nothing of it does
            few = [one for one in queue.smallest(entry.layout) if _counts(grid, one)]
            may_fit[entry.layout] = not few or any(fullest_within(one, grid.hardware.room) for one in few)
            if not best:
                sizes = [(fullest(memory_of(one)).total, one) for one in (*few, recipe)]
                smallest = min([*sizes, *([smallest] if smallest else [])], key=lambda one: one[0])
    found = sorted(best.values(), key=lambda one: one.time.seconds)[:most]
    if not found and smallest is not None:
        recipe = smallest[1]
        time = step_time(recipe, grid.hardware, grid.ceilings)
        found = [Candidate(recipe, fullest(memory_of(recipe)), time, False)]
    return Found(tuple(found), considered)


def _counts(grid: Grid, recipe: Recipe) -> bool:
    """Legal, and one that can be trained where that is asked for."""
    return is_legal(_case(grid, recipe)) and not (grid.is_for_training and unbuilt_problems(recipe))


def _slowest(best: dict[tuple[object, ...], Candidate], most: int) -> float:
    """Seconds of the last of the `most` fastest, when there are so many."""
    seconds = sorted(one.time.seconds for one in best.values())
    return seconds[most - 1] if len(seconds) >= most else inf


def layouts(grid: Grid) -> Iterator[Recipe]:
    """Every legal choice of degrees, and of schedules and stages of a pipeline, the rest as in the recipe."""
    world, model, own = grid.recipe.launcher.ranks, grid.recipe.model, grid.recipe.parallelism
    moe = moe_of(model)
    within_node = [d for d in divisors(world) if d <= grid.hardware.node_size]
    tps = grid.options("parallelism.tp", [d for d in within_node if model.n_heads % d == 0])
    pps = grid.options("parallelism.pp", [d for d in divisors(world) if d <= model.n_layers])
    cps = grid.options("parallelism.cp", [d for d in divisors(world) if grid.recipe.data.seq_len % (2 * d) == 0])
    eps = grid.options("parallelism.ep", divisors(gcd(moe.n_experts, world)) if moe else [1])
    for tp, pp, cp in product(tps, pps, cps):
        if world % (tp * pp * cp):
            continue
        etps = grid.options("parallelism.etp", sorted({1, tp}) if moe else [1])
        for ep, etp in product(eps, etps):
            if world % fewest_gpus(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp):
                continue
            dp = world // (tp * pp * cp)
            shares = shares_of("replicate", dp, tp * cp, node=grid.hardware.node_size)
            splits = can_split_sequences(tp=tp, cp=cp, seq_len=grid.recipe.data.seq_len, max_seq_len=model.max_seq_len)
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "sequence_parallel": splits}
            for pipeline in pipelines(grid, pp):
                changed = {**degrees, **shares, "dp_strategy": "replicate", "pipeline": pipeline}
                recipe = _changed(grid.recipe, own.model_copy(update=changed), _micro_batches(grid, dp)[0])
                recipe = _by_time(grid, recipe)
                if is_legal(_case(grid, recipe)):
                    yield recipe


def pipelines(grid: Grid, pp: int) -> Iterator[PipelineSpec]:
    """Schedules of `pp` stages, with layers divided evenly and by time (layout=auto). What is set stays: a split that
    is written out with its number of stages."""
    own, own_pp = grid.recipe.parallelism.pipeline, grid.recipe.parallelism.pp
    is_written = own.layout is not None or own.first_layers is not None or own.last_layers is not None
    searches_chunks = "parallelism.pipeline.virtual_stages" in grid.open and not is_written
    fixed = None if "parallelism.pipeline.schedule" in grid.open else own.schedule
    if pp == 1:
        if (searches_chunks or own.virtual_stages == 1) and fixed in (None, "1f1b", "gpipe"):
            yield PipelineSpec(schedule="1f1b", micro_batch_group=1)
        return
    if is_written and pp != own_pp:
        return
    group = pp if own.micro_batch_group == own_pp else own.micro_batch_group
    # no more stages than there are layers, the embedding and the head alone
    most = min(_MAX_VIRTUAL, (grid.recipe.model.n_layers + 2) // pp)
    for virtual in range(1, most + 1) if searches_chunks else (own.virtual_stages,):
        for schedule in _SCHEDULES.get(virtual, ("interleaved",)) if fixed is None else (fixed,):
            changes = {"schedule": schedule, "virtual_stages": virtual, "micro_batch_group": group}
            even = own.model_copy(update=changes)
            yield even
            if "parallelism.pipeline.layout" in grid.open and not is_written:
                yield even.model_copy(update={**EVENLY, "layout": AUTO})


def _by_time(grid: Grid, recipe: Recipe) -> Recipe:
    """With its layers divided by time, unless they are divided evenly or as the recipe says."""
    if recipe.parallelism.pipeline.layout is None or grid.recipe.parallelism.pipeline.layout is not None:
        return recipe
    return divided_by_time(recipe, grid.hardware, grid.ceilings)


def _divisions(grid: Grid, layout: Recipe) -> Iterator[tuple[dict[str, object], int]]:
    """Data-parallel strategies and micro batches of a layout."""
    own, dp = layout.parallelism, data_parallel(layout.parallelism)
    for strategy in grid.options("parallelism.dp_strategy", STRATEGIES if dp > 1 else STRATEGIES[:1]):
        shares = shares_of(strategy, dp, own.tp * own.cp, node=grid.hardware.node_size, grid=own.ep * own.etp)
        if strategy == "hsdp" and min(shares.values()) == 1:
            continue
        for micro_batch in _micro_batches(grid, dp):
            yield {"dp_strategy": strategy, **shares}, micro_batch


def shares_of(strategy: str, dp: int, inner: int, *, node: int, grid: int = 1) -> dict[str, int]:
    """dp_replicate and dp_shard of a strategy over `dp` ranks, each with `inner` ranks beside it."""
    if strategy == "replicate":
        return {"dp_replicate": dp, "dp_shard": 1}
    if strategy == "hsdp":
        shard, _ = shards_of_a_replica(dp, inner, node=node, grid=grid)
        return {"dp_replicate": dp // shard, "dp_shard": shard}
    return {"dp_replicate": 1, "dp_shard": dp}


def shards_of_a_replica(dp: int, inner: int, *, node: int, grid: int) -> tuple[int, str]:
    """dp_shard of hsdp and why: as many of `dp` ranks, each with `inner` ranks beside it, as a node has; where experts
    take `grid` ranks, as many as hold all of them."""
    most = max(1, node // inner)
    legal = [d for d in divisors(dp) if d * inner % grid == 0] or divisors(dp)
    in_a_node = [d for d in legal if d <= most]
    return (in_a_node[-1], "the ranks of one node") if in_a_node else (legal[0], "the fewest that hold all experts")


def _micro_batches(grid: Grid, dp: int) -> list[int]:
    share = gcd(*BatchSchedule(grid.recipe.train).batches) // dp
    return grid.options("train.micro_batch", [m for m in divisors(share) if m <= 16] if share else [1])


def _changed(recipe: Recipe, parallelism: ParallelismSpec, micro_batch: int) -> Recipe:
    train = recipe.train.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallelism": parallelism, "train": train})


def _case(grid: Grid, recipe: Recipe) -> Case:
    return Case(recipe, grid.target, grid.facts, frozenset(grid.open))
