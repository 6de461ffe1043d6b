"""What a layout or a model costs that somebody who asked for it may not know, with the way out."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from megaspec.core.frozen import Frozen
from megaspec.core.problems import show
from megaspec.core.units import bytes_in_words, seconds_in_words
from megaspec.estimate.attention_rates import NOISE
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_run import takes_all_layers
from megaspec.estimate.memory import fullest, fullest_within, memory_of
from megaspec.estimate.one_order import OneOrderCost, attention_kinds, one_order_cost, why_not_measured
from megaspec.estimate.step_time import exposed_collectives, step_time
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.estimate.topology import topology_of
from megaspec.parallelism.spec import RecomputeSpec
from megaspec.precision.spec import BLACKWELL_SM, fp8_recipe
from megaspec.recipe import Recipe
from megaspec.rules.kernel_use import attention_use_of
from megaspec.search.changes import within_a_node
from megaspec.search.remedies import broken, in_words, overrides_of
from megaspec.spec import Spec
from megaspec_kernels.catalog import choose


class Hint(Frozen):
    """A setting that costs something."""

    key: str
    """The setting."""
    text: str
    """What it costs, and the ways out in words."""
    overrides: tuple[str, ...]
    """`path=value` of the first way out; empty where there is no single one."""


def hints(spec: Spec, hardware: Hardware, throughput: MeasuredThroughput, *, seconds: float) -> tuple[Hint, ...]:
    """Of a resolved recipe on such GPUs, whose step takes `seconds`."""
    return (
        *_never_run(spec),
        *_unmeasured_attention(spec, hardware, throughput),
        *_attention_dropout(spec, hardware, throughput, seconds),
        *_wide_tp(spec, hardware, throughput, seconds),
        *_deterministic(spec, hardware, throughput, seconds),
        *_checks(spec, hardware, seconds),
    )


def _checks(spec: Spec, hardware: Hardware, seconds: float) -> Iterator[Hint]:
    """What looking for bad hardware reads and computes, beside the times of the plan."""
    checks = spec.train.checks
    key = "train.checks"
    stage = fullest(memory_of(spec, device=spec.device))
    # weights, master weights and moments: what lies there from update to update
    held = stage.weights + stage.optimizer
    # copies are read once before an update; memory once behind it and once before the next, which is the same reading
    readings = 2 * checks.state
    if checks.replicas_every:
        readings = 1 / checks.sum_every + checks.state
    told = []
    overrides = []
    if readings:
        read = readings * held
        told.append(
            f"reads {bytes_in_words(read)} of weights and optimizer state a step on the fullest rank "
            f"({seconds_in_words(read / hardware.memory_bandwidth)} at its memory's speed)"
        )
    if checks.replicas_every:
        told.append(f"gathers 8 bytes for each set of ranks that hold the same every {checks.replicas_every} steps")
        overrides.append(f"{key}.replicas_every=0")
    if checks.state:
        overrides.append(f"{key}.state=0")
    if checks.recompute:
        again = seconds_in_words(checks.recompute * seconds)
        told.append(f"computes {checks.recompute:.2%} of the steps twice ({again} a step)")
        overrides.append(f"{key}.recompute=0")
    if told:
        yield Hint(key=key, text=f"{key} {', '.join(told)}", overrides=tuple(overrides))


def _never_run(spec: Spec) -> Iterator[Hint]:
    """What no GPU has run yet, by its recipe."""
    recipe = fp8_recipe(spec.precision)
    if recipe not in BLACKWELL_SM:
        return
    key = "precision.recipe"
    times = "those of fp8's products"
    if recipe == "nvfp4":
        times += " halved, as data sheets have it"
    text = f"{key}={recipe} was tested on CPUs and has run on no GPU: its times are {times}, and of the"
    text += " bytes that casts move; train holds Transformer Engine's casts and products to the definition before the"
    text += f" first step, and stops where they differ; {key}=tensorwise has run on H200"
    yield Hint(key=key, text=text, overrides=(f"{key}=tensorwise",))


def _deterministic(spec: Spec, hardware: Hardware, throughput: MeasuredThroughput, seconds: float) -> Iterator[Hint]:
    """What gradients in one order take, as far as that was measured."""
    if not spec.train.deterministic or spec.device != "cuda":
        return
    key = "train.deterministic"
    costs = []
    not_measured = []
    for attention in attention_kinds(spec):
        cost = one_order_cost(spec, hardware, throughput, attention)
        if cost is not None:
            costs.append(_in_words(cost))
            continue
        which = f"attention {why_not_measured(spec, hardware, throughput, attention)}"
        if takes_all_layers(spec) and not attention.hides_keys:
            which += f", through {spec.kernels.attention}'s own kernel"
        not_measured.append(which)
    if spec.model.moe is not None:
        not_measured.append("experts")
    told = []
    if costs:
        train = spec.train.model_copy(update={"deterministic": False})
        in_any_order = step_time(spec.model_copy(update={"train": train}), hardware, throughput).seconds
        told.append(
            f"{_each_once(costs)} (measured on {throughput.one_order_measured_on}),"
            f" {seconds_in_words(seconds)} a step for {seconds_in_words(in_any_order)} without it"
        )
    if not_measured:
        told.append(f"not measured with it: {_each_once(not_measured)}, reckoned as with sums in any order")
    told.append("without it a run that goes on has its sums in another order")
    yield Hint(key=key, text=f"{key}=true: {'; '.join(told)}", overrides=(f"{key}=false",))


def _in_words(cost: OneOrderCost) -> str:
    text = f"attention through {cost.kernels} takes"
    if cost.measured <= NOISE:
        return f"{text} as long as {cost.compared}"
    text += f" {cost.measured:.2f} times as long as {cost.compared}"
    if cost.in_step != cost.measured:
        text += f", {cost.in_step:.2f} times in a step at the limit of power"
    return text


def _each_once(texts: list[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def _unmeasured_attention(spec: Spec, hardware: Hardware, throughput: MeasuredThroughput) -> Iterator[Hint]:
    """An implementation without a figure beside others that have some: its times are another one's."""
    key = "kernels.attention"
    name = spec.kernels.attention
    measured = {rate.implementation for rate in throughput.attention_rates}
    # reference is reckoned by its products, and where nothing was measured the speeds of the plan say so
    if not measured or name in measured or name == "reference":
        return
    text = f"{key}={name} was not measured on {hardware.name}: its time is reckoned as sdpa's for the pairs that are"
    text += " seen; where it is installed megaspec bench throughput measures it, and throughput=FILE plans with that"
    yield Hint(key=key, text=text, overrides=())


def _attention_dropout(
    spec: Spec, hardware: Hardware, throughput: MeasuredThroughput, seconds: float
) -> Iterator[Hint]:
    """Only the reference attention drops weights: it writes all of them out."""
    key = "model.attention.dropout"
    dropout = spec.model.attention.dropout
    if not dropout or spec.kernels.attention != "reference":
        return
    use = replace(attention_use_of(spec), attention_dropout=False)
    fused = choose("attention", device="cuda", sm=hardware.sm, use=use)
    if fused == "reference":
        # something else takes it, too
        return
    attention = spec.model.attention.model_copy(update={"dropout": 0.0})
    changes = {
        "model": spec.model.model_copy(update={"attention": attention}),
        "kernels": spec.kernels.model_copy(update={"attention": fused}),
    }
    without = spec.model_copy(update=changes)
    overrides = [f"{key}=0"]
    # a kernel that was set stays set, one that was decided follows the dropout
    if all(decision.key != "kernels.attention" for decision in spec.decisions):
        overrides.append(f"kernels.attention={fused}")
    text = f"{key}={show(dropout)} takes the reference attention, which keeps every weight of it: {_size(spec)} on the"
    text += f" fullest rank and {seconds_in_words(seconds)} a step; {_cost(without, hardware, throughput)} with"
    text += f" {in_words(overrides)}, which trains without it"
    recomputing = _with_selective_recompute(spec)
    if recomputing is not None:
        text += f"; {_cost(recomputing, hardware, throughput)} with {in_words(overrides_of(spec, recomputing))}"
    yield Hint(key=key, text=text, overrides=tuple(overrides))


def _with_selective_recompute(spec: Spec) -> Recipe | None:
    """With attention computed again in the backward pass instead of kept, where nothing is computed again."""
    if spec.parallelism.recompute.kind != "none":
        return None
    parallelism = spec.parallelism.model_copy(update={"recompute": RecomputeSpec(kind="selective")})
    return spec.model_copy(update={"parallelism": parallelism})


def _wide_tp(spec: Spec, hardware: Hardware, throughput: MeasuredThroughput, seconds: float) -> Iterator[Hint]:
    """Tensor-parallel ranks reduce activations several times a layer, which only links within a node are made for."""
    key = "parallelism.tp"
    tp = spec.parallelism.tp
    if tp == 1 or topology_of(spec, hardware).within_node(("tp",)):
        return
    collectives = exposed_collectives(spec, hardware, throughput)
    exposed = sum(waited for collective, waited in collectives if collective.group == "tp")
    text = f"{key}={tp} reaches across nodes of {hardware.node_size} GPUs: a step waits {seconds_in_words(exposed)}"
    text += f" ({exposed / seconds:.0%} of it) for its messages over the network"
    narrow = _narrower(spec, hardware, throughput)
    if narrow is None:
        text += "; inside a node nothing fits that keeps the rest as it is: megaspec tune searches"
        yield Hint(key=key, text=text, overrides=())
        return
    overrides = overrides_of(spec, narrow)
    text += f"; {_cost(narrow, hardware, throughput)} with {in_words(overrides)}"
    yield Hint(key=key, text=text, overrides=overrides)


def _narrower(spec: Spec, hardware: Hardware, throughput: MeasuredThroughput) -> Recipe | None:
    """The fastest layout that fits with tensor parallel inside a node, and data or pipeline parallel in its place."""
    already_broken = broken(spec, hardware)
    fastest = None
    least_seconds = inf
    for changed in within_a_node(spec, hardware):
        if broken(changed, hardware) - already_broken or fullest_within(changed, hardware.room) is None:
            continue
        seconds = step_time(changed, hardware, throughput).seconds
        if seconds < least_seconds:
            fastest = changed
            least_seconds = seconds
    return fastest


def _size(recipe: Recipe) -> str:
    return bytes_in_words(fullest(memory_of(recipe)).total)


def _cost(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> str:
    """Memory and time, `68.1 GiB and 50.2 s a step`."""
    return f"{_size(recipe)} and {seconds_in_words(step_time(recipe, hardware, throughput).seconds)} a step"
