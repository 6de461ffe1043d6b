"""Search for a layout: every legal division of a recipe among its ranks, by the memory and the time that it is
predicted to take.

Legal is what the rules let pass. Layouts are compared at the recipe's own global batch. At one layout and micro batch
the search takes the least recomputation that fits, since more of it only costs time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from megaspec.core.axes import fewest_gpus
from megaspec.parallelism.spec import ParallelismSpec, PipelineSpec, RecomputeSpec
from megaspec.recipe import Recipe
from megaspec.resolve.batch import data_parallel
from megaspec.resolve.case import Case, can_split_sequences, divisors
from megaspec.resolve.ceilings import Ceilings
from megaspec.resolve.facts import Facts
from megaspec.resolve.hardware import Hardware
from megaspec.resolve.kinds import moe_of
from megaspec.resolve.memory import StageMemory, fullest, memory_of
from megaspec.resolve.rules import is_legal
from megaspec.resolve.stages import stage_problem
from megaspec.resolve.step_time import StepTime, step_time
from megaspec.resolve.target import Target
from megaspec.resolve.unbuilt import unbuilt_problems
from megaspec.train.batch_schedule import BatchSchedule

# Fields that a search may decide, as dotted paths.
SEARCHED = (
    "parallelism.tp",
    "parallelism.pp",
    "parallelism.pipeline.virtual_stages",
    "parallelism.cp",
    "parallelism.ep",
    "parallelism.etp",
    "parallelism.dp_strategy",
    "parallelism.recompute.kind",
    "train.micro_batch",
)
STRATEGIES = ("replicate", "zero1", "zero2", "fsdp", "hsdp")
_RECOMPUTE = {
    "none": RecomputeSpec(),
    "selective": RecomputeSpec(kind="selective"),
    "full": RecomputeSpec(kind="full"),
}
_MAX_VIRTUAL = 8


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
    """Those that fit, fastest first; when none fits, the one that needs least memory."""
    weighed: int
    """Layouts and micro batches that were legal."""
    fitting: int


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


def tune(grid: Grid, *, most: int = 10) -> Found:
    """The fastest layouts that fit."""
    fitting: list[Candidate] = []
    smallest: tuple[Recipe, StageMemory] | None = None
    weighed = 0
    for layout in layouts(grid):
        for strategy, micro_batch in _divisions(grid, layout):
            for kind in grid.options("parallelism.recompute.kind", list(_RECOMPUTE)):
                recipe = _with(layout, strategy, micro_batch, kind)
                if grid.is_for_training and unbuilt_problems(recipe):
                    continue
                weighed += 1
                memory = fullest(memory_of(recipe))
                if memory.total <= grid.hardware.room:
                    time = step_time(recipe, grid.hardware, grid.ceilings)
                    fitting.append(Candidate(recipe, memory, time, True))
                    break
                if smallest is None or memory.total < smallest[1].total:
                    smallest = recipe, memory
    fitting.sort(key=lambda one: one.time.seconds)
    best = [one for one in fitting if is_legal(_case(grid, one.recipe))][:most]
    if not best and smallest is not None:
        recipe, memory = smallest
        best = [Candidate(recipe, memory, step_time(recipe, grid.hardware, grid.ceilings), False)]
    return Found(tuple(best), weighed, len(fitting))


def layouts(grid: Grid) -> Iterator[Recipe]:
    """Every legal choice of degrees and virtual stages, the rest as in the recipe."""
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
            for pipeline in _pipelines(grid, pp):
                degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "pipeline": pipeline}
                dp = world // (tp * pp * cp)
                shares = _shares("replicate", dp, tp * cp, node=grid.hardware.node_size)
                splits = can_split_sequences(
                    tp=tp, cp=cp, seq_len=grid.recipe.data.seq_len, max_seq_len=model.max_seq_len
                )
                changed = {**degrees, **shares, "dp_strategy": "replicate", "sequence_parallel": splits}
                recipe = _changed(grid.recipe, own.model_copy(update=changed), _micro_batches(grid, dp)[0])
                if is_legal(_case(grid, recipe)):
                    yield recipe


def _pipelines(grid: Grid, pp: int) -> list[PipelineSpec]:
    """Schedules of `pp` stages; a split that the recipe writes out stays with the number of stages that it is for."""
    own = grid.recipe.parallelism
    is_written_out = own.pipeline.layout is not None or own.pipeline.first_layers or own.pipeline.last_layers
    if pp == own.pp and (is_written_out or "parallelism.pipeline.virtual_stages" not in grid.open):
        return [own.pipeline]
    if is_written_out and pp > 1:
        return []
    found = []
    chunks = range(1, _MAX_VIRTUAL + 1) if "parallelism.pipeline.virtual_stages" in grid.open else (1,)
    for virtual in chunks if pp > 1 else (1,):
        one = PipelineSpec(
            schedule="1f1b" if virtual == 1 else "interleaved",
            virtual_stages=virtual,
            micro_batch_group=pp,
            count_embedding=own.pipeline.count_embedding and pp > 1,
            count_loss=own.pipeline.count_loss and pp > 1,
        )
        if stage_problem(grid.recipe.model, own.model_copy(update={"pp": pp, "pipeline": one})) is None:
            found.append(one)
    return found


def _divisions(grid: Grid, layout: Recipe) -> Iterator[tuple[dict[str, object], int]]:
    """Data-parallel strategies and micro batches of a layout."""
    own, dp = layout.parallelism, data_parallel(layout.parallelism)
    for strategy in grid.options("parallelism.dp_strategy", STRATEGIES if dp > 1 else STRATEGIES[:1]):
        shares = _shares(strategy, dp, own.tp * own.cp, node=grid.hardware.node_size, grid=own.ep * own.etp)
        if strategy == "hsdp" and min(shares.values()) == 1:
            continue
        for micro_batch in _micro_batches(grid, dp):
            yield {"dp_strategy": strategy, **shares}, micro_batch


def _shares(strategy: str, dp: int, inner: int, *, node: int, grid: int = 1) -> dict[str, int]:
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


def _with(layout: Recipe, strategy: dict[str, object], micro_batch: int, kind: str) -> Recipe:
    own = layout.parallelism
    recompute = own.recompute if own.recompute.kind == kind else _RECOMPUTE[kind]
    return _changed(layout, own.model_copy(update={**strategy, "recompute": recompute}), micro_batch)


def _changed(recipe: Recipe, parallelism: ParallelismSpec, micro_batch: int) -> Recipe:
    train = recipe.train.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallelism": parallelism, "train": train})


def _case(grid: Grid, recipe: Recipe) -> Case:
    return Case(recipe, grid.target, grid.facts, frozenset(grid.open))
