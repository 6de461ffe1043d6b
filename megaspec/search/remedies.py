"""What would make a run fit that does not: changes that keep the world and the rules, the cheapest first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from megaspec.core.axes import world_size
from megaspec.core.frozen import Frozen
from megaspec.core.problems import as_word, in_a_shell
from megaspec.estimate.cpu_memory import cpu_need
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.target import Target
from megaspec.optim.spec import AdamWSpec
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.parallelism.stages import stage_problem
from megaspec.precision.spec import fp8_recipe
from megaspec.recipe import Recipe
from megaspec.rules.case import Case, can_split_sequences
from megaspec.rules.difference import leaves
from megaspec.rules.kernel_use import attention_use_of
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import RULES
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec_kernels.catalog import CATALOG, choose, packages_of

MOST = 4


class Remedy(Frozen):
    """Settings with which a run fits."""

    overrides: tuple[str, ...]
    """`path=value` each; `hardware=NAME` where only larger GPUs help."""
    total: int
    """Bytes of the fullest rank; on a CPU, of all ranks of a machine and their processes."""

    @property
    def words(self) -> str:
        """As they are typed."""
        return in_words(self.overrides)


def in_words(overrides: Sequence[str]) -> str:
    """As they are typed in a shell."""
    return " ".join(map(in_a_shell, overrides))


@dataclass(frozen=True)
class Lever:
    """One change."""

    field: str
    """What it turns: two levers of the same field don't go together."""
    cost: int
    """A rough order of what it costs in time; only its order counts."""
    turn: Callable[[Recipe], Recipe | None]
    """The changed recipe; None where there is nothing to turn."""


class _OrderedRemedy(NamedTuple):
    """A remedy, and what says which goes before which."""

    is_plan_only: bool
    """It can't be trained, the recipe can."""
    cost: int
    """The levers' together."""
    remedy: Remedy


def remedies(recipe: Recipe, hardware: Hardware) -> list[Remedy]:
    """At most four ways to make a filled recipe fit; none when it fits already.

    What can be trained goes before what can be planned only, then what costs less time; larger GPUs come last."""
    if fullest(memory_of(recipe)).total <= hardware.room:
        return []
    already_broken = broken(recipe, hardware)
    is_trainable = not unbuilt_problems(recipe)
    widest = max(hardware.node_size, recipe.parallelism.tp)
    found: dict[frozenset[str], _OrderedRemedy] = {}
    for levers in _choices():
        fields = frozenset(lever.field for lever in levers)
        # what needs fewer changes was found before, and more of them would only cost more
        if any(fewer <= fields for fewer in found):
            continue
        changed = _turned(recipe, levers)
        if changed is None or changed.parallelism.tp > widest:
            continue
        # what breaks a rule may have no order of passes to weigh
        if broken(changed, hardware) - already_broken:
            continue
        memory = fullest_within(changed, hardware.room)
        if memory is not None:
            is_plan_only = is_trainable and bool(unbuilt_problems(changed))
            remedy = Remedy(overrides=overrides_of(recipe, changed), total=memory.total)
            found[fields] = _OrderedRemedy(is_plan_only, _cost(levers), remedy)
    in_order = sorted(found.values(), key=lambda one: (one.is_plan_only, one.cost))
    larger = _larger(recipe, hardware)
    return [*[one.remedy for one in in_order[: MOST - len(larger)]], *larger]


def remedies_on_cpu(recipe: Recipe, target: Target) -> list[Remedy]:
    """The single changes with which the ranks of a filled recipe fit a machine without GPUs, what costs least first."""
    world = world_size(recipe.parallelism.degrees)
    already_broken = _broken_on(recipe, target)
    found = []
    for lever in sorted(LEVERS, key=lambda lever: lever.cost):
        changed = lever.turn(recipe)
        if changed is None or _broken_on(changed, target) - already_broken or unbuilt_problems(changed):
            continue
        total = cpu_need(changed, world=world, local=target.local_ranks).total
        if total <= target.memory:
            found.append(Remedy(overrides=overrides_of(recipe, changed), total=total))
    return found


def savings(recipe: Recipe, hardware: Hardware, *, most: int = 3) -> list[Remedy]:
    """The single changes of a filled recipe that can be trained and save most memory, the largest saving first."""
    now = fullest(memory_of(recipe)).total
    already_broken = broken(recipe, hardware)
    found = []
    for lever in LEVERS:
        changed = lever.turn(recipe)
        if changed is None or broken(changed, hardware) - already_broken or unbuilt_problems(changed):
            continue
        total = fullest(memory_of(changed)).total
        if total < now:
            found.append(Remedy(overrides=overrides_of(recipe, changed), total=total))
    return sorted(found, key=lambda one: one.total)[:most]


def _choices() -> list[tuple[Lever, ...]]:
    """Single levers, then pairs and triples of different fields, each kind the cheapest first."""
    choices = []
    for count in (1, 2, 3):
        for levers in sorted(combinations(LEVERS, count), key=_cost):
            fields = {lever.field for lever in levers}
            if len(fields) == count:
                choices.append(levers)
    return choices


def _cost(levers: tuple[Lever, ...]) -> int:
    return sum(lever.cost for lever in levers)


def _turned(recipe: Recipe, levers: tuple[Lever, ...]) -> Recipe | None:
    """The recipe with one lever turned after the other; None where one of them has nothing to turn."""
    changed: Recipe | None = recipe
    for lever in levers:
        changed = lever.turn(changed)
        if changed is None:
            return None
    return changed


def target_of(recipe: Recipe, hardware: Hardware) -> Target:
    """A machine of such GPUs, as many as a filled recipe has ranks."""
    # what the recipe names is taken to be there
    packages = packages_of(recipe.kernels.model_dump(), fp8_recipe=fp8_recipe(recipe.precision))
    return Target(
        gpus=recipe.launcher.ranks,
        gpu=hardware.gpu_names[0],
        sm=hardware.sm,
        gpu_memory=hardware.memory,
        versions={"torch": "", "tensorboard": ""} | dict.fromkeys(packages, ""),
    )


def broken(recipe: Recipe, hardware: Hardware) -> set[str]:
    """Codes of the rules that a recipe breaks on such GPUs."""
    return _broken_on(recipe, target_of(recipe, hardware))


def _broken_on(recipe: Recipe, target: Target) -> set[str]:
    case = Case(recipe, target, Facts(recipe.run_dir), frozenset())
    return {code for code, rule in RULES.items() if rule(case) is not None}


def overrides_of(recipe: Recipe, changed: Recipe) -> tuple[str, ...]:
    """`path=value` of what levers turned in a filled recipe."""
    before = dict(_settings(recipe))
    return tuple(f"{key}={as_word(value)}" for key, value in _settings(changed) if value != before.get(key))


def _settings(recipe: Recipe) -> list[tuple[str, Any]]:
    """(path, value) of what levers turn; a list is one value."""
    content = recipe.model_dump(mode="json", include={"parallelism", "optim", "train", "kernels"})
    parts = content["parallelism"]["recompute"].pop("parts")
    return [*leaves(content), ("parallelism.recompute.parts", parts)]


def _larger(recipe: Recipe, hardware: Hardware) -> list[Remedy]:
    """The smallest kind of GPU with more memory that is enough."""
    total = fullest(memory_of(recipe)).total
    fits = [one for one in HARDWARE.values() if one.memory > hardware.memory and total <= one.room]
    if not fits:
        return []
    smallest = min(fits, key=lambda one: one.memory)
    return [Remedy(overrides=(f"hardware={smallest.name}",), total=total)]


def _laid_out(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"parallelism": recipe.parallelism.model_copy(update=changes)})


def _one_sequence(recipe: Recipe) -> Recipe | None:
    if recipe.train.micro_batch == 1:
        return None
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": 1})})


def _strategy(name: str) -> Callable[[Recipe], Recipe | None]:
    """What shares out more over the same ranks, in one replica."""

    def turn(recipe: Recipe) -> Recipe | None:
        parallelism = recipe.parallelism
        # each shares out what the one before it does, and more; hsdp is not among them, since replicas were asked for
        order = ("replicate", "zero1", "zero2", "fsdp")
        if parallelism.dp_strategy not in order or order.index(parallelism.dp_strategy) >= order.index(name):
            return None
        ranks = parallelism.dp_replicate * parallelism.dp_shard
        return _laid_out(recipe, dp_strategy=name, dp_replicate=1, dp_shard=ranks)

    return turn


def _selective(recipe: Recipe) -> Recipe | None:
    """What is cheap to make again: norms and activations."""
    if recipe.parallelism.recompute.kind != "none":
        return None
    return _laid_out(recipe, recompute=RecomputeSpec(kind="selective", parts=("norm", "activation")))


def _feed_forward(recipe: Recipe) -> Recipe | None:
    """Feed-forward layers and experts, with the norms before them."""
    recompute = recipe.parallelism.recompute
    if recompute.kind == "full" or set(recompute.parts or ()) & {"mlp", "moe"}:
        return None
    moe = recipe.model.moe
    mixers = {mixer for layer in recipe.model.mixers for mixer in layer}
    parts = ["norm"]
    parts += [name for name in ("mlp", "moe") if name in mixers]
    if "moe" in mixers and moe is not None and moe.d_shared:
        parts.append("shared_experts")
    return _laid_out(recipe, recompute=RecomputeSpec(kind="selective", parts=tuple(parts)))


def _full(recipe: Recipe) -> Recipe | None:
    if recipe.parallelism.recompute.kind == "full":
        return None
    return _laid_out(recipe, recompute=RecomputeSpec(kind="full"))


def _doubled(axis: str) -> Callable[[Recipe], Recipe | None]:
    """Twice the ranks on an axis, half of them on data parallel."""

    def turn(recipe: Recipe) -> Recipe | None:
        parallelism = recipe.parallelism
        name = "dp_shard"
        if parallelism.dp_replicate % 2 == 0:
            name = "dp_replicate"
        dp = getattr(parallelism, name)
        # a layout in letters is of so many stages
        if dp % 2 or (axis == "pp" and parallelism.pipeline.layout is not None):
            return None
        changes: dict[str, Any] = {axis: 2 * getattr(parallelism, axis), name: dp // 2}
        if dp == 2 and parallelism.dp_strategy != "replicate" and changes.get("cp", parallelism.cp) == 1:
            # nobody is left to share with
            changes["dp_strategy"] = "replicate"
        if axis == "pp":
            pipeline = parallelism.pipeline.model_copy(update={"micro_batch_group": 2 * parallelism.pp})
            changes["pipeline"] = pipeline
        widened = parallelism.model_copy(update=changes)
        if stage_problem(recipe.model.n_layers, widened) is not None:
            return None
        splits = can_split_sequences(
            tp=widened.tp, cp=widened.cp, seq_len=recipe.data.seq_len, max_seq_len=recipe.model.max_seq_len
        )
        return with_attention_for_parts(_laid_out(recipe, **changes, sequence_parallel=splits))

    return turn


def with_attention_for_parts(recipe: Recipe) -> Recipe:
    """With attention that runs on every device where a changed layout gives ranks parts of sequences, and what is set
    attends to whole ones alone."""
    use = attention_use_of(recipe)
    if not use.blocks or CATALOG["attention"].implementations[recipe.kernels.attention].blocks:
        return recipe
    attention = choose("attention", device="cpu", sm=0, use=use)
    return recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"attention": attention})})


def _one_by_one(recipe: Recipe) -> Recipe | None:
    """The schedule that holds least: other chunks and weight gradients that are deferred wait for nothing."""
    parallelism = recipe.parallelism
    if parallelism.pp == 1 or parallelism.pipeline.schedule == "1f1b":
        return None
    changes: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1}
    if parallelism.pipeline.virtual_stages > 1:
        # a layout in letters is of so many chunks
        changes["layout"] = None
    changed = _laid_out(recipe, pipeline=parallelism.pipeline.model_copy(update=changes))
    if stage_problem(recipe.model.n_layers, changed.parallelism) is not None:
        return None
    return changed


def _short_groups(recipe: Recipe) -> Recipe | None:
    """As many micro batches through one chunk before the next as there are ranks: fewer would leave stages idle."""
    pp = recipe.parallelism.pp
    pipeline = recipe.parallelism.pipeline
    if pipeline.schedule != "interleaved" or pipeline.micro_batch_group <= pp:
        return None
    return _laid_out(recipe, pipeline=pipeline.model_copy(update={"micro_batch_group": pp}))


def _more_experts(recipe: Recipe) -> Recipe | None:
    """Each rank holds half as many experts."""
    if recipe.model.moe is None:
        return None
    return _laid_out(recipe, ep=2 * recipe.parallelism.ep)


def _narrow_moments(recipe: Recipe) -> Recipe | None:
    optim = recipe.optim
    if not isinstance(optim, AdamWSpec) or "bf16" in (optim.formats.exp_avg, optim.formats.exp_avg_sq):
        return None
    formats = optim.formats.model_copy(update={"exp_avg": "bf16", "exp_avg_sq": "bf16"})
    return recipe.model_copy(update={"optim": optim.model_copy(update={"formats": formats})})


LEVERS = (
    Lever("group", 1, _short_groups),
    Lever("strategy", 1, _strategy("zero1")),
    Lever("micro batch", 2, _one_sequence),
    Lever("experts", 2, _more_experts),
    Lever("strategy", 3, _strategy("zero2")),
    Lever("recompute", 4, _selective),
    Lever("schedule", 4, _one_by_one),
    Lever("strategy", 5, _strategy("fsdp")),
    Lever("recompute", 6, _feed_forward),
    Lever("tp", 6, _doubled("tp")),
    Lever("cp", 7, _doubled("cp")),
    Lever("pp", 7, _doubled("pp")),
    # it changes what is computed
    Lever("moments", 9, _narrow_moments),
    Lever("recompute", 10, _full),
)
