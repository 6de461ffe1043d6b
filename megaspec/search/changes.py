"""The one change of a layout that would save most of a step's time.

Each trial turns one thing of the layout that was given and leaves the rest, so that somebody who chose it knows it
again; a layout found anew is what `tune` is for. Nothing that changes what is trained is tried.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megaspec.core.frozen import Frozen
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.schedule import bubble_formula, shape_of
from megaspec.estimate.step_time import least_seconds, step_time
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.estimate.topology import topology_of
from megaspec.parallelism.spec import OverlapSpec, ParallelismSpec, RecomputeSpec
from megaspec.parallelism.stages import stage_problem
from megaspec.precision.spec import fp8_recipe
from megaspec.recipe import Recipe
from megaspec.rules.case import can_split_sequences
from megaspec.rules.difference import differences
from megaspec.rules.kernel_use import attention_use_of
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.remedies import broken, in_words, overrides_of, target_of, with_attention_for_parts
from megaspec.search.tune import STRATEGIES, Grid, pipelines, shares_of
from megaspec_kernels.catalog import CATALOG, choose, packages_of

# Of a step's time: less than predictions are off by is not worth a word.
WORTH = 0.03
# Trials that are weighed in full: pipelines of a hundred stages take a second each.
MOST = 8
_RECOMPUTES = (
    RecomputeSpec(),
    RecomputeSpec(kind="selective"),
    RecomputeSpec(kind="selective", parts=("norm", "activation")),
    RecomputeSpec(kind="full"),
)


class Change(Frozen):
    """Settings with which a step is shorter."""

    overrides: tuple[str, ...]
    """`path=value` each."""
    seconds: float
    """Of a step with them."""
    saves: float
    """Share of the step's time."""
    total: int
    """Bytes of the fullest rank."""

    @property
    def words(self) -> str:
        """As they are typed."""
        return in_words(self.overrides)


class _LayoutTrial(NamedTuple):
    """A changed recipe."""

    likely: float
    """Seconds that a step may take: the busiest rank's passes and the bubble of equal stages."""
    least: float
    """Seconds that it takes at least: the passes."""
    recipe: Recipe


def best_change(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, *, seconds: float) -> Change | None:
    """The single change of a filled recipe, whose step takes `seconds`, that saves most of them and fits; None where
    none is worth it. What may be fastest is weighed first, and no more than MOST in full."""
    room = _room(recipe, hardware)
    fastest = (1 - WORTH) * seconds
    found: tuple[Recipe, int] | None = None
    n_weighed = 0
    for trial in sorted(_legal_trials(recipe, hardware, throughput), key=lambda one: one.likely):
        if trial.least >= fastest or _is_other_experiment(recipe, trial.recipe):
            continue
        if n_weighed == MOST:
            break
        n_weighed += 1
        memory = fullest_within(trial.recipe, room)
        if memory is None:
            continue
        predicted = step_time(trial.recipe, hardware, throughput).seconds
        if predicted < fastest:
            fastest = predicted
            found = (trial.recipe, memory.total)
    if found is None:
        return None
    changed, total = found
    overrides = overrides_of(recipe, changed)
    return Change(overrides=overrides, seconds=fastest, saves=1 - fastest / seconds, total=total)


def _room(recipe: Recipe, hardware: Hardware) -> int:
    """Bytes that a change may take: what a search leaves, or what is taken now where that is more and fits."""
    now = fullest(memory_of(recipe)).total
    if now <= hardware.memory:
        return max(hardware.room, now)
    return hardware.room


def _legal_trials(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> list[_LayoutTrial]:
    """Trials that break no rule that was kept, and can be trained where the recipe can."""
    already_broken = broken(recipe, hardware)
    is_trainable = not unbuilt_problems(recipe)
    legal = []
    for changed in trials(recipe, hardware, throughput):
        if broken(changed, hardware) - already_broken:
            continue
        if is_trainable and unbuilt_problems(changed):
            continue
        least = least_seconds(changed, hardware, throughput)
        likely = least * (1 + bubble_formula(shape_of(changed)))
        legal.append(_LayoutTrial(likely, least, changed))
    return legal


def _is_other_experiment(recipe: Recipe, changed: Recipe) -> bool:
    """Whether something else is trained."""
    return any(one.is_experiment for one in differences(recipe, changed))


def trials(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> Iterator[Recipe]:
    """About forty recipes, each with one thing turned, whatever the rules say of them."""
    yield from _pipelines(recipe, hardware, throughput)
    yield from _recomputing(recipe)
    yield from _micro_batches(recipe)
    yield from _degrees(recipe, hardware)
    if not topology_of(recipe, hardware).within_node(("tp",)):
        yield from within_a_node(recipe, hardware)
    yield from _strategies(recipe, hardware)
    yield from _switches(recipe)
    yield from _kernels(recipe, hardware)


def with_degrees(recipe: Recipe, hardware: Hardware, **degrees: int) -> Recipe | None:
    """With other degrees, and data parallel taking up the rest; None where that is no number of ranks."""
    before = recipe.parallelism
    after = before.model_copy(update=degrees)
    tp_cp = after.tp * after.cp
    dp, rest = divmod(recipe.launcher.ranks, tp_cp * after.pp)
    if rest:
        return None
    strategy = after.dp_strategy
    if dp == 1 and after.cp == 1:
        # nobody is left to share with
        strategy = "replicate"
    changes: dict[str, Any] = {"dp_strategy": strategy}
    changes |= shares_of(strategy, dp, tp_cp, node=hardware.node_size, grid=after.ep * after.etp)
    if after.tp != before.tp:
        splits = can_split_sequences(
            tp=after.tp, cp=after.cp, seq_len=recipe.data.seq_len, max_seq_len=recipe.model.max_seq_len
        )
        # what was switched off stays so; with tp=1 it could not be on
        changes["sequence_parallel"] = splits and (before.sequence_parallel or before.tp == 1)
    if after.pp != before.pp:
        changes["pipeline"] = after.pipeline.model_copy(update={"micro_batch_group": after.pp})
    after = after.model_copy(update=changes)
    if stage_problem(recipe.model.n_layers, after) is not None:
        return None
    return with_attention_for_parts(_laid_out(recipe, after))


def _laid_out(recipe: Recipe, parallelism: ParallelismSpec) -> Recipe:
    return recipe.model_copy(update={"parallelism": parallelism})


def _pipelines(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> Iterator[Recipe]:
    """Other schedules, and other numbers of chunks."""
    parallelism = recipe.parallelism
    if parallelism.pp == 1:
        return
    free = frozenset({"parallelism.pipeline.schedule", "parallelism.pipeline.virtual_stages"})
    grid = Grid(recipe, target_of(recipe, hardware), Facts(recipe.run_dir), hardware, throughput, free)
    for pipeline in pipelines(grid, parallelism.pp):
        changed = parallelism.model_copy(update={"pipeline": pipeline})
        if pipeline != parallelism.pipeline and stage_problem(recipe.model.n_layers, changed) is None:
            yield _laid_out(recipe, changed)


def _recomputing(recipe: Recipe) -> Iterator[Recipe]:
    parallelism = recipe.parallelism
    for recompute in _RECOMPUTES:
        if recompute != parallelism.recompute:
            yield _laid_out(recipe, parallelism.model_copy(update={"recompute": recompute}))


def _micro_batches(recipe: Recipe) -> Iterator[Recipe]:
    """Half and twice as many sequences."""
    now = recipe.train.micro_batch
    dp = data_parallel(recipe.parallelism)
    for micro_batch in (now // 2, 2 * now):
        if micro_batch and recipe.train.global_batch % (micro_batch * dp) == 0:
            train = recipe.train.model_copy(update={"micro_batch": micro_batch})
            yield recipe.model_copy(update={"train": train})


def _degrees(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """Each degree halved and doubled, tensor parallel within a node."""
    parallelism = recipe.parallelism
    axes = ["tp", "cp"]
    if parallelism.pipeline.layout is None:
        # a layout in letters is of so many stages
        axes.append("pp")
    if recipe.model.moe is not None:
        axes.append("ep")
    for axis in axes:
        degree = getattr(parallelism, axis)
        others = [2 * degree]
        if degree % 2 == 0:
            others.append(degree // 2)
        for other in others:
            if axis == "tp" and other > max(degree, hardware.node_size):
                continue
            changed = with_degrees(recipe, hardware, **{axis: other})
            if changed is not None:
                yield changed


def within_a_node(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """Tensor parallel inside a node, and data or pipeline parallel in its place, whatever the rules say of them."""
    parallelism = recipe.parallelism
    for tp in range(1, hardware.node_size + 1):
        if parallelism.tp % tp or hardware.node_size % tp:
            continue
        # the ranks that tensor parallel gives up go to data parallel, or to more stages
        for pp in (parallelism.pp, parallelism.pp * parallelism.tp // tp):
            changed = with_degrees(recipe, hardware, tp=tp, pp=pp)
            if changed is not None:
                yield changed


def _strategies(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """Other ways of sharing out over the same data-parallel ranks."""
    parallelism = recipe.parallelism
    dp = data_parallel(parallelism)
    if dp == 1:
        return
    tp_cp = parallelism.tp * parallelism.cp
    expert_grid = parallelism.ep * parallelism.etp
    for strategy in STRATEGIES:
        shares = shares_of(strategy, dp, tp_cp, node=hardware.node_size, grid=expert_grid)
        # with one shard or one replica hsdp is another strategy
        is_same = strategy == parallelism.dp_strategy or (strategy == "hsdp" and min(shares.values()) == 1)
        if not is_same:
            yield _laid_out(recipe, parallelism.model_copy(update={"dp_strategy": strategy, **shares}))


def _switches(recipe: Recipe) -> Iterator[Recipe]:
    """Overlaps that are off, on; transfers to the CPU, off; the other way of sending tokens to their experts."""
    parallelism = recipe.parallelism
    for name in OverlapSpec.model_fields:
        if not getattr(parallelism.overlap, name):
            overlap = parallelism.overlap.model_copy(update={name: True})
            yield _laid_out(recipe, parallelism.model_copy(update={"overlap": overlap}))
    for name, off in (("layers", 0), ("optimizer", 0.0)):
        if getattr(parallelism.offload, name):
            offload = parallelism.offload.model_copy(update={name: off})
            yield _laid_out(recipe, parallelism.model_copy(update={"offload": offload}))
    if parallelism.ep > 1:
        other = "all_to_all"
        if parallelism.dispatch == "all_to_all":
            other = "all_gather"
        yield _laid_out(recipe, parallelism.model_copy(update={"dispatch": other}))


def _kernels(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """The best implementation of each operation, where another one is set."""
    use = attention_use_of(recipe)
    # what the recipe names is taken to be there
    packages = packages_of(recipe.kernels.model_dump(), fp8_recipe=fp8_recipe(recipe.precision))
    best = {name: choose(name, device="cuda", sm=hardware.sm, use=use, packages=packages) for name in CATALOG}
    best["compile"] = "block"
    if packages:
        # who names a package wants it
        best["attention"] = recipe.kernels.attention
    for name, implementation in best.items():
        if getattr(recipe.kernels, name) != implementation:
            kernels = recipe.kernels.model_copy(update={name: implementation})
            yield recipe.model_copy(update={"kernels": kernels})
