"""Everything that is known of a run before it starts: what `megaspec plan` prints, and its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, coordinates, rank_of
from megaspec.core.frozen import Frozen
from megaspec.estimate.batch_sizes import BatchPlan, batch_plan
from megaspec.estimate.communication import Collective, Topology, collectives_of, topology_of
from megaspec.estimate.flops import flops_per_token
from megaspec.estimate.formula import dense_equation, expert_equation
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.estimate.layer_time import collective_seconds
from megaspec.estimate.memory import StageMemory, fullest, memory_of
from megaspec.estimate.parameters import count_parameters, rank_parameters
from megaspec.estimate.schedule import bubble_formula, chart, shape_of
from megaspec.estimate.step_time import StepTime, exposed_collectives, step_time
from megaspec.estimate.target import Target
from megaspec.estimate.throughput import MeasuredThroughput
from megaspec.optim.schedule import outline, weight_decay
from megaspec.parallelism.stages import EVENLY, Chunk, layer_ranges, stages_of
from megaspec.plan.hints import Hint, hints
from megaspec.plan.promise import promise
from megaspec.rules.initial_weights import initial_weights, weight_shapes
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.changes import Change, best_change
from megaspec.search.checkpoint_size import checkpoint_size
from megaspec.search.division import fastest_division
from megaspec.search.fits import copied_for_saving, need_here
from megaspec.search.remedies import Remedy, remedies, remedies_on_cpu
from megaspec.spec import Decision, ForkPoint, Spec
from megaspec.train.trainable import trained_names

MEMORY_KINDS = tuple(f.name for f in fields(StageMemory))
DAY = 86_400
# Of a step's time, that another division of layers has to save to be told of.
_WORTH_DIVIDING = 0.02


class PlannedMachine(Frozen):
    """What the run is planned for."""

    name: str
    """A name of the hardware table, the driver's name of another GPU, or cpu."""
    gpus: int
    gpu_memory: int
    """Bytes."""
    node_size: int
    """GPUs that NVLink joins."""
    why: str
    """How it was chosen."""
    throughput: str
    """Where the speeds are from; "" where none are known."""
    measured_on: str
    """The GPU of the hardware table that they were measured on, `name` itself or another one; "" likewise."""


class RankGroup(Frozen):
    """Ranks that share an axis."""

    axis: str
    size: int
    count: int
    """How many such groups there are."""
    stride: int
    """From one rank to the next."""
    first: tuple[int, ...]
    """The ranks of the first group."""
    within_node: bool


class StageShare(Frozen):
    """What one pipeline rank holds."""

    layers: tuple[str, ...]
    """By chunk, as `0-7`, with the ends that it holds."""
    parameters: int
    """Of one of its ranks."""
    memory: dict[str, int]
    """Bytes of one of its ranks by kind, and `total`."""


class RowsOfVocabulary(Frozen):
    """What becomes of the rows of tables of tokens where a run begins with weights of another vocabulary."""

    taken: int
    """Rows that both have."""
    new: int
    """Rows that only this run has."""
    dropped: int
    """Rows that only the source has."""
    new_rows: str
    """What new ones start from: init.new_rows."""


class StartingWeights(Frozen):
    """The folder that the weights of a run begin with."""

    path: str
    step: int | None
    """Of a run's checkpoint."""
    vocabulary: RowsOfVocabulary | None
    """None: its rows are taken as they are, or not at all."""
    upcycled_layers: int
    """Layers whose experts are copies of a feed-forward layer there."""


class MachineMemory(Frozen):
    """Of the machine whose CPU a run is planned for."""

    ranks: int
    """Of the run on this machine."""
    needed: int
    """Bytes that they and their processes take together."""
    of_processes: int
    """Bytes of those for the interpreter and libraries of ranks and launcher."""
    available: int
    """Bytes that processes can still take; 0 where that is not known."""


class Fit(Frozen):
    """Whether the fullest rank fits its GPU, or all ranks the machine whose CPU they share."""

    by_kind: dict[str, int]
    """Bytes of the fullest rank, in the order of its parts."""
    total: int
    capacity: int
    """Of one GPU; 0 where it is not known."""
    machine: MachineMemory | None
    """None on GPUs."""
    fits: bool | None
    """None where the capacity, or what is available, is not known."""
    rank: int
    """The pipeline rank that is fullest."""
    fits_on: tuple[str, ...]
    """Hardware of the table that it fits on."""
    remedies: tuple[Remedy, ...]


class Message(Frozen):
    """A collective of a step; of the rank that takes longest, where no speeds are known of the one that sends most."""

    what: str
    kind: str
    group: str
    ranks: int
    bytes: int
    """Of the whole tensor, once."""
    times: int
    sent: int
    """Bytes that the rank sends in a step."""
    link: str
    """nvlink or network; machine between ranks that share a CPU."""
    seconds: float | None
    """In a step, with nothing beside it."""
    exposed_seconds: float | None
    """That a step waits for it: those over an axis add up to the step's part of its name, all that is exchanged among
    data-parallel ranks and at the end of a step to `data parallel`; those of stages are a part of the bubble."""


class Waiting(Frozen):
    """A pipeline's bubble."""

    schedule: str
    micro_batches: int
    formula: float
    """Idle over busy time with equal stages."""
    ratio: float | None
    """With these stages' own times."""
    layout_by_time: str | None
    """The pipeline.layout that a search finds fastest (search/division.py), where with it a step is shorter by a
    fiftieth or more and no other setting says how layers are divided."""
    seconds_by_time: float | None
    """Of a step with that."""
    chart: tuple[str, ...]


class Speed(Frozen):
    """Predicted, where speeds are known."""

    seconds: float
    """Of a step."""
    parts: dict[str, float]
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: dict[str, float]
    days: float
    """For all steps of the run."""


class SchedulePart(Frozen):
    """A part of a schedule in which the value has one shape."""

    shape: str
    """`warm-up`, or a shape of optim.schedule or optim.weight_decay_ramp."""
    first_step: int
    last_step: int
    start: float
    """From which it goes at first_step; where it jumps the step itself still has the value before."""
    end: float
    """At last_step."""


class Plan(Frozen):
    """A run, planned. The keys of `megaspec plan --json`."""

    name: str
    run_dir: str
    about: dict[str, str | None]
    hardware: PlannedMachine
    device: str
    precision: str
    kernels: dict[str, str]
    """The implementation of each operation, and what is compiled."""
    mesh: dict[str, int]
    equations: tuple[str, str]
    groups: tuple[RankGroup, ...]
    sequence_parallel: bool
    model: dict[str, Any]
    starts_with: StartingWeights | None
    """None: weights are drawn from the seed, or those of the checkpoint that a fork is from."""
    parameters: dict[str, Any]
    stages: tuple[StageShare, ...]
    batch: dict[str, Any]
    segments: int
    """Index segments of the data order."""
    learning_rate: tuple[SchedulePart, ...]
    """Over the steps of the run; of a fork also over those before it, where its schedule is counted from there."""
    weight_decay: tuple[SchedulePart, ...]
    """Likewise."""
    memory: Fit
    source_fit: str
    """Whether it fits the hardware that the recipe's source names, where that is not what it is planned for."""
    flops_per_token: dict[str, float]
    flops: float
    """Of the run, causal."""
    communication: tuple[Message, ...]
    bubble: Waiting | None
    step_time: Speed | None
    change: Change | None
    """The one that would save most of a step, where that was asked for and one is worth a word."""
    hints: tuple[Hint, ...]
    """What settings cost."""
    checkpoint: dict[str, int]
    """Bytes of the tensors of a checkpoint, `bytes`, and of that of the last step, `last_bytes`."""
    resume: str
    """What holds of the numbers of the run when it is stopped and goes on."""
    unbuilt: tuple[str, ...]
    """Keys of what can be planned, not trained."""
    decisions: tuple[Decision, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, the figures of the memory and the speed where programs look for them."""
        content = self.model_dump(mode="json")
        memory = content["memory"]
        content["memory"] = memory.pop("by_kind") | memory
        content["memory"]["per_stage"] = [stage["memory"] for stage in content["stages"]]
        speed = content["step_time"]
        if speed is not None:
            for key in ("tokens_per_second", "tokens_per_second_per_gpu", "mfu", "days"):
                content[key] = speed.pop(key)
        return content


def make_plan(
    spec: Spec,
    target: Target,
    *,
    hardware: Hardware | None,
    throughput: MeasuredThroughput | None,
    why: str = "this machine",
    weigh_changes: bool = False,
) -> Plan:
    """From a resolved recipe. Without hardware or throughput: everything but times. `weigh_changes`: look for the one
    change that would save most, for up to half a second."""
    model = spec.model
    parallelism = spec.parallelism
    seq_len = spec.data.seq_len
    degrees = parallelism.degrees
    topology = topology_of(spec, hardware)
    batch = batch_plan(spec.train, parallelism, seq_len=seq_len)
    flops = {}
    for convention in ("causal", "full"):
        flops[convention] = flops_per_token(
            model, seq_len=seq_len, convention=convention, tp=parallelism.tp, trainable=spec.train.trainable
        )
    memory = memory_of(spec, device=spec.device)
    capacity = 0
    if spec.device == "cuda":
        capacity = target.gpu_memory
    # what needs speeds
    time = None
    speed = None
    change = None
    costs: tuple[Hint, ...] = ()
    if hardware is not None and throughput is not None and spec.device == "cuda":
        time = step_time(spec, hardware, throughput)
        speed = _speed(time, batch=batch)
        costs = hints(spec, hardware, throughput, seconds=time.seconds)
        if weigh_changes:
            change = best_change(spec, hardware, throughput, seconds=time.seconds)
    stages = _stages(spec, memory)
    return Plan(
        name=spec.name,
        run_dir=spec.run_dir,
        about={"purpose": spec.about.purpose, "source": spec.about.source, "hardware": spec.about.hardware},
        hardware=_machine(target, topology, hardware=hardware, throughput=throughput, why=why),
        device=spec.device,
        precision=spec.precision.kind,
        kernels=spec.kernels.model_dump(mode="json"),
        mesh={
            "world": spec.world_size,
            **degrees,
            "ep": parallelism.ep,
            "etp": parallelism.etp,
            "edp": topology.expert["edp"],
        },
        equations=(dense_equation(degrees), expert_equation(degrees, ep=parallelism.ep, etp=parallelism.etp)),
        groups=groups_of(topology),
        sequence_parallel=parallelism.sequence_parallel,
        model=model.model_dump(mode="json"),
        starts_with=_starts_with(spec),
        parameters=_parameters(spec, stages),
        stages=stages,
        batch=_batch(spec, batch),
        segments=len(spec.segments),
        learning_rate=_rates(spec),
        weight_decay=_weight_decays(spec),
        memory=fit_of(spec, memory, target, hardware=hardware, capacity=capacity),
        source_fit=_source_fit(spec, memory, hardware),
        flops_per_token=flops,
        flops=flops["causal"] * batch.tokens,
        communication=_messages(spec, hardware, throughput),
        bubble=_waiting(spec, time, hardware=hardware, throughput=throughput),
        step_time=speed,
        change=change,
        hints=costs,
        checkpoint=_checkpoint(spec, target),
        resume=promise(spec),
        unbuilt=tuple(problem.key for problem in unbuilt_problems(spec)),
        decisions=spec.decisions,
    )


def _checkpoint(spec: Spec, target: Target) -> dict[str, int]:
    size = checkpoint_size(spec)
    last = size.total
    if spec.checkpoint.last == "weights":
        last = size.weights
    return {"bytes": size.total, "last_bytes": last, "copied_bytes": copied_for_saving(spec, target)}


def _parameters(spec: Spec, stages: Sequence[StageShare]) -> dict[str, Any]:
    """Of the whole model, of each stage's ranks, and of the whole by kind."""
    count = count_parameters(spec.model)
    by_kind = {}
    for kind in fields(count):
        # counted among the experts already
        if kind.name != "active_experts":
            by_kind[kind.name] = getattr(count, kind.name)
    return {
        "total": count.total,
        "active": count.active,
        "trained": _trained(spec, count.total),
        "per_stage": [stage.parameters for stage in stages],
        "by_kind": by_kind,
    }


def _trained(spec: Spec, total: int) -> int:
    """Of all parameters, those that the run trains."""
    if spec.train.trainable is None:
        return total
    facts = spec.model.facts
    names = trained_names(facts, spec.train.trainable)
    trained = 0
    for stored, shape in weight_shapes(facts).items():
        if stored.partition("/")[2] in names:
            trained += prod(shape)
    return trained


def _batch(spec: Spec, batch: BatchPlan) -> dict[str, Any]:
    """The batch plan's fields, and what the run's length is made of."""
    content = {figure.name: getattr(batch, figure.name) for figure in fields(batch)}
    content["steps"] = spec.train.steps
    content["seq_len"] = spec.data.seq_len
    return content


def _rates(spec: Spec) -> tuple[SchedulePart, ...]:
    """The parts of the learning rate's schedule."""
    parts = []
    for piece in outline(spec.optim.schedule, spec.optim.lr, steps=spec.train.steps):
        part = SchedulePart(
            shape=piece.shape,
            first_step=piece.start,
            last_step=piece.end,
            start=piece.start_lr,
            end=piece.end_lr,
        )
        parts.append(part)
    return tuple(parts)


def _weight_decays(spec: Spec) -> tuple[SchedulePart, ...]:
    """The ramp of the weight decay, and what stays before and behind it."""
    ramp = spec.optim.weight_decay_ramp
    steps = spec.train.steps
    first = steps
    end = steps
    if ramp.kind != "constant":
        assert ramp.steps is not None, f"optim.weight_decay_ramp has no steps: {ramp}"
        first = min(ramp.first_step, steps)
        end = min(ramp.first_step + ramp.steps, steps)
    parts = []
    for shape, start, stop in (("constant", 0, first), (ramp.kind, first, end), ("constant", end, steps)):
        if start < stop:
            part = SchedulePart(
                shape=shape,
                first_step=start,
                last_step=stop,
                start=weight_decay(spec.optim, start),
                end=weight_decay(spec.optim, stop),
            )
            parts.append(part)
    return tuple(parts)


def groups_of(topology: Topology) -> tuple[RankGroup, ...]:
    """The groups of every axis of more than one rank; edp only where it is another than dp."""
    found = [
        _group(axis, topology, topology.dense, DENSE_AXES)
        for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp")
        if topology.dense[axis] > 1
    ]
    if topology.expert["ep"] * topology.expert["etp"] > 1:
        found += [
            _group(axis, topology, topology.expert, EXPERT_AXES)
            for axis in ("etp", "ep", "edp")
            if topology.expert[axis] > 1
        ]
    return tuple(found)


def _group(axis: str, topology: Topology, sizes: Mapping[str, int], axes: Sequence[str]) -> RankGroup:
    """The groups of one axis of a mesh of `axes`, which are of `sizes`."""
    size = sizes[axis]
    stride = rank_of({axis: 1}, sizes, axes)
    return RankGroup(
        axis=axis,
        size=size,
        count=topology.world // size,
        stride=stride,
        first=tuple(range(0, size * stride, stride)),
        within_node=topology.within_node((axis,)),
    )


def _machine(
    target: Target, topology: Topology, *, hardware: Hardware | None, throughput: MeasuredThroughput | None, why: str
) -> PlannedMachine:
    if target.device != "cuda":
        return PlannedMachine(
            name="cpu", gpus=0, gpu_memory=0, node_size=topology.node, why=why, throughput="", measured_on=""
        )
    name = target.gpu or "GPU"
    if hardware is not None:
        name = hardware.name
    source = ""
    measured_on = ""
    if throughput is not None:
        source = throughput.source
        measured_on = throughput.table.hardware
    return PlannedMachine(
        name=name,
        gpus=target.gpus,
        gpu_memory=target.gpu_memory,
        node_size=topology.node,
        why=why,
        throughput=source,
        measured_on=measured_on,
    )


def _starts_with(spec: Spec) -> StartingWeights | None:
    origin = spec.weights_from
    if origin is None or isinstance(spec.forked_from, ForkPoint):
        return None
    upcycled = 0
    if spec.init.upcycle != "none":
        upcycled = sum("moe" in mixers for mixers in spec.model.mixers)
    return StartingWeights(
        path=origin.path, step=origin.step, vocabulary=_rows_of_vocabulary(spec), upcycled_layers=upcycled
    )


def _rows_of_vocabulary(spec: Spec) -> RowsOfVocabulary | None:
    """Of all tables alike; None: init.vocab=same, or no table of tokens is read."""
    there = spec.weights_from.vocab_size
    if spec.init.vocab != "resize" or there is None:
        return None
    tables = {}
    for stored, shape in weight_shapes(spec.model.facts).items():
        if shape[0] == spec.model.vocab_size:
            tables[stored] = (there, *shape[1:])
    read = initial_weights(spec.init, spec.model.facts, theirs=tables).read
    for reading in read.values():
        return RowsOfVocabulary(
            taken=reading.taken, new=reading.new, dropped=there - reading.taken, new_rows=spec.init.new_rows
        )
    return None


def _stages(spec: Spec, memory: Sequence[StageMemory]) -> tuple[StageShare, ...]:
    found = []
    for rank, chunks in enumerate(stages_of(spec.model.n_layers, spec.parallelism)):
        share = StageShare(
            layers=tuple(_chunk_in_words(chunk) for chunk in chunks),
            parameters=rank_parameters(spec, rank).total,
            memory=memory_by_kind(memory[rank]),
        )
        found.append(share)
    return tuple(found)


def _chunk_in_words(chunk: Chunk) -> str:
    """`embedding, 0-7`"""
    words = [layer_ranges(chunk.layers)]
    if chunk.embedding:
        words.insert(0, "embedding")
    if chunk.head:
        words.append("head")
    return ", ".join(words)


def memory_by_kind(stage: StageMemory) -> dict[str, int]:
    """Bytes by kind, and `total`."""
    return {kind: getattr(stage, kind) for kind in MEMORY_KINDS} | {"total": stage.total}


def fit_of(
    spec: Spec, memory: Sequence[StageMemory], target: Target, *, hardware: Hardware | None, capacity: int
) -> Fit:
    """The fullest rank against the memory of a GPU (capacity 0: not known), or all ranks against the machine's."""
    most = fullest(memory)
    by_kind = memory_by_kind(most)
    total = by_kind.pop("total")
    fits = None
    machine = None
    ways: list[Remedy] = []
    if spec.device == "cpu":
        machine = _machine_memory(spec, target)
        if machine.available:
            fits = machine.needed <= machine.available
        if fits is False:
            ways = remedies_on_cpu(spec, target)
    if capacity > 0:
        fits = total <= capacity
        if not fits and hardware is not None:
            ways = remedies(spec, hardware)
    return Fit(
        by_kind=by_kind,
        total=total,
        capacity=capacity,
        machine=machine,
        fits=fits,
        rank=list(memory).index(most),
        fits_on=tuple(name for name, one in HARDWARE.items() if total <= one.memory),
        remedies=tuple(ways),
    )


def _machine_memory(spec: Spec, target: Target) -> MachineMemory:
    need = need_here(spec, target)
    return MachineMemory(ranks=need.ranks, needed=need.total, of_processes=need.of_processes, available=target.memory)


def _source_fit(spec: Spec, memory: Sequence[StageMemory], hardware: Hardware | None) -> str:
    named = HARDWARE.get(spec.about.hardware or "")
    if named is None or hardware is None or named.name == hardware.name:
        return ""
    if fullest(memory).total <= named.memory:
        return f"it fits {named.name}, which its source names"
    return f"it does not fit {named.name}, which its source names"


def _messages(spec: Spec, hardware: Hardware | None, throughput: MeasuredThroughput | None) -> tuple[Message, ...]:
    """The collectives of a step, with times where speeds are known."""
    sent = collectives_of(spec, hardware)
    exposed: dict[Collective, float] = {}
    if hardware is not None and throughput is not None and spec.device == "cuda":
        # of the rank that takes longest, whose collectives these are
        exposed = dict(exposed_collectives(spec, hardware, throughput))
        sent = tuple(exposed)
    found = []
    for one in sent:
        seconds = None
        if exposed:
            seconds = one.times * collective_seconds(one, throughput)
        link = "network"
        if one.within_node:
            link = "nvlink"
            if spec.device == "cpu":
                link = "machine"
        message = Message(
            what=one.what,
            kind=one.kind,
            group=one.group,
            ranks=one.ranks,
            bytes=one.bytes,
            times=one.times,
            sent=round(one.sent),
            link=link,
            seconds=seconds,
            exposed_seconds=exposed.get(one),
        )
        found.append(message)
    return tuple(found)


def _waiting(
    spec: Spec, time: StepTime | None, *, hardware: Hardware | None, throughput: MeasuredThroughput | None
) -> Waiting | None:
    shape = shape_of(spec)
    if shape.pp == 1:
        return None
    ratio = None
    if time is not None:
        ratio = time.bubble
    layout = None
    seconds = None
    is_divided_otherwise = any(getattr(spec.parallelism.pipeline, name) for name in EVENLY)
    if time is not None and hardware is not None and throughput is not None and not is_divided_otherwise:
        by_time = fastest_division(spec, hardware, throughput)
        seconds_by_time = step_time(by_time, hardware, throughput).seconds
        is_worth_it = seconds_by_time <= (1 - _WORTH_DIVIDING) * time.seconds
        if is_worth_it and fullest(memory_of(by_time)).total <= hardware.room:
            layout = by_time.parallelism.pipeline.layout
            seconds = seconds_by_time
    return Waiting(
        layout_by_time=layout,
        seconds_by_time=seconds,
        schedule=shape.schedule,
        micro_batches=shape.micro_batches,
        formula=bubble_formula(shape),
        ratio=ratio,
        chart=tuple(chart(shape)),
    )


def _speed(time: StepTime, *, batch: BatchPlan) -> Speed:
    return Speed(
        seconds=time.seconds,
        parts=time.parts,
        tokens_per_second=time.tokens_per_second,
        tokens_per_second_per_gpu=time.tokens_per_second_per_gpu,
        mfu=time.mfu,
        days=batch.tokens / time.tokens_per_second / DAY,
    )


class RankView(Frozen):
    """One rank's own view."""

    rank: int
    dense: dict[str, int]
    """Its place on each axis."""
    expert: dict[str, int]
    has_experts: bool
    """Without them the second place says nothing that is printed."""
    groups: dict[str, tuple[int, ...]]
    """The ranks that it shares each axis with, itself among them."""
    layers: tuple[str, ...]
    parameters: int
    memory: dict[str, int]


def rank_view(plan: Plan, rank: int) -> RankView:
    """Of a rank below the world size."""
    dense_sizes = {axis: plan.mesh[axis] for axis in DENSE_AXES}
    expert_sizes = {axis: plan.mesh[axis] for axis in EXPERT_AXES}
    dense = coordinates(rank, dense_sizes)
    expert = coordinates(rank, expert_sizes, EXPERT_AXES)
    groups = {}
    for axis in DENSE_AXES:
        if dense_sizes[axis] > 1:
            groups[axis] = _shared_with(axis, dense, dense_sizes, DENSE_AXES)
    has_experts = bool(plan.model.get("moe"))
    for axis in EXPERT_AXES:
        # both meshes have the same stages
        if has_experts and expert_sizes[axis] > 1 and axis != "pp":
            groups[axis] = _shared_with(axis, expert, expert_sizes, EXPERT_AXES)
    stage = plan.stages[dense["pp"]]
    return RankView(
        rank=rank,
        dense=dense,
        expert=expert,
        has_experts=has_experts,
        groups=groups,
        layers=stage.layers,
        parameters=stage.parameters,
        memory=stage.memory,
    )


def _shared_with(axis: str, here: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[int, ...]:
    """The ranks of which all coordinates but one are those of a rank, itself among them."""
    return tuple(rank_of({**here, axis: number}, sizes, axes) for number in range(sizes[axis]))
