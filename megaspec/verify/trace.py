"""One real step of chosen ranks, without their numbers and without the other ranks: what `plan --trace` reports."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaspec.core.errors import Problem, RecipeError
from megaspec.data.batch import Batch
from megaspec.estimate.memory import memory_of
from megaspec.estimate.parameters import PartialGradients
from megaspec.estimate.schedule import shape_of
from megaspec.estimate.step_communication import COPIES, TIED, WHOLE
from megaspec.estimate.trained import gathers_fp8
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.fp8 import Fp8Pair
from megaspec.nn.layer.facts import WeightCount
from megaspec.nn.moe.fp8 import Fp8Experts
from megaspec.nn.moe.module import Moe
from megaspec.optim.narrow import NarrowAdamW
from megaspec.optim.spec import MuonSpec, has_narrow_states
from megaspec.precision.scaler import build_scaler
from megaspec.precision.spec import Fp8Precision
from megaspec.runtime.build import TrainState, build, mesh_of
from megaspec.runtime.position import Position
from megaspec.runtime.step import train_step
from megaspec.spec import Spec
from megaspec.verify.trace_blocks import KeptByUnit, UnitBytes, unit_bytes
from megaspec.verify.trace_memory import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    WEIGHTS,
)
from megaspec.verify.trace_recorder import Call, Recorder, TracePoint
from megaspec_kernels.attention.documents import whole_rows
from megaspec_kernels.catalog import BLACKWELL
from megaspec_kernels.spec import KernelsSpec

# Tensors of this device have no numbers: trace_recorder.py, note "Meta tensors".
_META = torch.device("meta")


@dataclass(frozen=True)
class Trace:
    """What one rank does and holds."""

    rank: int
    stage: int
    parameters: dict[str, tuple[int, ...]]
    """Shapes on this rank, by global name."""
    count: WeightCount
    """Their elements."""
    held: int
    """Of those that this rank updates."""
    partial: PartialGradients
    """Elements whose gradients tensor-parallel ranks add up, on all ranks that share them out."""
    summed: dict[str, int]
    """Elements that this rank adds up at the end of a step, by what estimate/communication.py calls it."""
    memory: dict[str, int]
    """Bytes at the peak by kind, as StageMemory names them."""
    peak_at: str
    """Where in the step."""
    calls: dict[Call, int]
    """Collectives of a step, with the number of times."""
    micro_batches: int
    """That were traced; what is counted is that of all of the step's."""
    seconds: float
    """That it took to trace."""


def ranks_to_trace(spec: Spec) -> tuple[int, ...]:
    """The first, the last, and one of the pipeline stage that `plan` finds fullest."""
    stages = memory_of(spec, device=spec.device)
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    ranks_of_stage = spec.world_size // len(stages)
    return tuple(sorted({0, spec.world_size - 1, fullest * ranks_of_stage}))


def trace_ranks(spec: Spec, ranks: Sequence[int] = ()) -> list[Trace]:
    """Those, or what `ranks_to_trace` chooses."""
    return [trace_rank(spec, rank) for rank in ranks or ranks_to_trace(spec)]


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Process groups of a world of which this process plays one rank: collectives do nothing."""
    if world_size == 1:
        yield
        return
    # torch's fake backend does nothing whatever the device is, but meta is not on its list
    capable = dist.Backend.backend_capability["fake"]
    if "meta" not in capable:
        capable.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _TracedPosition(Position):
    """Tells the recorder where the rank is, and lets tables stand for what compiled layers make."""

    def __init__(self, recorder: Recorder, spec: Spec):
        super().__init__(_META)
        self._recorder = recorder
        self._spec = spec
        # what the unit keeps whose backward pass runs
        self._current: list[KeptByUnit] = []

    def watch(self, chunk: Decoder) -> None:
        """Every unit of a chunk tells when its forward and its backward pass begin and end."""
        is_compiled = self._spec.kernels.compile == "block"
        place = 0  # of the unit's first layer among those of the chunk
        for unit in chunk.units:
            size = unit_bytes(self._spec, unit.name, place=place) if is_compiled else None
            place += sum(module in chunk.layers.values() for module in unit.modules)
            self._told(unit, size)

    def _told(self, unit: Unit, size: UnitBytes | None) -> None:
        """`size`: of a compiled unit, which the tables say; None: it is counted tensor by tensor."""
        run = unit.run
        recorder = self._recorder

        def told(x: Tensor, *more: object) -> Tensor:
            # of a unit before which nothing is trained: nobody told of its end
            self._leave()
            here = TracePoint("forward", self.micro, unit.name)
            recorder.place = here
            memory = recorder.memory
            if x.is_floating_point():
                # what another stage sent is this one's now
                memory.name(x, ACTIVATIONS)
            kept = None if size is None else KeptByUnit(memory, size, x)
            recorder.unit = kept
            out = run(x, *more)
            recorder.unit = None
            if kept is not None:
                kept.ran()
                memory.name(out, ACTIVATIONS)
            if out.requires_grad:
                # the gradient of what came out is made first, that of what went in last
                backward = replace(here, phase="backward")
                held = [] if kept is None else [kept]
                out.register_hook(lambda _: self._begin(backward, held))
                if held and x.requires_grad:
                    x.register_hook(lambda grad: self._end(grad, held))
            return out

        unit.run = told

    def _begin(self, here: TracePoint, held: list[KeptByUnit]) -> None:
        """A unit's backward pass begins, and that of the one behind it has ended, which may hear of it later: both have
        hooks on the same tensor. `held`: emptied by the end; empty for a unit that is counted tensor by tensor."""
        self._leave()
        self._recorder.place = here
        self._current = held
        if held:
            self._recorder.unit = held[0]
            held[0].work()

    def _end(self, grad: Tensor, held: list[KeptByUnit]) -> None:
        self._recorder.memory.name(grad, ACTIVATIONS)
        if self._current is held:
            self._leave()

    def _leave(self) -> None:
        self._recorder.unit = None
        if self._current:
            self._current.pop().done()
        self._current = []


def trace_rank(spec: Spec, rank: int) -> Trace:
    """Builds a rank and takes a step. RecipeError: the Spec asks for what can be planned only, or for what can't do
    without numbers."""
    _check(spec)
    start = time.monotonic()
    recorder = Recorder()
    eager = spec.model_copy(update={"kernels": _kernels(spec)})
    with fake_world(rank, spec.world_size), recorder.watching():
        built = build(eager, mesh=mesh_of(spec, rank=rank, device=_META), position=_TracedPosition(recorder, spec))
        if gathers_fp8(spec):
            # what is gathered in the first pass was quantised before the step
            built.data_parallel.gather_weights()
            recorder.calls.clear()
        _balance(built)  # loads of experts are numbers, which a trace has none of
        _name_weights_of_experts(built, recorder)
        _name_what_is_held(built, recorder)
        batches = _batches(spec)
        for batch in batches:
            for x in batch.tensors():
                recorder.memory.name(x, ACTIVATIONS)
        scaler = build_scaler(spec.precision, device=_META)
        count = _enough(spec)
        if isinstance(built.optimizer, NarrowAdamW):
            _as_one_kernel(built.optimizer, recorder)
        recorder.place = TracePoint("step")
        recorder.memory.forget_peak()
        train_step(built, batches[:count], lr=1.0, weight_decay=0.0, scaler=scaler)
    data_parallel = built.data_parallel
    sums_of_whole = _sums(built, whole=True)
    sums_of_rows = _sums(built, whole=False)
    return Trace(
        rank=rank,
        stage=built.mesh.index("pp"),
        parameters={name: tuple(parameter.shape) for name, parameter in built.parameters.items()},
        count=_sizes(built),
        held=sum(gradient.numel() for gradient in data_parallel.gradients.values()),
        partial=PartialGradients(over_tp=sums_of_whole.elements, over_copies=sums_of_rows.elements),
        summed={
            WHOLE: sums_of_whole.held,
            COPIES: sums_of_rows.held,
            TIED: _tied(built),
        },
        memory=recorder.memory.peak,
        peak_at=recorder.memory.peak_at,
        calls=_scaled(recorder.calls, count, len(batches)),
        micro_batches=count,
        seconds=time.monotonic() - start,
    )


def _tied(built: TrainState) -> int:
    """Elements of the gradients that both ends of a pipeline hold a part of."""
    gradients = built.data_parallel.gradients
    return sum(gradients[name].numel() for name in built.pipeline.shared if name in gradients)


def _balance(built: TrainState) -> None:
    for chunk in built.chunks:
        for module in chunk.modules():
            if isinstance(module, Moe):
                module.force_balance()


@dataclass
class _SummedGradients:
    """Gradients that tensor-parallel ranks add up, in elements."""

    elements: int = 0
    """On all ranks that share them out."""
    held: int = 0
    """Of those, the ones that lie here."""


def _sums(built: TrainState, *, whole: bool) -> _SummedGradients:
    """`whole`: of parameters that are summed as they are; else of those of which some rows are."""
    found = _SummedGradients()
    for gradient_sum in built.tensor_parallel.sums:
        parameter = built.parameters.get(gradient_sum.name)
        is_trained = gradient_sum.name in built.data_parallel.gradients
        if parameter is None or not is_trained or (gradient_sum.rows is None) is not whole:
            continue
        first = 0
        last = parameter.shape[0]
        if gradient_sum.rows is not None:
            first = gradient_sum.rows.start
            last = gradient_sum.rows.stop
        rows_here = built.data_parallel.rows(gradient_sum.name)
        held = max(0, min(last, rows_here.stop) - max(first, rows_here.start))
        row_elements = prod(parameter.shape[1:])
        found.elements += (last - first) * row_elements
        found.held += held * row_elements
    return found


def _sizes(built: TrainState) -> WeightCount:
    """Elements of the parameters of a rank."""
    dense = 0
    expert = 0
    for bucket in built.data_parallel.buckets:
        # a bucket holds parameters of one kind
        if built.facts[bucket.names[0]].is_expert:
            expert += bucket.division.elements
        else:
            dense += bucket.division.elements
    return WeightCount(dense, expert)


def _check(spec: Spec) -> None:
    """Refuses what has to read numbers. RecipeError."""
    problems: list[Problem] = []
    if isinstance(spec.optim, MuonSpec) and spec.world_size > 1:
        text = "optim.kind=muon can't be traced: its ranks tell each other what they hold, and a trace has one of them"
        problems.append(Problem("optim.kind", f"{text}; leave --trace out, or set optim=adamw", ""))
    precision = spec.precision
    # formats of blocks of 32 and 16 have casts of ours for tensors without numbers
    casts_apart = isinstance(precision, Fp8Precision) and precision.recipe not in BLACKWELL
    if spec.kernels.linear == "te" and casts_apart:
        text = "kernels.linear=te can't be traced: in fp8 Transformer Engine casts tensors that have numbers"
        problems.append(Problem("kernels.linear", f"{text}; leave --trace out, or set kernels.linear=torch", ""))
    offload = spec.parallelism.offload
    for name, value in (("layers", offload.layers), ("optimizer", offload.optimizer)):
        if value:
            key = f"parallelism.offload.{name}"
            text = f"{key}={value} can't be traced: what goes to the CPU is copied, and a trace has nothing to copy"
            problems.append(Problem(key, f"{text}; leave --trace out, or set {key}=0", ""))
    if problems:
        raise RecipeError(problems)


def _kernels(spec: Spec) -> KernelsSpec:
    """What runs on tensors without numbers: nothing compiled, and in place of kernels that write into memory plain
    operations, but for what a GPU's kernel does without a copy of its own."""
    # states that torch keeps, too, are updated by its kernel, which makes no tensors
    adamw = "reference" if has_narrow_states(spec.optim) else "torch"
    changes = {"compile": "none", "attention_merge": "reference", "unpermute": "triton", "adamw": adamw}
    return spec.kernels.model_copy(update=changes)


def _as_one_kernel(optimizer: NarrowAdamW, recorder: Recorder) -> None:
    """On a GPU an update makes no tensors; the plain operations that stand for it do, and are not counted."""
    update = optimizer.update

    def counted(*args: object, **options: object) -> None:
        recorder.unit = optimizer
        update(*args, **options)
        recorder.unit = None

    optimizer.update = counted


def _batches(spec: Spec) -> list[Batch]:
    """One data-parallel rank's micro batches of a step, [B, S] each."""
    B = spec.train.micro_batch
    S = spec.data.seq_len
    batches = []
    for _ in range(shape_of(spec).micro_batches):
        documents = None
        if spec.data.document_mask:
            documents = whole_rows(B, S, device=_META)
        batch = Batch(
            torch.empty(B, S, dtype=torch.int64, device=_META),
            torch.empty(B, S, dtype=torch.int64, device=_META),
            torch.empty(B, S, dtype=torch.bool, device=_META),
            torch.empty(B, dtype=torch.int64, device=_META),
            documents,
        )
        batches.append(batch)
    return batches


def _enough(spec: Spec) -> int:
    """Micro batches after which every further one does the same again."""
    shape = shape_of(spec)
    # gpipe holds all of a step's micro batches at once
    if shape.schedule == "gpipe":
        return shape.micro_batches
    return min(shape.micro_batches, 2 * shape.pp * shape.virtual)


def _name_weights_of_experts(built: TrainState, recorder: Recorder) -> None:
    """What experts quantise of their matrices stays until the next update, though it is made within a layer's pass; of
    other layers the recorder knows by the operation that takes their weight."""
    for linear in built.fp8.linears.values():
        if isinstance(linear, Fp8Experts):
            linear.weight = _named_weight(linear, recorder)


def _named_weight(experts: Fp8Experts, recorder: Recorder) -> Callable[[Tensor], Fp8Pair]:
    quantised = experts.weight

    def named(weight: Tensor) -> Fp8Pair:
        pair = quantised(weight)
        for layout in pair:
            recorder.memory.name(layout.values, WEIGHTS)
        return pair

    return named


def _name_what_is_held(built: TrainState, recorder: Recorder) -> None:
    """Everything else that was made so far is the optimizer's."""
    memory = recorder.memory
    for chunk in built.chunks:
        for x in (*chunk.parameters(), *chunk.buffers()):
            memory.name(x, WEIGHTS)
    for bucket in built.data_parallel.buckets:
        for buffer, kind in ((bucket.weights, WEIGHTS), (bucket.bytes, WEIGHTS), (bucket.sums, GRADIENTS)):
            if buffer is None:
                continue
            # a whole bucket that is not kept is made for a collective; this rank's own part of it may lie inside it
            memory.name(buffer.whole, kind if buffer.kept else COMMUNICATION)
            memory.name(buffer.own, kind)


def _scaled(calls: Counter[tuple[Call, int | None]], traced: int, all_: int) -> dict[Call, int]:
    """Times in a step of `all_` micro batches, of which those that were left out do what one in the middle did."""
    found: Counter[Call] = Counter()
    for (call, micro), times in calls.items():
        found[call] += times
        if micro == (traced - 1) // 2:
            found[call] += times * (all_ - traced)
    return dict(found)
