"""How long a training step takes, from what each rank computes and sends and from how fast the hardware was measured.

Counted, but for six constants of the runtime that hold for every model: SUSTAINED, GAPS_SECONDS and HIDDEN_COST in
layer_time.py, TURNING in work.py, _UPDATE_REACHES and BESIDE_PASSES below. They were set where runs of 1B and 8B layers
were measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from megaspec.estimate.activations import layer_bytes
from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.communication import (
    Collective,
    Topology,
    gradient_width,
    step_collectives,
    transfer_of,
    transfers,
)
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.hidden import orthogonalising_seconds
from megaspec.estimate.layer_time import KINDS, Cost, LayerTimes, added, collective_seconds, exposed, layer_times
from megaspec.estimate.memory import kept_by_layer
from megaspec.estimate.parameters import RankParameters
from megaspec.estimate.schedule import bubble, shape_of
from megaspec.estimate.share import share_of
from megaspec.model.kinds import has_experts
from megaspec.optim.spec import AdamWSpec, MuonSpec
from megaspec.parallelism.passes import PAIR_CTAS, Shape, stage_number
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.parallelism.timeline import Durations
from megaspec.recipe import Recipe

_USEFUL = ("matrix products", "attention")
# Of a copy's bandwidth, what the norm, the fused update and the copy back reach (measured on an H200: 3.3 to 3.5 of 4.3
# TB/s).
_UPDATE_REACHES = 0.81
# Bytes a second that a GPU and the CPU's memory exchange in each direction, and that a rank's cores move while they
# update weights: what the data sheets of PCIe 5 x16 and of a server with 8 GPUs leave after some loss. Not measured.
_HOST_LINK, _HOST_UPDATES = 50e9, 40e9
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


# Seconds that a message between stages costs the passes beside it, at either end and no more than it takes: a kernel
# ends later where another one begins to hold SMs. Set on 2 and 4 H200 over NVLink: 8B, five schedules.
BESIDE_PASSES = 0.35e-3
# While it is under way it holds so many of an H200's 132 SMs.
_HELD_BY_A_MESSAGE = PAIR_CTAS / 132


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


@dataclass(frozen=True)
class _Passes:
    """A micro batch's passes on every pipeline rank."""

    times: LayerTimes
    shape: Shape
    stages: tuple[tuple[Chunk, ...], ...]
    costs: list[list[Cost]]
    """By pipeline rank and chunk."""

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of a rank."""
        return [sum(cost.total for cost in rank) for rank in self.costs]

    @cached_property
    def busiest(self) -> int:
        """The rank that has most to do."""
        return max(range(self.shape.pp), key=lambda rank: self.busy[rank])


def _passes(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> _Passes:
    times, stages = layer_times(recipe, hardware, ceilings), stages_of(recipe.model.n_layers, recipe.parallelism)
    return _Passes(times, shape_of(recipe), stages, [[times.chunk(chunk) for chunk in rank] for rank in stages])


def step_time(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> StepTime:
    """Of a filled recipe at its full batch."""
    passes = _passes(recipe, hardware, ceilings)
    times, shape, stages = passes.times, passes.shape, passes.stages
    waiting = _waiting(recipe, passes, _sending(recipe, times.topology, ceilings))
    whole = added((cost, shape.micro_batches) for cost in passes.costs[passes.busiest])
    parts = {kind: sum(seconds) for kind, seconds in zip(KINDS, zip(*whole, strict=True), strict=True)}
    parts["pipeline bubble"] = waiting * passes.busy[passes.busiest] * shape.micro_batches
    if shape.pp > 1:
        sending = _sending(recipe, times.topology, ceilings)
        each = min(sending, BESIDE_PASSES) + _HELD_BY_A_MESSAGE * sending
        parts["pipeline messages"] = 4 * shape.virtual * shape.micro_batches * each
    exchange, parts["optimizer"] = _longest_end(recipe, passes, ceilings)
    if recipe.parallelism.offload.layers:
        parts["offload"] = _offloading(recipe, passes)
    parts["data parallel"] = 0.0
    for one, seconds in exchange:
        parts["tensor parallel" if one.group == "tp" else "data parallel"] += seconds
    layers = max(sum(len(chunk.layers) for chunk in rank) for rank in stages)
    host = ceilings.launch_seconds + ceilings.layer_seconds * layers * shape.micro_batches
    parts["host"] = max(0.0, host - sum(parts.values()))
    return _step_time(recipe, hardware, parts, times.topology.world, waiting)


def least_seconds(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> float:
    """What a step takes at least: the passes of the busiest pipeline rank."""
    passes = _passes(recipe, hardware, ceilings)
    return passes.busy[passes.busiest] * passes.shape.micro_batches


def exposed_collectives(recipe: Recipe, hardware: Hardware, ceilings: Ceilings) -> tuple[tuple[Collective, float], ...]:
    """Every collective with the seconds that a step waits for it, as its parts count them: those of micro batches on
    the busiest pipeline rank, and those of the step's end on the rank where that takes longest. What stages send is a
    part of the pipeline's bubble: as much as the bubble is longer than if it took no time."""
    passes = _passes(recipe, hardware, ceilings)
    times, shape, rank = passes.times, passes.shape, passes.busiest
    found = [
        (replace(one, times=one.times * shape.micro_batches), seconds * shape.micro_batches)
        for chunk in passes.stages[rank]
        for one, seconds in times.messages(chunk)
    ]
    sends = list(transfers(recipe, times.topology, shape, rank))
    if sends:
        longer = _waiting(recipe, passes, _sending(recipe, times.topology, ceilings)) - _waiting(recipe, passes, 0.0)
        each = max(0.0, longer) * passes.busy[rank] * shape.micro_batches / sum(one.times for one in sends)
        found += [(one, each * one.times) for one in sends]
    together: dict[Collective, tuple[int, float]] = {}
    for one, seconds in (*found, *_longest_end(recipe, passes, ceilings)[0]):
        before = together.get(replace(one, times=1), (0, 0.0))
        together[replace(one, times=1)] = before[0] + one.times, before[1] + seconds
    return tuple((replace(one, times=often), seconds) for one, (often, seconds) in together.items())


def _step_time(recipe: Recipe, hardware: Hardware, parts: dict[str, float], world: int, waiting: float) -> StepTime:
    seconds, batch, seq_len = sum(parts.values()), recipe.train.global_batch, recipe.data.seq_len
    peak, tp = hardware.peak[recipe.precision.kind] * world, recipe.parallelism.tp
    mfu = {
        name: batch * flops_per_sequence(recipe.model, seq_len=seq_len, convention=name, tp=tp) / (seconds * peak)
        for name in ("causal", "full")
    }
    rate = batch * seq_len / seconds
    return StepTime(seconds, parts, rate, rate / world, mfu, waiting)


def _sending(recipe: Recipe, topology: Topology, ceilings: Ceilings) -> float:
    """Seconds of a micro batch from one stage to the next."""
    transfer = transfer_of(recipe, topology)
    return collective_seconds(transfer, ceilings) if transfer else 0.0


def _waiting(recipe: Recipe, passes: _Passes, sending: float) -> float:
    """Share of the busiest rank's time that it waits. Durations are rounded to a half per cent of a pass, so that
    cases that are alike are simulated once."""
    shape, busiest = passes.shape, passes.busy[passes.busiest]
    if shape.pp == 1:
        return 0.0
    n = shape.pp * shape.virtual
    forward, backward, weight = ([0.0] * n for _ in range(3))

    def rough(seconds: float) -> float:
        return round(600 * seconds * shape.virtual / busiest) / 600

    for rank, chunks in enumerate(passes.costs):
        for number, cost in enumerate(chunks):
            stage = stage_number(rank, number, pp=shape.pp, is_v=shape.is_v)
            seconds = [sum(one) for one in cost]
            if not shape.splits_backward:
                seconds = [seconds[0], seconds[1] + seconds[2], 0.0]
            forward[stage], backward[stage], weight[stage] = map(rough, seconds)
    durations = Durations(tuple(forward), tuple(backward), tuple(weight), rough(sending))
    return bubble(shape, durations, overlap=recipe.parallelism.overlap.p2p).ratio


def _longest_end(recipe: Recipe, passes: _Passes, ceilings: Ceilings) -> tuple[list[tuple[Collective, float]], float]:
    """What data-parallel ranks exchange, with the seconds that it adds, and the update's seconds, of the pipeline rank
    where both together take longest."""
    ends = []
    for rank in {0, passes.busiest, passes.shape.pp - 1}:
        count = passes.times.parameters(recipe, rank, passes.stages[rank])
        whole = added((cost, 1) for cost in passes.costs[rank])
        exchange = step_collectives(recipe, passes.times.topology, rank, count)
        shared = _sharing(recipe, exchange, passes.stages[rank], whole, ceilings)
        update = _update(recipe, count, ceilings)
        if isinstance(recipe.optim, MuonSpec):
            update += orthogonalising_seconds(recipe, recipe.optim, passes.stages[rank], ceilings)
        ends.append((shared, update))
    return max(ends, key=lambda end: sum(seconds for _, seconds in end[0]) + end[1])


def _sharing(
    recipe: Recipe, exchange: Iterable[Collective], chunks: Sequence[Chunk], cost: Cost, ceilings: Ceilings
) -> list[tuple[Collective, float]]:
    """What each exchange of gradients and weights among data-parallel ranks adds to a step. They run beside the passes
    of as many micro batches as they are sent for, but for the last bucket of gradients: there is nothing left to run
    beside. Those that run beside the same passes share what is hidden."""
    beside = {"forward": sum(cost.forward), "backward": sum(cost.backward) + sum(cost.weight), "step": 0.0}
    layers, bucket = sum(len(chunk.layers) for chunk in chunks), recipe.parallelism.bucket_mb * 1e6
    table = share_of(recipe).vocab * recipe.model.d_model * gradient_width(recipe)
    last = table if any(chunk.embedding for chunk in chunks) else bucket
    found: list[tuple[Collective, float]] = []
    together: dict[tuple[str, int], list[tuple[Collective, float, float]]] = {}
    for one in exchange:
        messages = max(layers, 1) if one.kind == "all_gather" else max(1, ceil(one.bytes / bucket))
        if not one.hidden:
            found.append((one, one.times * collective_seconds(one, ceilings)))
            continue
        seconds = one.times * collective_seconds(one, ceilings, messages=messages)
        tail = 0.0 if one.kind == "all_gather" else seconds / one.times * min(1.0, last / one.bytes)
        together.setdefault((one.phase, one.times), []).append((one, seconds - tail, tail))
    for (phase, times), several in together.items():
        whole = sum(seconds for _, seconds, _ in several)
        share = exposed(whole, beside[phase] * times) / whole if whole else 0.0
        found += [(one, share * seconds + tail) for one, seconds, tail in several]
    return found


def _offloading(recipe: Recipe, passes: _Passes) -> float:
    """What transfers of activations take longer than the passes that they run beside, on the busiest rank."""
    share, count = share_of(recipe), recipe.parallelism.offload.layers
    layers = layer_bytes(share, with_experts=False), layer_bytes(share, with_experts=True)
    experts, rank, waited = has_experts(recipe.model), passes.busiest, 0.0
    for chunk, cost in zip(passes.stages[rank], passes.costs[rank], strict=True):
        moe = sum(experts[layer] for layer in chunk.layers)
        away = kept_by_layer(share, layers, (len(chunk.layers) - moe, moe))[:count]
        seconds = sum(map(sum, away)) / _HOST_LINK
        waited += max(0.0, seconds - sum(cost.forward)) + max(0.0, seconds - sum(cost.backward) - sum(cost.weight))
    return waited * passes.shape.micro_batches


def _update(recipe: Recipe, count: RankParameters, ceilings: Ceilings) -> float:
    """The gradients' norm, the update and the copy into the model's format: bytes of each parameter's states. A share
    that lies on the CPU is updated beside the transfer of its gradients and weights, and beside the GPU's share."""
    optim, own = recipe.optim, recipe.parallelism
    shards, expert_shards = sharing_ranks(own) if own.dp_strategy != "replicate" else (1, 1)
    wide, narrow = gradient_width(recipe), share_of(recipe).width
    if isinstance(optim, AdamWSpec):
        states = _STATE_BYTES[optim.formats.exp_avg] + _STATE_BYTES[optim.formats.exp_avg_sq]
        moved = wide + 2 * _STATE_BYTES[optim.formats.master] + 2 * states
    else:
        # one tensor after the other, operation by operation
        moved = (32 if isinstance(optim, MuonSpec) else 10) * wide
    copied = 4 + narrow if narrow < 4 else 0
    parameters, away = count.dense / shards + count.expert / expert_shards, own.offload.optimizer
    here = wide + (1 - away) * (moved + copied)
    on_gpu = ceilings.memory_seconds(here * parameters / _UPDATE_REACHES)
    if not away:
        return on_gpu
    on_cpu = max((wide + moved + copied) / _HOST_UPDATES, wide / _HOST_LINK, narrow / _HOST_LINK)
    return max(on_gpu, away * parameters * on_cpu)
