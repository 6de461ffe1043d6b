"""What would make a run fit that does not: changes that keep the world and the rules, the cheapest first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from megaspec.core.divisors import divisors
from megaspec.core.frozen import Frozen
from megaspec.core.problems import as_word, in_a_shell
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.target import Target
from megaspec.model.kinds import has_experts, moe_of
from megaspec.optim.spec import AdamWSpec
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.parallelism.stages import stage_problem
from megaspec.recipe import Recipe
from megaspec.rules.case import Case, can_split_sequences
from megaspec.rules.difference import leaves
from megaspec.rules.run_facts import Facts
from megaspec.rules.table import RULES
from megaspec.rules.unbuilt import unbuilt_problems

MOST = 4


class Remedy(Frozen):
    """Settings with which a run fits."""

    overrides: tuple[str, ...]
    """`path=value` each; `hardware=NAME` where only larger GPUs help."""
    total: int
    """Bytes of the fullest rank."""

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


def remedies(recipe: Recipe, hardware: Hardware) -> list[Remedy]:
    """At most four ways to make a filled recipe fit; none when it fits already.

    What can be trained goes before what can be planned only, then what costs less time; larger GPUs come last."""
    if fullest(memory_of(recipe)).total <= hardware.room:
        return []
    already, is_trainable = broken(recipe, hardware), not unbuilt_problems(recipe)
    widest = max(hardware.node_size, recipe.parallelism.tp)
    found: dict[frozenset[str], tuple[tuple[bool, int], Remedy]] = {}
    for levers in _choices():
        fields = frozenset(lever.field for lever in levers)
        if any(less <= fields for less in found):
            continue
        changed = _turned(recipe, levers)
        if changed is None or changed.parallelism.tp > widest:
            continue
        # what breaks a rule may have no order of passes to weigh
        if broken(changed, hardware) - already:
            continue
        memory = fullest_within(changed, hardware.room)
        if memory is not None:
            order = (is_trainable and bool(unbuilt_problems(changed)), _cost(levers))
            found[fields] = order, Remedy(overrides=overrides_of(recipe, changed), total=memory.total)
    ways = [remedy for _, remedy in sorted(found.values(), key=lambda one: one[0])]
    larger = _larger(recipe, hardware)
    return [*ways[: MOST - len(larger)], *larger]


def savings(recipe: Recipe, hardware: Hardware, *, most: int = 3) -> list[Remedy]:
    """The single changes of a filled recipe that can be trained and save most memory, the largest saving first."""
    now, already = fullest(memory_of(recipe)).total, broken(recipe, hardware)
    found = []
    for lever in LEVERS:
        changed = lever.turn(recipe)
        if changed is None or broken(changed, hardware) - already or unbuilt_problems(changed):
            continue
        total = fullest(memory_of(changed)).total
        if total < now:
            found.append(Remedy(overrides=overrides_of(recipe, changed), total=total))
    return sorted(found, key=lambda one: one.total)[:most]


def _choices() -> list[tuple[Lever, ...]]:
    """Single levers, then pairs and triples of different fields, each kind the cheapest first."""
    return [
        levers
        for count in (1, 2, 3)
        for levers in sorted(combinations(LEVERS, count), key=_cost)
        if len({lever.field for lever in levers}) == count
    ]


def _cost(levers: tuple[Lever, ...]) -> int:
    return sum(lever.cost for lever in levers)


def _turned(recipe: Recipe, levers: tuple[Lever, ...]) -> Recipe | None:
    changed: Recipe | None = recipe
    for lever in levers:
        changed = lever.turn(changed) if changed is not None else None
    return changed


def target_of(recipe: Recipe, hardware: Hardware) -> Target:
    """A machine of such GPUs, as many as a filled recipe has ranks."""
    return Target(
        gpus=recipe.launcher.ranks,
        gpu=hardware.gpu_names[0],
        sm=hardware.sm,
        gpu_memory=hardware.memory,
        versions={"torch": "", "tensorboard": ""},
    )


def broken(recipe: Recipe, hardware: Hardware) -> set[str]:
    """Codes of the rules that a recipe breaks on such GPUs."""
    case = Case(recipe, target_of(recipe, hardware), Facts(recipe.run_dir), frozenset())
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
    return [Remedy(overrides=(f"hardware={min(fits, key=lambda one: one.memory).name}",), total=total)]


def _laid_out(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"parallelism": recipe.parallelism.model_copy(update=changes)})


def _one_sequence(recipe: Recipe) -> Recipe | None:
    smaller = [m for m in divisors(recipe.train.micro_batch) if m < recipe.train.micro_batch]
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"micro_batch": 1})}) if smaller else None


def _strategy(name: str) -> Callable[[Recipe], Recipe | None]:
    def turn(recipe: Recipe) -> Recipe | None:
        own = recipe.parallelism
        order = ("replicate", "zero1", "zero2", "fsdp")
        is_next = own.dp_strategy in order and order.index(own.dp_strategy) < order.index(name)
        ranks = own.dp_replicate * own.dp_shard
        return _laid_out(recipe, dp_strategy=name, dp_replicate=1, dp_shard=ranks) if is_next else None

    return turn


def _selective(recipe: Recipe) -> Recipe | None:
    """What is cheap to make again: norms and activations."""
    own = recipe.parallelism.recompute
    if own.kind != "none":
        return None
    return _laid_out(recipe, recompute=RecomputeSpec(kind="selective", parts=("norm", "activation")))


def _feed_forward(recipe: Recipe) -> Recipe | None:
    own, experts = recipe.parallelism.recompute, has_experts(recipe.model)
    if own.kind == "full" or set(own.parts or ()) & {"mlp", "moe"}:
        return None
    moe = moe_of(recipe.model)
    parts = ["norm"] + ["mlp"] * (not all(experts)) + ["moe"] * any(experts)
    parts += ["shared_experts"] if moe is not None and moe.d_shared and any(experts) else []
    return _laid_out(recipe, recompute=RecomputeSpec(kind="selective", parts=tuple(parts)))


def _full(recipe: Recipe) -> Recipe | None:
    if recipe.parallelism.recompute.kind == "full":
        return None
    return _laid_out(recipe, recompute=RecomputeSpec(kind="full"))


def _doubled(axis: str) -> Callable[[Recipe], Recipe | None]:
    """Twice the ranks on an axis, half of them on data parallel."""

    def turn(recipe: Recipe) -> Recipe | None:
        own = recipe.parallelism
        name = "dp_replicate" if own.dp_replicate % 2 == 0 else "dp_shard"
        dp = getattr(own, name)
        if dp % 2 or (axis == "pp" and own.pipeline.layout is not None):
            return None
        changes: dict[str, Any] = {axis: 2 * getattr(own, axis), name: dp // 2}
        if dp == 2 and own.dp_strategy != "replicate" and changes.get("cp", own.cp) == 1:
            # nobody is left to share with
            changes["dp_strategy"] = "replicate"
        if axis == "pp":
            changes["pipeline"] = own.pipeline.model_copy(update={"micro_batch_group": 2 * own.pp})
        widened = own.model_copy(update=changes)
        if stage_problem(recipe.model.n_layers, widened) is not None:
            return None
        lengths = {"seq_len": recipe.data.seq_len, "max_seq_len": recipe.model.max_seq_len}
        splits = can_split_sequences(tp=widened.tp, cp=widened.cp, **lengths)
        return _laid_out(recipe, **changes, sequence_parallel=splits)

    return turn


def _one_by_one(recipe: Recipe) -> Recipe | None:
    """The schedule that holds least: other chunks and weight gradients that are deferred wait for nothing."""
    own = recipe.parallelism
    if own.pp == 1 or own.pipeline.schedule == "1f1b":
        return None
    split = {"layout": None} if own.pipeline.virtual_stages > 1 else {}
    pipeline = own.pipeline.model_copy(update={"schedule": "1f1b", "virtual_stages": 1, **split})
    changed = _laid_out(recipe, pipeline=pipeline)
    return changed if stage_problem(recipe.model.n_layers, changed.parallelism) is None else None


def _short_groups(recipe: Recipe) -> Recipe | None:
    """As many micro batches through one chunk before the next as there are ranks: fewer would leave stages idle."""
    own = recipe.parallelism
    if own.pipeline.schedule != "interleaved" or own.pipeline.micro_batch_group <= own.pp:
        return None
    return _laid_out(recipe, pipeline=own.pipeline.model_copy(update={"micro_batch_group": own.pp}))


def _more_experts(recipe: Recipe) -> Recipe | None:
    own = recipe.parallelism
    return None if moe_of(recipe.model) is None else _laid_out(recipe, ep=2 * own.ep)


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
