"""The one change of a layout that would save most of a step's time.

Each trial turns one thing of the layout that was given and leaves the rest, so that somebody who chose it knows it
again; a layout found anew is what `tune` is for. Nothing that changes what is trained is tried.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megaspec.core.frozen import Frozen
from megaspec.estimate.batch_sizes import data_parallel
from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.communication import topology_of
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.schedule import bubble_formula, shape_of
from megaspec.estimate.step_time import least_seconds, step_time
from megaspec.model.kinds import moe_of
from megaspec.parallelism.spec import OverlapSpec, ParallelismSpec, RecomputeSpec
from megaspec.parallelism.stages import stage_problem
from megaspec.recipe import Recipe
from megaspec.rules.case import can_split_sequences
from megaspec.rules.difference import differences
from megaspec.rules.kernel_use import use_of
from megaspec.rules.run_facts import Facts
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.remedies import broken, in_words, overrides_of, target_of
from megaspec.search.tune import STRATEGIES, Grid, pipelines, shares_of
from megaspec_kernels.catalog import CATALOG, choose

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


class _Trial(NamedTuple):
    """A changed recipe."""

    likely: float
    """Seconds that a step may take: the busiest rank's passes and the bubble of equal stages."""
    least: float
    """Seconds that it takes at least: the passes."""
    recipe: Recipe


def best_change(recipe: Recipe, hardware: Hardware, ceilings: Ceilings, *, seconds: float) -> Change | None:
    """The single change of a filled recipe, whose step takes `seconds`, that saves most of them and fits; None where
    none is worth it. What may be fastest is weighed first, and no more than MOST in full."""
    now = fullest(memory_of(recipe)).total
    room = max(hardware.room, now) if now <= hardware.memory else hardware.room
    already, is_trainable = broken(recipe, hardware), not unbuilt_problems(recipe)
    legal: list[_Trial] = []
    for changed in trials(recipe, hardware, ceilings):
        if broken(changed, hardware) - already or (is_trainable and unbuilt_problems(changed)):
            continue
        least = least_seconds(changed, hardware, ceilings)
        legal.append(_Trial(least * (1 + bubble_formula(shape_of(changed))), least, changed))
    best, found, weighed = (1 - WORTH) * seconds, None, 0
    for trial in sorted(legal, key=lambda one: one.likely):
        if trial.least >= best or any(one.is_experiment for one in differences(recipe, trial.recipe)):
            continue
        if weighed == MOST:
            break
        weighed += 1
        memory = fullest_within(trial.recipe, room)
        if memory is None:
            continue
        predicted = step_time(trial.recipe, hardware, ceilings).seconds
        if predicted < best:
            best, found = predicted, (trial.recipe, memory.total)
    if found is None:
        return None
    changed, total = found
    overrides = overrides_of(recipe, changed)
    return Change(overrides=overrides, seconds=best, saves=1 - best / seconds, total=total)


def trials(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> Iterator[Recipe]:
    """About forty recipes, each with one thing turned, whatever the rules say of them."""
    yield from _pipelines(recipe, hardware, ceilings)
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
    own = recipe.parallelism
    own = own.model_copy(update=degrees)
    world, inner = recipe.launcher.ranks, own.tp * own.cp
    if world % (inner * own.pp):
        return None
    dp = world // (inner * own.pp)
    strategy = own.dp_strategy
    if dp == 1 and own.cp == 1:
        # nobody is left to share with
        strategy = "replicate"
    changes: dict[str, Any] = {"dp_strategy": strategy}
    changes |= shares_of(strategy, dp, inner, node=hardware.node_size, grid=own.ep * own.etp)
    if own.tp != recipe.parallelism.tp:
        lengths = {"seq_len": recipe.data.seq_len, "max_seq_len": recipe.model.max_seq_len}
        splits = can_split_sequences(tp=own.tp, cp=own.cp, **lengths)
        changes["sequence_parallel"] = splits and (recipe.parallelism.sequence_parallel or recipe.parallelism.tp == 1)
    if own.pp != recipe.parallelism.pp:
        changes["pipeline"] = own.pipeline.model_copy(update={"micro_batch_group": own.pp})
    own = own.model_copy(update=changes)
    if stage_problem(recipe.model.n_layers, own) is not None:
        return None
    return _laid_out(recipe, own)


def _laid_out(recipe: Recipe, parallelism: ParallelismSpec) -> Recipe:
    return recipe.model_copy(update={"parallelism": parallelism})


def _pipelines(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> Iterator[Recipe]:
    """Other schedules, and other numbers of chunks."""
    own = recipe.parallelism
    if own.pp == 1:
        return
    free = frozenset({"parallelism.pipeline.schedule", "parallelism.pipeline.virtual_stages"})
    grid = Grid(recipe, target_of(recipe, hardware), Facts(recipe.run_dir), hardware, ceilings, free)
    for pipeline in pipelines(grid, own.pp):
        changed = own.model_copy(update={"pipeline": pipeline})
        if pipeline != own.pipeline and stage_problem(recipe.model.n_layers, changed) is None:
            yield _laid_out(recipe, changed)


def _recomputing(recipe: Recipe) -> Iterator[Recipe]:
    own = recipe.parallelism
    for recompute in _RECOMPUTES:
        if recompute != own.recompute:
            yield _laid_out(recipe, own.model_copy(update={"recompute": recompute}))


def _micro_batches(recipe: Recipe) -> Iterator[Recipe]:
    """Half and twice as many sequences."""
    now, dp = recipe.train.micro_batch, data_parallel(recipe.parallelism)
    for micro_batch in (now // 2, 2 * now):
        if micro_batch and recipe.train.global_batch % (micro_batch * dp) == 0:
            train = recipe.train.model_copy(update={"micro_batch": micro_batch})
            yield recipe.model_copy(update={"train": train})


def _degrees(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """Each degree halved and doubled, tensor parallel within a node."""
    own = recipe.parallelism
    axes = ["tp", "cp"]
    if own.pipeline.layout is None:
        # a layout in letters is of so many stages
        axes.append("pp")
    if moe_of(recipe.model) is not None:
        axes.append("ep")
    for axis in axes:
        degree = getattr(own, axis)
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
    own = recipe.parallelism
    for tp in range(1, hardware.node_size + 1):
        if own.tp % tp or hardware.node_size % tp:
            continue
        for pp in (own.pp, own.pp * own.tp // tp):
            changed = with_degrees(recipe, hardware, tp=tp, pp=pp)
            if changed is not None:
                yield changed


def _strategies(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    own, dp = recipe.parallelism, data_parallel(recipe.parallelism)
    if dp == 1:
        return
    for strategy in STRATEGIES:
        found = shares_of(strategy, dp, own.tp * own.cp, node=hardware.node_size, grid=own.ep * own.etp)
        if strategy == own.dp_strategy or (strategy == "hsdp" and min(found.values()) == 1):
            continue
        yield _laid_out(recipe, own.model_copy(update={"dp_strategy": strategy, **found}))


def _switches(recipe: Recipe) -> Iterator[Recipe]:
    """Overlaps that are off, on; transfers to the CPU, off; the other way of sending tokens to their experts."""
    own = recipe.parallelism
    for name in OverlapSpec.model_fields:
        if not getattr(own.overlap, name):
            overlap = own.overlap.model_copy(update={name: True})
            yield _laid_out(recipe, own.model_copy(update={"overlap": overlap}))
    for name, off in (("layers", 0), ("optimizer", 0.0)):
        if getattr(own.offload, name):
            offload = own.offload.model_copy(update={name: off})
            yield _laid_out(recipe, own.model_copy(update={"offload": offload}))
    if own.ep > 1:
        other = "all_gather" if own.dispatch == "all_to_all" else "all_to_all"
        yield _laid_out(recipe, own.model_copy(update={"dispatch": other}))


def _kernels(recipe: Recipe, hardware: Hardware) -> Iterator[Recipe]:
    """The best implementation of each operation, where another one is set."""
    own, use = recipe.kernels, use_of(recipe)
    best = {name: choose(name, device="cuda", sm=hardware.sm, use=use) for name in CATALOG} | {"compile": "block"}
    for name, implementation in best.items():
        if getattr(own, name) != implementation:
            yield recipe.model_copy(update={"kernels": own.model_copy(update={name: implementation})})
