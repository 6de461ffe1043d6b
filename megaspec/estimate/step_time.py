"""How long a training step takes, from what each rank computes and sends and from how fast the hardware was measured.

Counted, but for constants of the runtime that hold for every model: what products and attention draw of a limited
power (power.py), SUSTAINED, ATTENTION_HOT, GROUPED_FP8_COST, GAPS_SECONDS and OVERLAPPED_COST in layer_time.py,
TURNING and the shares of a copy's bandwidth in work.py, those of the update and BESIDE_PASSES below. Each says which
runs it was set on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megaspec.estimate.activations import layer_bytes
from megaspec.estimate.communication import transfer_of, transfers
from megaspec.estimate.flops import flops_per_sequence
from megaspec.estimate.formula import sharing_ranks
from megaspec.estimate.hardware import Hardware
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.layer_time import (
    COMPUTED,
    KINDS,
    RECOMPUTED,
    Cost,
    LayerTimes,
    added,
    at_clock,
    collective_seconds,
    exposed,
    layer_times,
)
from megaspec.estimate.memory import kept_by_layer
from megaspec.estimate.muon_matrices import orthogonalising_seconds
from megaspec.estimate.parameters import holds_embedding, trained_parameters
from megaspec.estimate.power import Load, sustained
from megaspec.estimate.schedule import bubble, shape_of
from megaspec.estimate.step_communication import gradient_width, step_collectives
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.estimate.topology import Collective, Topology
from megaspec.estimate.trained import facts_of
from megaspec.nn.layer.facts import WeightCount
from megaspec.optim.spec import AdamWSpec, MuonSpec
from megaspec.parallelism.passes import PAIR_CTAS, Shape, stage_number
from megaspec.parallelism.stages import Chunk, stages_of
from megaspec.parallelism.timeline import Durations
from megaspec.recipe import Recipe

_USEFUL = ("matrix products", "attention")
# Of a copy's bandwidth (4.39 TB/s), what the gradients' norm, the update and the copy of masters reach, in profiles of
# one H200 of 1B, 8B and experts: 1.73 to 2.31 TB/s, by torch's fused AdamW 3.2 to 3.45, in one pass by Triton 4.0, and
# 3.6 to 3.7. Of other optimizers 3.3 to 3.5 of 4.3 were measured before, with all three in one figure.
_NORM_REACHES = 0.46
_TORCH_REACHES = 0.75
_ONE_PASS_REACHES = 0.9
_COPY_REACHES = 0.83
_UPDATE_REACHES = 0.81
# Bytes a second that a GPU and the CPU's memory exchange in each direction, and that a rank's cores move while they
# update weights: what the data sheets of PCIe 5 x16 and of a server with 8 GPUs leave after some loss. Not measured.
_HOST_LINK = 50e9
_HOST_UPDATES = 40e9
# Bytes of a number of the optimizer's state, by its format.
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Passes over a gradient, in its width, of optimizers that work on one tensor after the other, operation by operation.
_EAGER_UPDATE_PASSES = 10
_MUON_UPDATE_PASSES = 32

# Seconds that a message between stages costs the passes beside it, at either end and no more than it takes: a kernel
# ends later where another one begins to hold SMs. Set on 2 and 4 H200 over NVLink: 8B, five schedules.
BESIDE_PASSES = 0.35e-3
# While it is under way it holds so many of an H200's 132 SMs.
_HELD_BY_A_MESSAGE = PAIR_CTAS / 132
# Durations of passes are rounded to one of so many parts of the busiest rank's time for a chunk, so that pipelines that
# are alike are simulated once: half a per cent of a forward pass, which takes about a third of that time.
_PARTS_OF_A_CHUNK = 600


@dataclass(frozen=True)
class StepTime:
    """A step, as the busiest pipeline rank spends it."""

    seconds: float
    parts: dict[str, float]
    """Seconds by kind; they add up to the step."""
    recomputed: dict[str, float]
    """Of `recompute` in `parts`, by what is computed again."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: dict[str, float]
    """Share of the peak of the recipe's precision, with attention counted `causal` and in `full`."""
    bubble: float
    """Time that the busiest rank waits for other stages, over its busy time."""

    def lost(self) -> dict[str, float]:
        """Seconds of everything but the arithmetic that MFU counts."""
        return {kind: seconds for kind, seconds in self.parts.items() if kind not in _USEFUL}


class ExposedCollective(NamedTuple):
    """A collective, and how long a step waits for it."""

    collective: Collective
    seconds: float


class RankEnd(NamedTuple):
    """What a pipeline rank exchanges and updates for a step as a whole, whatever its passes take."""

    exchange: tuple[Collective, ...]
    """Gradients, weights and sums."""
    update_seconds: float


RankEnds = dict[tuple[int, tuple[Chunk, ...]], RankEnd]
"""By pipeline rank and its chunks. Recipes that differ in nothing but how layers are divided may share one."""


@dataclass(frozen=True)
class _PipelinePasses:
    """A micro batch's passes on every pipeline rank."""

    times: LayerTimes
    shape: Shape
    stages: tuple[tuple[Chunk, ...], ...]
    """Chunks by pipeline rank."""
    costs: list[list[Cost]]
    """By pipeline rank and chunk."""
    ends: RankEnds
    """Of the ranks that were asked for."""

    @cached_property
    def busy(self) -> list[float]:
        """Seconds of a rank."""
        return [sum(cost.total for cost in rank) for rank in self.costs]

    @cached_property
    def busiest(self) -> int:
        """The rank that has most to do."""
        return self.busy.index(max(self.busy))

    def at_clock(self, seconds: float) -> "_PipelinePasses":
        """With products and attention that take so many times as long."""
        slower: dict[Cost, Cost] = {}
        for rank in self.costs:
            slower |= {cost: at_clock(cost, seconds) for cost in rank if cost not in slower}
        return replace(self, costs=[[slower[cost] for cost in rank] for rank in self.costs])

    def of_micro_batch(self, rank: int) -> Cost:
        """A micro batch through all chunks of a rank."""
        return added((cost, 1) for cost in self.costs[rank])


@dataclass(frozen=True)
class _StepEnd:
    """What a pipeline rank does for the step as a whole."""

    exchange: list[ExposedCollective]
    """Gradients, weights and sums, with the seconds that they add."""
    update_seconds: float

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.exchange) + self.update_seconds


def _pipeline_passes(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, ends: RankEnds | None = None
) -> _PipelinePasses:
    """At the clock of the measured table."""
    if ends is None:
        ends = {}
    times = layer_times(recipe, hardware, throughput)
    stages = stages_of(recipe.model.n_layers, recipe.parallelism)
    costs = []
    for chunks in stages:
        costs.append([times.chunk(chunk) for chunk in chunks])
    return _PipelinePasses(times, shape_of(recipe), stages, costs, ends)


def _passes_of_step(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, ends: RankEnds | None = None
) -> _PipelinePasses:
    """At the clock that the GPU keeps in this step."""
    passes = _pipeline_passes(recipe, hardware, throughput, ends)
    if not hardware.throttles:
        return passes
    update = 0.0
    if not recipe.parallelism.offload.optimizer:
        # else the GPU waits for the CPU
        update = _longest_end(recipe, passes, throughput).update_seconds
    return passes.at_clock(sustained(_load(passes, update)))


def _load(passes: _PipelinePasses, update: float) -> Load:
    """Of the busiest rank. `update`: seconds of the optimizer."""
    own = _seconds_of_passes(passes)
    products, attention, moving = (own[kind] + own[again] for kind, again in zip(COMPUTED, RECOMPUTED, strict=True))
    return Load(products, attention, moving + update)


def step_time(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput, *, ends: RankEnds | None = None
) -> StepTime:
    """Of a filled recipe at its full batch. `ends`: kept from recipe to recipe by who compares divisions of layers."""
    passes = _passes_of_step(recipe, hardware, throughput, ends)
    step = _parts(recipe, passes, throughput)
    return _rates(recipe, hardware, step, passes.times.topology.world)


class _Parts(NamedTuple):
    """See StepTime."""

    parts: dict[str, float]
    recomputed: dict[str, float]
    waiting: float
    """Share of the busiest rank's time that it waits for other stages."""


def _parts(recipe: Recipe, passes: _PipelinePasses, throughput: MeasuredThroughput) -> _Parts:
    """Seconds of a step by kind."""
    topology = passes.times.topology
    micro_batches = passes.shape.micro_batches
    sending = _sending_seconds(recipe, topology, throughput)
    waiting = _waiting(recipe, passes, sending)

    of_passes = _seconds_of_passes(passes)
    parts = {kind: of_passes[kind] for kind in COMPUTED}
    recomputed = {kind: of_passes[again] for kind, again in zip(COMPUTED, RECOMPUTED, strict=True)}
    parts["recompute"] = sum(recomputed.values())
    parts |= {kind: seconds for kind, seconds in of_passes.items() if kind not in (*COMPUTED, *RECOMPUTED)}
    parts["pipeline bubble"] = waiting * passes.busy[passes.busiest] * micro_batches
    if passes.shape.pp > 1:
        parts["pipeline messages"] = _seconds_beside_messages(passes.shape, sending)
    end = _longest_end(recipe, passes, throughput)
    parts["optimizer"] = end.update_seconds
    if recipe.parallelism.offload.layers:
        parts["offload"] = _offload_seconds(recipe, passes)
    parts["data parallel"] = 0.0
    for one in end.exchange:
        kind = "data parallel"
        if one.collective.group == "tp":
            kind = "tensor parallel"
        parts[kind] += one.seconds
    # the last, since the host works beside all of the above: what it takes longer than the GPU
    layers = max(map(_layers_in, passes.stages))
    host = throughput.launch_seconds + throughput.layer_seconds * layers * micro_batches
    parts["host"] = max(0.0, host - sum(parts.values()))
    return _Parts(parts, recomputed, waiting)


def _seconds_of_passes(passes: _PipelinePasses) -> dict[str, float]:
    """All micro batches through the busiest rank, by kind."""
    cost = passes.of_micro_batch(passes.busiest)
    parts = {}
    for number, kind in enumerate(KINDS):
        seconds = cost.forward[number] + cost.backward[number] + cost.weight[number]
        parts[kind] = seconds * passes.shape.micro_batches
    return parts


def _layers_in(chunks: tuple[Chunk, ...]) -> int:
    return sum(len(chunk.layers) for chunk in chunks)


def _seconds_beside_messages(shape: Shape, sending: float) -> float:
    """What messages between stages take away from the passes beside them. Of each micro batch a chunk receives and
    sends in either pass."""
    each = min(sending, BESIDE_PASSES) + _HELD_BY_A_MESSAGE * sending
    return 4 * shape.virtual * shape.micro_batches * each


def least_seconds(recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput) -> float:
    """What a step takes at least: the passes of the busiest pipeline rank."""
    passes = _pipeline_passes(recipe, hardware, throughput)
    if hardware.throttles:
        # an update takes longer than what products gain beside it
        passes = passes.at_clock(sustained(_load(passes, 0.0)))
    return passes.busy[passes.busiest] * passes.shape.micro_batches


def exposed_collectives(
    recipe: Recipe, hardware: Hardware, throughput: MeasuredThroughput
) -> tuple[ExposedCollective, ...]:
    """Every collective with the seconds that a step waits for it, as its parts count them: those of micro batches on
    the busiest pipeline rank, and those of the step's end on the rank where that takes longest. What stages send is a
    part of the pipeline's bubble: as much as the bubble is longer than if it took no time."""
    passes = _passes_of_step(recipe, hardware, throughput)
    micro_batches = passes.shape.micro_batches
    found = []
    for chunk in passes.stages[passes.busiest]:
        for one, seconds in passes.times.messages(chunk):
            of_step = replace(one, times=one.times * micro_batches)
            found.append(ExposedCollective(of_step, seconds * micro_batches))
    found += _exposed_transfers(recipe, passes, throughput)
    found += _longest_end(recipe, passes, throughput).exchange
    return _merged(found)


def _exposed_transfers(
    recipe: Recipe, passes: _PipelinePasses, throughput: MeasuredThroughput
) -> list[ExposedCollective]:
    """What the busiest rank sends to other stages, with what it lengthens the bubble by."""
    rank = passes.busiest
    topology = passes.times.topology
    sends = list(transfers(recipe, topology, passes.shape, rank))
    if not sends:
        return []
    with_sending = _waiting(recipe, passes, _sending_seconds(recipe, topology, throughput))
    longer = with_sending - _waiting(recipe, passes, 0.0)
    messages = sum(one.times for one in sends)
    each = max(0.0, longer) * passes.busy[rank] * passes.shape.micro_batches / messages
    return [ExposedCollective(one, each * one.times) for one in sends]


def _merged(exposed_ones: list[ExposedCollective]) -> tuple[ExposedCollective, ...]:
    """Those that differ only in how often they occur, put together."""
    times: Counter[Collective] = Counter()
    seconds: dict[Collective, float] = {}
    for one in exposed_ones:
        key = replace(one.collective, times=1)
        times[key] += one.collective.times
        seconds[key] = seconds.get(key, 0.0) + one.seconds
    return tuple(ExposedCollective(replace(key, times=times[key]), seconds[key]) for key in times)


def _rates(recipe: Recipe, hardware: Hardware, step: _Parts, world: int) -> StepTime:
    """Throughput, and MFU = FLOPs of a step / (seconds · peak of all GPUs)."""
    seconds = sum(step.parts.values())
    batch = recipe.train.global_batch
    seq_len = recipe.data.seq_len
    peak = hardware.peak[recipe.precision.kind] * world
    mfu = {}
    for convention in ("causal", "full"):
        flops = flops_per_sequence(
            recipe.model,
            seq_len=seq_len,
            convention=convention,
            tp=recipe.parallelism.tp,
            trainable=recipe.train.trainable,
        )
        mfu[convention] = batch * flops / (seconds * peak)
    tokens_per_second = batch * seq_len / seconds
    return StepTime(
        seconds, step.parts, step.recomputed, tokens_per_second, tokens_per_second / world, mfu, step.waiting
    )


def _sending_seconds(recipe: Recipe, topology: Topology, throughput: MeasuredThroughput) -> float:
    """Of a micro batch from one stage to the next."""
    transfer = transfer_of(recipe, topology)
    if transfer is None:
        return 0.0
    return collective_seconds(transfer, throughput)


def _waiting(recipe: Recipe, passes: _PipelinePasses, sending: float) -> float:
    """Share of the busiest rank's time that it waits."""
    shape = passes.shape
    if shape.pp == 1:
        return 0.0
    busiest = passes.busy[passes.busiest]
    stages = shape.pp * shape.virtual
    forward = [0.0] * stages
    backward = [0.0] * stages
    weight = [0.0] * stages

    def rounded(seconds: float) -> float:
        """In units of what the busiest rank takes for a chunk."""
        return round(_PARTS_OF_A_CHUNK * seconds * shape.virtual / busiest) / _PARTS_OF_A_CHUNK

    for rank, chunks in enumerate(passes.costs):
        for number, cost in enumerate(chunks):
            stage = stage_number(rank, number, pp=shape.pp, is_v=shape.is_v)
            forward[stage] = rounded(sum(cost.forward))
            if shape.splits_backward:
                backward[stage] = rounded(sum(cost.backward))
                weight[stage] = rounded(sum(cost.weight))
            else:
                backward[stage] = rounded(sum(cost.backward) + sum(cost.weight))
    durations = Durations(tuple(forward), tuple(backward), tuple(weight), rounded(sending))
    return bubble(shape, durations, overlap=recipe.parallelism.overlap.p2p).ratio


def _longest_end(recipe: Recipe, passes: _PipelinePasses, throughput: MeasuredThroughput) -> _StepEnd:
    """Of the pipeline rank where the exchange among data-parallel ranks and the update together take longest."""
    # the first has the embedding, the last the head, the busiest most to do
    ends = [_step_end(recipe, passes, rank, throughput) for rank in {0, passes.busiest, passes.shape.pp - 1}]
    return max(ends, key=lambda end: end.seconds)


def _step_end(recipe: Recipe, passes: _PipelinePasses, rank: int, throughput: MeasuredThroughput) -> _StepEnd:
    chunks = passes.stages[rank]
    key = (rank, chunks)
    if key not in passes.ends:
        passes.ends[key] = _rank_end(recipe, passes.times, rank, chunks, throughput)
    end = passes.ends[key]
    exchange = _exposed_exchange(recipe, end.exchange, chunks, passes.of_micro_batch(rank), throughput)
    return _StepEnd(exchange, end.update_seconds)


def _rank_end(
    recipe: Recipe, times: LayerTimes, rank: int, chunks: tuple[Chunk, ...], throughput: MeasuredThroughput
) -> RankEnd:
    trained = times.parameters(recipe, rank, chunks)
    if recipe.train.trainable is not None:
        trained = trained_parameters(recipe, rank)
    update = _update_seconds(recipe, trained, throughput)
    if isinstance(recipe.optim, MuonSpec):
        update += orthogonalising_seconds(recipe, recipe.optim, chunks, throughput)
    return RankEnd(tuple(step_collectives(recipe, times.topology, rank)), update)


@dataclass(frozen=True)
class _Overlapped:
    """An exchange that runs beside passes."""

    collective: Collective
    seconds: float
    """That can overlap with them."""
    tail: float
    """Seconds of its last bucket: there is nothing left to run beside."""


def _exposed_exchange(
    recipe: Recipe,
    exchange: Iterable[Collective],
    chunks: tuple[Chunk, ...],
    cost: Cost,
    throughput: MeasuredThroughput,
) -> list[ExposedCollective]:
    """What each exchange of gradients and weights among data-parallel ranks adds to a step. They run beside the passes
    of as many micro batches as they are sent for, but for the last bucket of gradients. Those that run beside the same
    passes share what overlaps."""
    # seconds of a micro batch's passes, by phase; after the last one there is nothing to run beside
    passes = {"forward": sum(cost.forward), "backward": sum(cost.backward) + sum(cost.weight), "step": 0.0}
    found: list[ExposedCollective] = []
    by_passes: dict[tuple[str, int], list[_Overlapped]] = {}
    for one in exchange:
        if one.overlapped:
            in_buckets = _in_buckets(recipe, one, chunks, throughput)
            by_passes.setdefault((one.phase, one.times), []).append(in_buckets)
        else:
            found.append(ExposedCollective(one, one.times * collective_seconds(one, throughput)))
    for (phase, micro_batches), several in by_passes.items():
        whole = sum(one.seconds for one in several)
        share = 0.0
        if whole:
            share = exposed(whole, passes[phase] * micro_batches) / whole
        for one in several:
            found.append(ExposedCollective(one.collective, share * one.seconds + one.tail))
    return found


def _in_buckets(
    recipe: Recipe, one: Collective, chunks: tuple[Chunk, ...], throughput: MeasuredThroughput
) -> _Overlapped:
    """Weights are gathered layer by layer, gradients are reduced in buckets."""
    if one.kind == "all_gather":
        seconds = one.times * collective_seconds(one, throughput, messages=max(_layers_in(chunks), 1))
        return _Overlapped(one, seconds, tail=0.0)
    # the last bucket of gradients is the embedding's table, where a rank has it
    bucket = recipe.parallelism.bucket_mb * 1e6
    last = bucket
    if holds_embedding(chunks) and not facts_of(recipe).embedding_table.is_frozen:
        last = facts_of(recipe).table_on(tp=recipe.parallelism.tp) * gradient_width(recipe)
    messages = max(1, ceil(one.bytes / bucket))
    seconds = one.times * collective_seconds(one, throughput, messages=messages)
    tail = seconds / one.times * min(1.0, last / one.bytes)
    return _Overlapped(one, seconds - tail, tail)


def _offload_seconds(recipe: Recipe, passes: _PipelinePasses) -> float:
    """What transfers of activations take longer than the passes that they run beside, on the busiest rank."""
    run = layer_run(recipe)
    facts = facts_of(recipe)
    parallelism = recipe.parallelism
    rank = passes.busiest
    waited = 0.0
    for chunk, cost in zip(passes.stages[rank], passes.costs[rank], strict=True):
        layers = [layer_bytes(run, facts.layers[number]) for number in chunk.layers]
        offloaded = kept_by_layer(parallelism.recompute, layers)[: parallelism.offload.layers]
        seconds = sum(one.total for one in offloaded) / _HOST_LINK
        # away beside the forward pass, back beside the backward pass
        waited += max(0.0, seconds - sum(cost.forward))
        waited += max(0.0, seconds - sum(cost.backward) - sum(cost.weight))
    return waited * passes.shape.micro_batches


@dataclass(frozen=True)
class _Update:
    """What a rank's update moves: bytes of a parameter."""

    parameters: float
    """That this rank updates."""
    norm: float
    """Of its gradient, which the norm reads."""
    updated: float
    """Of its gradient, states and master weight."""
    copied: float
    """Of the copy of a master weight in the model's format."""
    away: float
    """Share of the parameters that the CPU updates."""

    @property
    def on_gpu(self) -> float:
        """That the GPU reads and writes."""
        return self.norm + (1 - self.away) * (self.updated + self.copied)

    @property
    def whole(self) -> float:
        """Wherever the update is made."""
        return self.norm + self.updated + self.copied


def _update(recipe: Recipe, count: WeightCount) -> _Update:
    """The gradients' norm, the update and the copy into the model's format. `count`: trained parameters of the rank."""
    parallelism = recipe.parallelism
    parameters = float(count.dense + count.expert)
    if parallelism.dp_strategy != "replicate":
        shards = sharing_ranks(parallelism)
        parameters = count.dense / shards.dense + count.expert / shards.expert
    wide = gradient_width(recipe)
    narrow = layer_run(recipe).width
    copied = 0
    if narrow < 4:
        copied = _copied_bytes(recipe, narrow)
    return _Update(parameters, wide, _updated_bytes(recipe, wide), copied, parallelism.offload.optimizer)


def _is_by_torch(recipe: Recipe) -> bool:
    """Whether torch's fused AdamW makes the update."""
    return isinstance(recipe.optim, AdamWSpec) and recipe.kernels.adamw == "torch"


def _copied_bytes(recipe: Recipe, narrow: int) -> int:
    """Bytes that a weight of `narrow` bytes beside its master weight adds to the update."""
    optim = recipe.optim
    if not isinstance(optim, AdamWSpec) or _is_by_torch(recipe):
        # a pass of its own reads master weights
        return 4 + narrow
    if optim.formats.master == "fp16":
        # it is half of the master weight: read and written
        return 2 * narrow
    return narrow


def update_bytes(recipe: Recipe, rank: int) -> float:
    """Bytes that a GPU of a pipeline rank moves for norm and update, without Muon's products."""
    update = _update(recipe, trained_parameters(recipe, rank))
    return update.on_gpu * update.parameters


def _update_seconds(recipe: Recipe, count: WeightCount, throughput: MeasuredThroughput) -> float:
    """Bytes of each parameter's states over the bandwidth of memory. A share that lies on the CPU is updated beside the
    transfer of its gradients and weights, and beside the GPU's share."""
    update = _update(recipe, count)
    on_gpu = throughput.memory_seconds(update.parameters * _as_copied(recipe, update))
    if not update.away:
        return on_gpu
    # gradients come, cores update, weights go back: at once, so that the slowest counts
    wide = gradient_width(recipe)
    narrow = layer_run(recipe).width
    on_cpu = max(update.whole / _HOST_UPDATES, wide / _HOST_LINK, narrow / _HOST_LINK)
    return max(on_gpu, update.away * update.parameters * on_cpu)


def _as_copied(recipe: Recipe, update: _Update) -> float:
    """Bytes that a copy moves in the time of a parameter's update on the GPU."""
    here = 1 - update.away
    norm = update.norm / _NORM_REACHES
    if not isinstance(recipe.optim, AdamWSpec):
        return norm + here * (update.updated + update.copied) / _UPDATE_REACHES
    if _is_by_torch(recipe):
        return norm + here * (update.updated / _TORCH_REACHES + update.copied / _COPY_REACHES)
    return norm + here * (update.updated + update.copied) / _ONE_PASS_REACHES


def _updated_bytes(recipe: Recipe, wide: int) -> int:
    """Bytes that the update of one parameter reads and writes, with a gradient of `wide` bytes."""
    optim = recipe.optim
    if isinstance(optim, AdamWSpec):
        # master weight and both moments are read and written
        formats = optim.formats
        moments = _STATE_BYTES[formats.exp_avg] + _STATE_BYTES[formats.exp_avg_sq]
        states = 2 * _STATE_BYTES[formats.master] + 2 * moments
        if _is_by_torch(recipe):
            # it divides gradients by the scale that clips them, and writes them back
            return 2 * wide + states
        return wide + states
    if isinstance(optim, MuonSpec):
        return _MUON_UPDATE_PASSES * wide
    return _EAGER_UPDATE_PASSES * wide
