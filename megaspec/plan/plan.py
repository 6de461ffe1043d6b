"""Everything that is known of a run before it starts: what `megaspec plan` prints, and its JSON."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, coordinates, rank_of
from megaspec.core.frozen import Frozen
from megaspec.estimate.batch_sizes import BatchPlan, batch_plan
from megaspec.estimate.ceilings import Ceilings
from megaspec.estimate.communication import Topology, collectives_of, topology_of
from megaspec.estimate.flops import flops_per_token
from megaspec.estimate.formula import dense_equation, expert_equation
from megaspec.estimate.hardware import HARDWARE, Hardware
from megaspec.estimate.layer_time import collective_seconds
from megaspec.estimate.memory import StageMemory, fullest, memory_of
from megaspec.estimate.parameters import count_parameters, rank_parameters
from megaspec.estimate.schedule import bubble_formula, chart, shape_of
from megaspec.estimate.step_time import StepTime, exposed_collectives, step_time
from megaspec.estimate.target import Target
from megaspec.parallelism.stages import EVENLY, layer_ranges, stages_of
from megaspec.plan.hints import Hint, hints
from megaspec.plan.promise import promise
from megaspec.rules.unbuilt import unbuilt_problems
from megaspec.search.balance import divided_by_time
from megaspec.search.changes import Change, best_change
from megaspec.search.remedies import Remedy, remedies
from megaspec.spec import Decision, Spec

MEMORY_KINDS = tuple(f.name for f in fields(StageMemory))
DAY = 86_400


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
    ceilings: str
    """Where the speeds are from; "" where none are known."""
    measured_on: str
    """The GPU of the hardware table that they were measured on, `name` itself or another one; "" likewise."""


class Group(Frozen):
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


class Fit(Frozen):
    """Whether the fullest rank fits."""

    by_kind: dict[str, int]
    """Bytes of the fullest rank, in the order of its parts."""
    total: int
    capacity: int
    """Of one device; 0 where it is not known."""
    fits: bool | None
    """None where the capacity is not known."""
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
    """nvlink or network."""
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
    """The pipeline.layout whose ranks take about the same, where with it a step is shorter by a fiftieth or more and no
    other setting says how layers are divided."""
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


class Plan(Frozen):
    """A run, planned. The keys of `megaspec plan --json`."""

    name: str
    run_dir: str
    about: dict[str, str | None]
    hardware: PlannedMachine
    device: str
    precision: str
    mesh: dict[str, int]
    equations: tuple[str, str]
    groups: tuple[Group, ...]
    sequence_parallel: bool
    model: dict[str, Any]
    parameters: dict[str, Any]
    stages: tuple[StageShare, ...]
    batch: dict[str, Any]
    segments: int
    """Index segments of the data order."""
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
    resume: str
    """What holds of the numbers of the run when it is stopped and goes on."""
    unbuilt: tuple[str, ...]
    """Keys of what can be planned, not trained."""
    decisions: tuple[Decision, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, the figures of the memory and the speed where programs look for them."""
        content = self.model_dump(mode="json")
        memory, speed = content["memory"], content["step_time"]
        content["memory"] = memory["by_kind"] | {k: v for k, v in memory.items() if k != "by_kind"}
        content["memory"]["per_stage"] = [stage["memory"] for stage in content["stages"]]
        if speed is not None:
            content |= {key: speed[key] for key in ("tokens_per_second", "tokens_per_second_per_gpu", "mfu", "days")}
            content["step_time"] = {"seconds": speed["seconds"], "parts": speed["parts"]}
        return content


def make_plan(
    spec: Spec,
    target: Target,
    *,
    hardware: Hardware | None,
    ceilings: Ceilings | None,
    why: str = "this machine",
    weigh_changes: bool = False,
) -> Plan:
    """From a resolved recipe. Without hardware or ceilings: everything but times. `weigh_changes`: look for the one
    change that would save most, for up to half a second."""
    own, model, seq_len = spec.parallelism, spec.model, spec.data.seq_len
    sizes = own.degrees
    topology = topology_of(spec, hardware)
    count, batch = count_parameters(model), batch_plan(spec.train, own, seq_len=seq_len)
    flops = {name: flops_per_token(model, seq_len=seq_len, convention=name, tp=own.tp) for name in ("causal", "full")}
    memory = memory_of(spec, device=spec.device)
    time = change = None
    told: tuple[Hint, ...] = ()
    if hardware is not None and ceilings is not None and spec.device == "cuda":
        time = step_time(spec, hardware, ceilings)
        told = hints(spec, hardware, ceilings, seconds=time.seconds)
        if weigh_changes:
            change = best_change(spec, hardware, ceilings, seconds=time.seconds)
    stages = _stages(spec, memory)
    return Plan(
        name=spec.name,
        run_dir=spec.run_dir,
        about={"purpose": spec.about.purpose, "source": spec.about.source, "hardware": spec.about.hardware},
        hardware=_machine(target, topology, hardware=hardware, ceilings=ceilings, why=why),
        device=spec.device,
        precision=spec.precision.kind,
        mesh={"world": spec.world_size, **sizes, "ep": own.ep, "etp": own.etp, "edp": topology.expert["edp"]},
        equations=(dense_equation(sizes), expert_equation(sizes, ep=own.ep, etp=own.etp)),
        groups=groups_of(topology),
        sequence_parallel=own.sequence_parallel,
        model=model.model_dump(mode="json"),
        parameters={
            "total": count.total,
            "active": count.active,
            "per_stage": [stage.parameters for stage in stages],
            "by_kind": {f.name: getattr(count, f.name) for f in fields(count) if f.name != "active_experts"},
        },
        stages=stages,
        batch={f.name: getattr(batch, f.name) for f in fields(batch)} | {"steps": spec.train.steps, "seq_len": seq_len},
        segments=len(spec.segments),
        memory=fit_of(spec, memory, hardware=hardware, capacity=target.gpu_memory if spec.device == "cuda" else 0),
        source_fit=_source_fit(spec, memory, hardware),
        flops_per_token=flops,
        flops=flops["causal"] * batch.tokens,
        communication=_messages(spec, hardware, ceilings),
        bubble=_waiting(spec, time, hardware=hardware, ceilings=ceilings),
        step_time=_speed(time, batch=batch) if time else None,
        change=change,
        hints=told,
        resume=promise(spec),
        unbuilt=tuple(p.key for p in unbuilt_problems(spec)),
        decisions=spec.decisions,
    )


def groups_of(topology: Topology) -> tuple[Group, ...]:
    """The groups of every axis of more than one rank; edp only where it is another than dp."""
    found = []
    for axes, sizes, wanted in (
        (DENSE_AXES, topology.dense, (("tp",), ("cp",), ("dp_shard",), ("dp_replicate",), ("pp",))),
        (EXPERT_AXES, topology.expert, (("etp",), ("ep",), ("edp",))),
    ):
        if axes is EXPERT_AXES and sizes["ep"] * sizes["etp"] == 1:
            continue
        for (axis,) in wanted:
            size = sizes[axis]
            if size > 1:
                stride = rank_of({axis: 1}, sizes, axes)
                first = tuple(range(0, size * stride, stride))
                within = topology.within_node((axis,))
                one = Group(
                    axis=axis, size=size, count=topology.world // size, stride=stride, first=first, within_node=within
                )
                found.append(one)
    return tuple(found)


def _machine(
    target: Target, topology: Topology, *, hardware: Hardware | None, ceilings: Ceilings | None, why: str
) -> PlannedMachine:
    on_gpu = target.device == "cuda"
    return PlannedMachine(
        name=hardware.name if hardware and on_gpu else (target.gpu or "GPU") if on_gpu else "cpu",
        gpus=target.gpus if on_gpu else 0,
        gpu_memory=target.gpu_memory if on_gpu else 0,
        node_size=topology.node,
        why=why,
        ceilings=ceilings.source if ceilings and on_gpu else "",
        measured_on=ceilings.table.hardware if ceilings and on_gpu else "",
    )


def _stages(spec: Spec, memory: Sequence[StageMemory]) -> tuple[StageShare, ...]:
    found = []
    for rank, chunks in enumerate(stages_of(spec.model.n_layers, spec.parallelism)):
        words = [
            ", ".join(("embedding",) * chunk.embedding + (layer_ranges(chunk.layers),) + ("head",) * chunk.head)
            for chunk in chunks
        ]
        held = memory_by_kind(memory[rank])
        parameters = rank_parameters(spec, rank).total
        found.append(StageShare(layers=tuple(words), parameters=parameters, memory=held))
    return tuple(found)


def memory_by_kind(stage: StageMemory) -> dict[str, int]:
    """Bytes by kind, and `total`."""
    return {kind: getattr(stage, kind) for kind in MEMORY_KINDS} | {"total": stage.total}


def fit_of(spec: Spec, memory: Sequence[StageMemory], *, hardware: Hardware | None, capacity: int) -> Fit:
    """The fullest rank against the memory of a device; capacity 0: not known."""
    most = fullest(memory)
    by_kind = memory_by_kind(most)
    total = by_kind.pop("total")
    return Fit(
        by_kind=by_kind,
        total=total,
        capacity=capacity,
        fits=total <= capacity if capacity else None,
        rank=list(memory).index(most),
        fits_on=tuple(name for name, one in HARDWARE.items() if total <= one.memory),
        remedies=tuple(remedies(spec, hardware)) if hardware and total > capacity > 0 else (),
    )


def _source_fit(spec: Spec, memory: Sequence[StageMemory], hardware: Hardware | None) -> str:
    named, total = HARDWARE.get(spec.about.hardware or ""), fullest(memory).total
    if named is None or hardware is None or named.name == hardware.name:
        return ""
    does = "fits" if total <= named.memory else "does not fit"
    return f"it {does} {named.name}, which its source names"


def _messages(spec: Spec, hardware: Hardware | None, ceilings: Ceilings | None) -> tuple[Message, ...]:
    found, waited = [], {}
    sent = collectives_of(spec, hardware)
    if hardware is not None and ceilings is not None and spec.device == "cuda":
        waited = dict(exposed_collectives(spec, hardware, ceilings))
        sent = tuple(waited)
    for one in sent:
        seconds = one.times * collective_seconds(one, ceilings) if waited else None
        found.append(
            Message(
                what=one.what,
                kind=one.kind,
                group=one.group,
                ranks=one.ranks,
                bytes=one.bytes,
                times=one.times,
                sent=round(one.sent),
                link="nvlink" if one.within_node else "network",
                seconds=seconds,
                exposed_seconds=waited.get(one),
            )
        )
    return tuple(found)


def _waiting(
    spec: Spec, speed: StepTime | None, *, hardware: Hardware | None, ceilings: Ceilings | None
) -> Waiting | None:
    shape = shape_of(spec)
    if shape.pp == 1:
        return None
    text = seconds = None
    is_said = any(getattr(spec.parallelism.pipeline, name) for name in EVENLY)
    if speed is not None and hardware is not None and ceilings is not None and not is_said:
        other = divided_by_time(spec, hardware, ceilings)
        found = step_time(other, hardware, ceilings).seconds
        if found <= 0.98 * speed.seconds and fullest(memory_of(other)).total <= hardware.room:
            text, seconds = other.parallelism.pipeline.layout, found
    return Waiting(
        layout_by_time=text,
        seconds_by_time=seconds,
        schedule=shape.schedule,
        micro_batches=shape.micro_batches,
        formula=bubble_formula(shape),
        ratio=speed.bubble if speed else None,
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
    groups: dict[str, tuple[int, ...]]
    """The ranks that it shares each axis with, itself among them."""
    layers: tuple[str, ...]
    parameters: int
    memory: dict[str, int]


def rank_view(plan: Plan, rank: int) -> RankView:
    """Of a rank below the world size."""
    dense = {axis: plan.mesh[axis] for axis in DENSE_AXES}
    expert = {axis: plan.mesh[axis] for axis in EXPERT_AXES}
    groups = {}
    for axes, sizes in ((DENSE_AXES, dense), (EXPERT_AXES, expert)):
        here = coordinates(rank, sizes, axes)
        for axis in axes:
            if sizes[axis] > 1 and (axes is DENSE_AXES or axis != "pp"):
                groups[axis] = tuple(rank_of(here | {axis: i}, sizes, axes) for i in range(sizes[axis]))
    stage = plan.stages[coordinates(rank, dense)["pp"]]
    return RankView(
        rank=rank,
        dense=coordinates(rank, dense),
        expert=coordinates(rank, expert, EXPERT_AXES),
        groups=groups,
        layers=stage.layers,
        parameters=stage.parameters,
        memory=stage.memory,
    )
