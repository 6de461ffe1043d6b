"""How long a training step takes, from what each rank computes and sends and from how fast the hardware was measured.

Counted, but for five constants of the runtime that hold for every model: SUSTAINED, GAPS_SECONDS and HIDDEN_COST in
layer_time.py, TURNING in work.py and _UPDATE_REACHES below. They were set where runs of 1B and 8B layers were measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from megaspec.optim.spec import AdamWSpec
from megaspec.recipe import Recipe
from megaspec.resolve.ceilings import Ceilings
from megaspec.resolve.communication import Collective, Mesh, gradient_width, step_collectives, transfer_of
from megaspec.resolve.flops import flops_per_sequence
from megaspec.resolve.formula import sharing_ranks
from megaspec.resolve.hardware import Hardware
from megaspec.resolve.layer_time import KINDS, Cost, added, collective_seconds, exposed, layer_times
from megaspec.resolve.parameters import RankParameters
from megaspec.resolve.schedule import Durations, Shape, bubble, shape_of
from megaspec.resolve.stages import Chunk, stage_number, stages_of
from megaspec.resolve.work import Share

_USEFUL = ("matrix products", "attention")
# Of a copy's bandwidth, what the norm, the fused update and the copy back reach (measured on an H200: 3.3 to 3.5 of 4.3
# TB/s).
_UPDATE_REACHES = 0.81
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class StepTime:
    """A step, as the busiest pipeline rank spends it."""

    seconds: float
    parts: dict[str, float]
    """Seconds by kind; they add up to the step."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: dict[str, float]
    """Share of the peak of the recipe's precision, with attention counted `causal` and in `full`."""
    bubble: float
    """Time that the busiest rank waits for other stages, over its busy time."""

    def lost(self) -> dict[str, float]:
        """Seconds of everything but the arithmetic that MFU counts."""
        return {kind: seconds for kind, seconds in self.parts.items() if kind not in _USEFUL}


def step_time(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> StepTime:
    """Of a filled recipe at its full batch."""
    times, shape = layer_times(recipe, hardware, ceilings), shape_of(recipe)
    stages = stages_of(recipe.model, recipe.parallelism)
    costs = [[times.chunk(chunk) for chunk in rank] for rank in stages]
    busy = [sum(cost.total for cost in rank) for rank in costs]
    busiest = max(range(shape.pp), key=lambda rank: busy[rank])
    waiting = _waiting(recipe, shape, costs, busy[busiest], times.mesh, ceilings)
    whole = added((cost, shape.micro_batches) for cost in costs[busiest])
    parts = {kind: sum(seconds) for kind, seconds in zip(KINDS, zip(*whole, strict=True), strict=True)}
    parts["pipeline bubble"] = waiting * busy[busiest] * shape.micro_batches
    ends = []
    for rank in {0, busiest, shape.pp - 1}:
        count = times.parameters(recipe, rank, stages[rank])
        passes = added((cost, 1) for cost in costs[rank])
        exchange = step_collectives(recipe, times.mesh, rank, count)
        ends.append((_sharing(recipe, exchange, stages[rank], passes, ceilings), _update(recipe, count, ceilings)))
    parts["data parallel"], parts["optimizer"] = max(ends, key=sum)
    layers = max(sum(len(chunk.layers) for chunk in rank) for rank in stages)
    host = ceilings.launch_seconds + ceilings.layer_seconds * layers * shape.micro_batches
    parts["host"] = max(0.0, host - sum(parts.values()))
    return _step_time(recipe, hardware, parts, times.mesh.world, waiting)


def _step_time(recipe: Recipe, hardware: Hardware, parts: dict[str, float], world: int, waiting: float) -> StepTime:
    seconds, batch, seq_len = sum(parts.values()), recipe.train.global_batch, recipe.data.seq_len
    peak, tp = hardware.peak[recipe.precision.kind] * world, recipe.parallelism.tp
    mfu = {
        name: batch * flops_per_sequence(recipe.model, seq_len=seq_len, convention=name, tp=tp) / (seconds * peak)
        for name in ("causal", "full")
    }
    rate = batch * seq_len / seconds
    return StepTime(seconds, parts, rate, rate / world, mfu, waiting)


def _waiting(
    recipe: Recipe, shape: Shape, costs: list[list[Cost]], busiest: float, mesh: Mesh, ceilings: Ceilings
) -> float:
    """Share of the busiest rank's time that it waits. Durations are rounded to a half per cent of a pass, so that
    cases that are alike are simulated once."""
    if shape.pp == 1:
        return 0.0
    n = shape.pp * shape.virtual
    forward, backward, weight = ([0.0] * n for _ in range(3))

    def rough(seconds: float) -> float:
        return round(600 * seconds * shape.virtual / busiest) / 600

    for rank, chunks in enumerate(costs):
        for number, cost in enumerate(chunks):
            stage = stage_number(rank, number, pp=shape.pp, is_v=shape.is_v)
            seconds = [sum(one) for one in cost]
            if not shape.splits_backward:
                seconds = [seconds[0], seconds[1] + seconds[2], 0.0]
            forward[stage], backward[stage], weight[stage] = map(rough, seconds)
    transfer = transfer_of(recipe, mesh)
    sending = collective_seconds(transfer, ceilings) if transfer else 0.0
    return bubble(shape, Durations(tuple(forward), tuple(backward), tuple(weight), rough(sending))).ratio


def _sharing(
    recipe: Recipe, exchange: Iterable[Collective], chunks: Sequence[Chunk], cost: Cost, ceilings: Ceilings
) -> float:
    """What gradients and weights that data-parallel ranks exchange add to a step. They run beside the passes of as many
    micro batches as they are sent for, but for the last bucket of gradients: there is nothing left to run beside."""
    beside = {"forward": sum(cost.forward), "backward": sum(cost.backward) + sum(cost.weight), "step": 0.0}
    layers, bucket = sum(len(chunk.layers) for chunk in chunks), recipe.parallelism.bucket_mb * 1e6
    table = Share(recipe).vocab * recipe.model.d_model * gradient_width(recipe)
    last = table if any(chunk.embedding for chunk in chunks) else bucket
    added_seconds = 0.0
    by_phase: dict[tuple[str, int], float] = {}
    for one in exchange:
        messages = max(layers, 1) if one.kind == "all_gather" else max(1, ceil(one.bytes / bucket))
        if not one.hidden:
            added_seconds += one.times * collective_seconds(one, ceilings)
            continue
        seconds = one.times * collective_seconds(one, ceilings, messages=messages)
        if one.kind != "all_gather":
            tail = seconds / one.times * min(1.0, last / one.bytes)
            added_seconds += tail
            seconds -= tail
        key = (one.phase, one.times)
        by_phase[key] = by_phase.get(key, 0.0) + seconds
    return added_seconds + sum(exposed(s, beside[phase] * times) for (phase, times), s in by_phase.items())


def _update(recipe: Recipe, count: RankParameters, ceilings: Ceilings) -> float:
    """The gradients' norm, the update and the copy into the model's format: bytes of each parameter's states."""
    optim, own = recipe.optim, recipe.parallelism
    shards, expert_shards = sharing_ranks(own) if own.dp_strategy != "replicate" else (1, 1)
    wide, narrow = gradient_width(recipe), Share(recipe).width
    if isinstance(optim, AdamWSpec):
        states = _STATE_BYTES[optim.formats.exp_avg] + _STATE_BYTES[optim.formats.exp_avg_sq]
        moved = wide + 2 * _STATE_BYTES[optim.formats.master] + 2 * states
    else:
        moved = 10 * wide
    copied = 4 + narrow if narrow < 4 else 0
    per_parameter = (wide + moved + copied) / _UPDATE_REACHES
    return ceilings.memory_seconds(per_parameter * (count.dense / shards + count.expert / expert_shards))
