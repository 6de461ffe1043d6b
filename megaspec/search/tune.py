"""Search for a layout: every legal division of a recipe among its ranks, by the memory and the time that it is
predicted to take.

Legal is what the rules let pass. Layouts are compared at the recipe's own global batch. At one layout and micro batch
the search takes the least recomputation that fits, since more of it only costs time. What a layout takes at least, the
passes of its busiest rank, is found first: memory and time in full are worked out of those alone that may be among the
fastest. They have their layers divided by load; the fastest division is searched for last, where it may change which
are named, and of all that are.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import product
from math import gcd, inf

from megaspec.core.axes import fewest_gpus
from megaspec.core.divisors import divisors
from megaspec.core.frozen import AUTO
from megaspec.estimate.attention_choice import attention_for
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.memory import StageMemory, fullest, fullest_until, fullest_within, memory_of
from megaspec.estimate.step_time import StepTime, least_seconds, step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec, RecomputeSpec
from megaspec.parallelism.stages import EVENLY
from megaspec.recipe import Recipe
from megaspec.rules.case import Case, can_split_sequences
from megaspec.rules.kernel_use import attention_use_of
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import is_legal
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.balance import divided_by_load, divided_within
from megaspec.search.division import fastest_division

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
_MAX_MICRO_BATCH = 16
# Layouts beside those that are named whose fastest division is searched for, the fastest by load first.
_MORE_DIVIDED = 6
# Layouts for which another division is looked for since they do not fit as they are divided by load, the fastest first;
# and what the first of their ranks that is too full may need of the room, which tells most hopeless ones at once.
_MOST_TOO_LARGE = 24
_MOST_TOO_FULL = 2.0
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
        if lost[worst] <= 0:
            return "arithmetic"
        return f"{worst} {lost[worst] / self.time.seconds:.0%}"


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
    throughput: MeasuredThroughput
    open: frozenset[str]
    """Those of SEARCHED that are free."""
    decided: frozenset[str] = frozenset()
    """What else of the recipe the resolver filled."""
    is_for_training: bool = False
    """Only what can be trained today, not all that can be planned."""

    def options(self, key: str, free: Sequence[object]) -> list[object]:
        """The values of a field: those given when it is open, else the recipe's."""
        if key in self.open:
            return list(free)
        value: object = self.recipe
        for name in key.split("."):
            value = getattr(value, name)
        return [value]


@dataclass(frozen=True, order=True)
class _QueueEntry:
    """A layout with a micro batch that was not weighed in full yet."""

    least: float
    """Seconds that a step takes at least."""
    number: int
    """Of entries that take equally long the one that was made first comes first."""
    layout: int = field(compare=False)
    """In the order of `layouts`."""
    strategy: dict[str, object] = field(compare=False)
    """dp_strategy and its degrees."""
    micro_batch: int = field(compare=False)
    kinds: tuple[str, ...] = field(compare=False)
    """Of recomputation, least first: the first is what `least` is for, the others what may be tried after it."""


class _Queue:
    """What can be weighed, the layout that may be the fastest first."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._layouts = list(layouts(grid))
        # a layout's strategies take the same passes, and so the same least time: each is worked out once
        self._with_kind: dict[tuple[int, str], Recipe] = {}
        self._with_least: dict[tuple[int, int, str], tuple[Recipe, float]] = {}
        self._heap: list[_QueueEntry] = []
        self._kinds = tuple(grid.options("parallelism.recompute.kind", list(_RECOMPUTE)))
        for number, layout in enumerate(self._layouts):
            for strategy, micro_batch in _divisions(grid, layout):
                self._put(_QueueEntry(0.0, len(self._heap), number, strategy, micro_batch, self._kinds))

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def least(self) -> float:
        """Seconds that any layout of the queue takes at least."""
        return self._heap[0].least

    def take(self) -> tuple[_QueueEntry, Recipe]:
        """The first entry, and what it stands for."""
        entry = heappop(self._heap)
        recipe, _ = self._recipe_and_least(entry)
        parallelism = recipe.parallelism.model_copy(update=entry.strategy)
        return entry, _changed(recipe, parallelism, entry.micro_batch)

    def smallest(self, layout: int) -> list[Recipe]:
        """What takes least memory of a layout: the smallest micro batch, most recomputation, by strategy."""
        divisions = list(_divisions(self._grid, self._layouts[layout]))
        smallest = min(micro_batch for _, micro_batch in divisions)
        recipe = self._recomputing(layout, self._kinds[-1])
        found = []
        for strategy, micro_batch in divisions:
            if micro_batch == smallest:
                found.append(_changed(recipe, recipe.parallelism.model_copy(update=strategy), micro_batch))
        return found

    def recompute_more(self, entry: _QueueEntry) -> None:
        """Puts what takes the next kind of recomputation back."""
        if entry.kinds[1:]:
            self._put(replace(entry, kinds=entry.kinds[1:]))

    def _put(self, entry: _QueueEntry) -> None:
        _, least = self._recipe_and_least(entry)
        heappush(self._heap, replace(entry, least=least))

    def _recipe_and_least(self, entry: _QueueEntry) -> tuple[Recipe, float]:
        """The layout at its micro batch and recomputation, and the least; neither depends on the strategy."""
        kind = entry.kinds[0]
        key = (entry.layout, entry.micro_batch, kind)
        if key not in self._with_least:
            layout = self._recomputing(entry.layout, kind)
            recipe = _changed(layout, layout.parallelism, entry.micro_batch)
            least = least_seconds(recipe, self._grid.hardware, self._grid.throughput)
            self._with_least[key] = (recipe, least)
        return self._with_least[key]

    def _recomputing(self, number: int, kind: str) -> Recipe:
        """A layout with a kind of recomputation, which makes layers take longer beside the head."""
        key = (number, kind)
        if key not in self._with_kind:
            layout = self._layouts[number]
            parallelism = layout.parallelism
            if parallelism.recompute.kind != kind:
                parallelism = parallelism.model_copy(update={"recompute": _RECOMPUTE[kind]})
                layout = _by_load(self._grid, layout.model_copy(update={"parallelism": parallelism}))
            self._with_kind[key] = layout
        return self._with_kind[key]


def tune(grid: Grid, *, most: int = 10) -> Found:
    """The fastest layouts that fit."""
    queue = _Queue(grid)
    considered = len(queue)
    fastest = _Fastest(grid, most)
    # where nothing fits, what needs least memory, with that memory in bytes
    smallest: tuple[int, Recipe] | None = None
    # by number of the layout, once something of it did not fit
    may_fit: dict[int, bool] = {}
    # least times rise, and no time is below its least: behind the slowest of the fastest nothing can be faster
    while queue and queue.least < fastest.limit:
        entry, recipe = queue.take()
        if not may_fit.get(entry.layout, True) or not _counts(grid, recipe):
            continue
        memory = fullest_until(recipe, grid.hardware.room)
        if memory.total <= grid.hardware.room:
            fastest.add(recipe, memory)
            continue
        fastest.note_too_large(recipe, memory, entry.least)
        queue.recompute_more(entry)
        if entry.layout in may_fit:
            continue
        # if what takes least of a layout does not fit, nothing of it does
        least_memory = [one for one in queue.smallest(entry.layout) if _counts(grid, one)]
        may_fit[entry.layout] = not least_memory or any(_may_fit(grid, one) for one in least_memory)
        if not fastest:
            total, one = _smallest((*least_memory, recipe))
            if smallest is None or total <= smallest[0]:
                smallest = (total, one)
    fastest.divide_within_memory()
    fastest.divide_layers()
    found = fastest.in_order()
    if not found and smallest is not None:
        _, recipe = smallest
        time = step_time(recipe, grid.hardware, grid.throughput)
        found = [Candidate(recipe, fullest(memory_of(recipe)), time, False)]
    return Found(tuple(found), considered)


class _Fastest:
    """The fastest candidate of each division among ranks."""

    def __init__(self, grid: Grid, most: int):
        self._grid = grid
        self._most = most
        self._by_division: dict[tuple[object, ...], Candidate] = {}
        # all whose layers are divided by load
        self._by_load: list[Candidate] = []
        # those that do not fit so, with the seconds that a step takes at least
        self._too_large: list[tuple[float, Recipe]] = []
        # by identity, which hashes no recipe: those whose division was searched for, and what was found
        self._done: dict[int, Candidate] = {}
        self.limit = inf
        """Seconds of the last of the `most` fastest, infinite while there are fewer."""

    def __len__(self) -> int:
        return len(self._by_division)

    def add(self, recipe: Recipe, memory: StageMemory) -> None:
        """Takes a layout in that fits, and keeps it if it is the fastest of its division."""
        candidate = self._weighed(recipe, memory)
        if _is_divided_by_search(self._grid, recipe):
            self._by_load.append(candidate)
        self._take(candidate)

    def note_too_large(self, recipe: Recipe, memory: StageMemory, least: float) -> None:
        """Keeps a layout that does not fit as its layers are divided by load. `memory`: of the first rank that is too
        full. `least`: seconds of a step that it takes at least."""
        is_divided = _is_divided_by_search(self._grid, recipe)
        if is_divided and memory.total <= _MOST_TOO_FULL * self._grid.hardware.room:
            self._too_large.append((least, recipe))

    def divide_within_memory(self) -> None:
        """Takes in those that do not fit as they are divided by load, and do divided otherwise."""
        self._too_large.sort(key=lambda one: one[0])
        for least, recipe in self._too_large[:_MOST_TOO_LARGE]:
            if least >= self.limit:
                return
            divided = divided_within(recipe, self._grid.hardware.room)
            if divided is not None and _counts(self._grid, divided):
                self.add(divided, fullest(memory_of(divided)))

    def in_order(self) -> list[Candidate]:
        """The `most` fastest, the fastest first."""
        return sorted(self._by_division.values(), key=lambda one: one.time.seconds)[: self._most]

    def divide_layers(self) -> None:
        """Searches for the fastest division of layers of all that are named, and of some that may be named with it: at
        best a step gets shorter by all that its busiest rank waits."""
        self._divide_named()
        more = _MORE_DIVIDED
        for candidate in sorted(self._by_load, key=lambda one: one.time.seconds):
            at_best = candidate.time.seconds - candidate.time.parts["pipeline bubble"]
            if more and at_best < self.limit and id(candidate) not in self._done:
                self._divide(candidate)
                more -= 1
        self._divide_named()

    def _divide_named(self) -> None:
        """Until all that are named are divided fastest: one that gets faster may take the place of another."""
        while True:
            todo = []
            for candidate in self.in_order():
                if _is_divided_by_search(self._grid, candidate.recipe) and id(candidate) not in self._done:
                    todo.append(candidate)
            if not todo:
                return
            for candidate in todo:
                self._divide(candidate)

    def _divide(self, candidate: Candidate) -> None:
        """Takes a candidate in as it is divided fastest."""
        self._done[id(candidate)] = candidate
        recipe = fastest_division(candidate.recipe, self._grid.hardware, self._grid.throughput)
        memory = fullest_within(recipe, self._grid.hardware.room)
        if memory is None or not _counts(self._grid, recipe):
            return
        divided = self._weighed(recipe, memory)
        self._done[id(divided)] = divided
        self._take(divided)

    def _weighed(self, recipe: Recipe, memory: StageMemory) -> Candidate:
        time = step_time(recipe, self._grid.hardware, self._grid.throughput)
        return Candidate(recipe, memory, time, True)

    def _take(self, candidate: Candidate) -> None:
        """Keeps it if it is the fastest of its division: degrees, strategy and micro batch."""
        parallelism = candidate.recipe.parallelism
        division = (
            parallelism.tp,
            parallelism.pp,
            parallelism.cp,
            parallelism.ep,
            parallelism.etp,
            parallelism.dp_strategy,
            parallelism.dp_shard,
            candidate.recipe.train.micro_batch,
        )
        known = self._by_division.get(division)
        if known is not None and known.time.seconds <= candidate.time.seconds:
            return
        self._by_division[division] = candidate
        if len(self._by_division) >= self._most:
            self.limit = self.in_order()[-1].time.seconds


def _smallest(recipes: Iterable[Recipe]) -> tuple[int, Recipe]:
    """Bytes of the fullest rank, and the recipe, of that which needs least memory."""
    sizes = [(fullest(memory_of(recipe)).total, recipe) for recipe in recipes]
    return min(sizes, key=lambda one: one[0])


def _may_fit(grid: Grid, recipe: Recipe) -> bool:
    """Whether a layout fits, as its layers are divided or, where the search divides them, with others."""
    memory = fullest_until(recipe, grid.hardware.room)
    if memory.total <= grid.hardware.room:
        return True
    if not _is_divided_by_search(grid, recipe) or memory.total > _MOST_TOO_FULL * grid.hardware.room:
        return False
    return divided_within(recipe, grid.hardware.room) is not None


def _counts(grid: Grid, recipe: Recipe) -> bool:
    """Legal, and one that can be trained where that is asked for."""
    return is_legal(_case(grid, recipe)) and not (grid.is_for_training and unbuilt_problems(recipe))


def layouts(grid: Grid) -> Iterator[Recipe]:
    """Every legal choice of degrees, and of schedules and stages of a pipeline, the rest as in the recipe."""
    for degrees in _degrees(grid):
        tp_cp = degrees["tp"] * degrees["cp"]
        dp = grid.recipe.launcher.ranks // (tp_cp * degrees["pp"])
        changes: dict[str, object] = dict(degrees)
        changes["sequence_parallel"] = can_split_sequences(
            tp=degrees["tp"],
            cp=degrees["cp"],
            seq_len=grid.recipe.data.seq_len,
            max_seq_len=grid.recipe.model.max_seq_len,
        )
        changes["dp_strategy"] = "replicate"
        changes |= shares_of("replicate", dp, tp_cp, node=grid.hardware.node_size)
        micro_batch = _micro_batches(grid, dp)[0]
        for pipeline in pipelines(grid, degrees["pp"]):
            parallelism = grid.recipe.parallelism.model_copy(update={**changes, "pipeline": pipeline})
            recipe = _with_attention(grid, _changed(grid.recipe, parallelism, micro_batch))
            recipe = _by_load(grid, recipe)
            if _is_legal_in_a_strategy(grid, recipe):
                yield recipe


def _with_attention(grid: Grid, recipe: Recipe) -> Recipe:
    """With the attention that the resolver takes for such a layout, unless the user named one: not every
    implementation attends to parts of sequences."""
    if "kernels.attention" not in grid.decided:
        return recipe
    attention = attention_for(grid.target, attention_use_of(recipe))
    if attention == recipe.kernels.attention:
        return recipe
    return recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"attention": attention})})


def _is_legal_in_a_strategy(grid: Grid, layout: Recipe) -> bool:
    """Whether every rule is kept in one of the layout's strategies: some ask for what only sharing ranks have."""
    for shared in _strategies(grid, layout):
        parallelism = layout.parallelism.model_copy(update=shared)
        if is_legal(_case(grid, layout.model_copy(update={"parallelism": parallelism}))):
            return True
    return False


def _degrees(grid: Grid) -> Iterator[dict[str, int]]:
    """tp, pp, cp, ep and etp whose product, with data parallel, can be the world."""
    world = grid.recipe.launcher.ranks
    model = grid.recipe.model
    moe = model.moe
    of_world = divisors(world)
    node_size = grid.hardware.node_size
    seq_len = grid.recipe.data.seq_len
    tps = grid.options("parallelism.tp", [d for d in of_world if d <= node_size and model.n_heads % d == 0])
    pps = grid.options("parallelism.pp", [d for d in of_world if d <= model.n_layers])
    cps = grid.options("parallelism.cp", [d for d in of_world if seq_len % (2 * d) == 0])
    expert_degrees = [1]
    if moe is not None:
        expert_degrees = divisors(gcd(moe.n_experts, world))
    eps = grid.options("parallelism.ep", expert_degrees)
    for tp, pp, cp in product(tps, pps, cps):
        if world % (tp * pp * cp):
            continue
        # experts are split as the dense layers are, or not at all
        splits = [1]
        if moe is not None:
            splits = sorted({1, tp})
        for ep, etp in product(eps, grid.options("parallelism.etp", splits)):
            if world % fewest_gpus(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp) == 0:
                yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}


def pipelines(grid: Grid, pp: int) -> Iterator[PipelineSpec]:
    """Schedules of `pp` stages, with layers divided evenly and by load (layout=auto). What is set stays: a split that
    is written out with its number of stages."""
    pipeline = grid.recipe.parallelism.pipeline
    recipe_pp = grid.recipe.parallelism.pp
    is_written = pipeline.layout is not None or pipeline.first_layers is not None or pipeline.last_layers is not None
    searches_chunks = "parallelism.pipeline.virtual_stages" in grid.open and not is_written
    searches_schedules = "parallelism.pipeline.schedule" in grid.open
    searches_layouts = "parallelism.pipeline.layout" in grid.open and not is_written
    if pp == 1:
        has_one_chunk = searches_chunks or pipeline.virtual_stages == 1
        if has_one_chunk and (searches_schedules or pipeline.schedule in ("1f1b", "gpipe")):
            yield PipelineSpec(schedule="1f1b", micro_batch_group=1)
        return
    if is_written and pp != recipe_pp:
        return
    # a group of pp micro batches follows pp, another one was set
    group = pipeline.micro_batch_group
    if group == recipe_pp:
        group = pp
    chunks: Sequence[int] = (pipeline.virtual_stages,)
    if searches_chunks:
        # no more stages than there are layers, the embedding and the head alone
        most = min(_MAX_VIRTUAL, (grid.recipe.model.n_layers + 2) // pp)
        chunks = range(1, most + 1)
    for virtual in chunks:
        schedules: Sequence[str] = (pipeline.schedule,)
        if searches_schedules:
            schedules = _SCHEDULES.get(virtual, ("interleaved",))
        for schedule in schedules:
            changes = {"schedule": schedule, "virtual_stages": virtual, "micro_batch_group": group}
            even = pipeline.model_copy(update=changes)
            yield even
            if searches_layouts:
                yield even.model_copy(update={**EVENLY, "layout": AUTO})


def _by_load(grid: Grid, recipe: Recipe) -> Recipe:
    """With its layers divided by load, unless they are divided evenly or as the recipe says."""
    if not _is_divided_by_search(grid, recipe):
        return recipe
    return divided_by_load(recipe, grid.hardware, grid.throughput)


def _is_divided_by_search(grid: Grid, recipe: Recipe) -> bool:
    """Whether its layers are divided neither evenly nor as the recipe of the grid says."""
    return recipe.parallelism.pipeline.layout is not None and grid.recipe.parallelism.pipeline.layout is None


def _divisions(grid: Grid, layout: Recipe) -> Iterator[tuple[dict[str, object], int]]:
    """Data-parallel strategies, with their degrees, and micro batches of a layout."""
    for shared in _strategies(grid, layout):
        for micro_batch in _micro_batches(grid, data_parallel(layout.parallelism)):
            yield shared, micro_batch


def _strategies(grid: Grid, layout: Recipe) -> Iterator[dict[str, object]]:
    """Data-parallel strategies of a layout, with their degrees."""
    parallelism = layout.parallelism
    dp = data_parallel(parallelism)
    tp_cp = parallelism.tp * parallelism.cp
    expert_grid = parallelism.ep * parallelism.etp
    strategies = STRATEGIES
    if dp == 1:
        # nobody to share with
        strategies = STRATEGIES[:1]
    for strategy in grid.options("parallelism.dp_strategy", strategies):
        shares = shares_of(strategy, dp, tp_cp, node=grid.hardware.node_size, grid=expert_grid)
        # with one shard or one replica it is another strategy
        if strategy == "hsdp" and min(shares.values()) == 1:
            continue
        yield {"dp_strategy": strategy, **shares}


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
    shards = divisors(dp)
    legal = [n for n in shards if n * inner % grid == 0] or shards
    in_a_node = [n for n in legal if n <= most]
    if not in_a_node:
        return legal[0], "the fewest that hold all experts"
    return in_a_node[-1], "the ranks of one node"


def _micro_batches(grid: Grid, dp: int) -> list[int]:
    """Sequences of a micro batch: what divides a rank's share of every batch of the run, up to 16."""
    share = gcd(*_case(grid, grid.recipe).batches) // dp
    sizes = [1]
    if share:
        sizes = [n for n in divisors(share) if n <= _MAX_MICRO_BATCH]
    return grid.options("train.micro_batch", sizes)


def _changed(recipe: Recipe, parallelism: ParallelismSpec, micro_batch: int) -> Recipe:
    train = recipe.train.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallelism": parallelism, "train": train})


def _case(grid: Grid, recipe: Recipe) -> Case:
    return Case(recipe, grid.target, grid.facts, grid.open | grid.decided)
