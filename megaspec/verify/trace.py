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
from megaspec.estimate.communication import COPIES, TIED, WHOLE
from megaspec.estimate.memory import memory_of
from megaspec.estimate.parameters import PartialGradients, RankParameters
from megaspec.estimate.schedule import shape_of
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.moe import Moe
from megaspec.optim.narrow import NarrowAdamW
from megaspec.optim.spec import MuonSpec
from megaspec.parallelism.bucket import Bucket
from megaspec.parallelism.flat import Division
from megaspec.precision.scaler import build_scaler
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
from megaspec_kernels.spec import KernelsSpec

_META = torch.device("meta")


@dataclass(frozen=True)
class Trace:
    """What one rank does and holds."""

    rank: int
    stage: int
    parameters: dict[str, tuple[int, ...]]
    """Shapes on this rank, by global name."""
    count: RankParameters
    """Their elements."""
    held: int
    """Of those that this rank updates."""
    sizes: RankParameters
    """The same with the padding of the buckets that they lie in."""
    layers: tuple[int, int]
    """Of those in dense buckets of layers: elements, and the same with padding."""
    padding_at_head: int
    """Of the output head's bucket."""
    padding_again: int
    """Of dense buckets that a backward pass gathers again where weights are shared out."""
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
    fullest = max(range(len(stages)), key=lambda one: stages[one].total)
    return tuple(sorted({0, spec.world_size - 1, fullest * (spec.world_size // len(stages))}))


def trace_ranks(spec: Spec, ranks: Sequence[int] = ()) -> list[Trace]:
    """Those, or what `ranks_to_trace` chooses."""
    return [trace_rank(spec, rank) for rank in ranks or ranks_to_trace(spec)]


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Process groups of a world of which this process plays one rank: collectives do nothing."""
    if world_size == 1:
        yield
        return
    capable = dist.Backend.backend_capability["fake"]
    if "meta" not in capable:
        capable.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Places(Position):
    """Tells the recorder where the rank is, and lets tables stand for what compiled layers make."""

    def __init__(self, recorder: Recorder, spec: Spec):
        super().__init__(_META)
        self._recorder, self._spec = recorder, spec
        self._current: list[KeptByUnit] = []

    def watch(self, chunk: Decoder) -> None:
        place = 0
        for unit in chunk.units:
            is_compiled = self._spec.kernels.compile == "block"
            size = unit_bytes(self._spec, unit.name, place=place) if is_compiled else None
            place += sum(module in chunk.layers.values() for module in unit.modules)
            self._told(unit, size)

    def _told(self, unit: Unit, size: UnitBytes | None) -> None:
        run, recorder = unit.run, self._recorder

        def told(x: Tensor, *more: object) -> Tensor:
            here = TracePoint("forward", self.micro, unit.name)
            recorder.place, memory = here, recorder.memory
            if x.is_floating_point():
                # what another stage sent is this one's now
                memory.name(x, ACTIVATIONS)
            kept = None if size is None else KeptByUnit(memory, size, x)
            recorder.unit = kept
            out = run(x, *more)
            recorder.unit = None
            if kept is not None:
                memory.name(out, ACTIVATIONS)
            if out.requires_grad:
                backward = replace(here, phase="backward")
                held = [] if kept is None else [kept]
                out.register_hook(lambda _: self._begin(backward, held))
                if held:
                    x.register_hook(lambda grad: self._end(grad, held))
            return out

        unit.run = told

    def _begin(self, here: TracePoint, held: list[KeptByUnit]) -> None:
        """A unit's backward pass begins, and that of the one behind it has ended, which may hear of it later: both have
        hooks on the same tensor. `held`: emptied by the end; empty for a unit that is counted tensor by tensor."""
        self._leave()
        self._recorder.place, self._current = here, held
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
    start, recorder = time.monotonic(), Recorder()
    eager = spec.model_copy(update={"kernels": _kernels(spec)})
    with fake_world(rank, spec.world_size), recorder.watching():
        built = build(eager, mesh=mesh_of(spec, rank=rank, device=_META), position=_Places(recorder, spec))
        for moe in (m for chunk in built.chunks for m in chunk.modules() if isinstance(m, Moe)):
            moe.force_balance()
        _name_what_is_held(built, recorder)
        batches, scaler = _batches(spec), build_scaler(spec.precision, device=_META)
        count = _enough(spec)
        if isinstance(built.optimizer, NarrowAdamW):
            _as_one_kernel(built.optimizer, recorder)
        recorder.place = TracePoint("step")
        recorder.memory.forget_peak()
        train_step(built, batches[:count], lr=1.0, weight_decay=0.0, scaler=scaler)
    sums = _sums(built, whole=True), _sums(built, whole=False)
    return Trace(
        rank=rank,
        stage=built.mesh.index("pp"),
        parameters={name: tuple(parameter.shape) for name, parameter in built.parameters.items()},
        count=_sizes(built, lambda division: sum(map(prod, division.shapes.values()))),
        held=sum(gradient.numel() for gradient in built.data_parallel.gradients.values()),
        sizes=_sizes(built, lambda division: division.numel),
        layers=_in_layers(built),
        padding_at_head=_padding([b for b in built.data_parallel.buckets if "head.weight" in b.names]),
        padding_again=_padding_again(built),
        partial=PartialGradients(*(sum(n for n, _ in found) for found in sums)),
        summed={
            WHOLE: sum(n for _, n in sums[0]),
            COPIES: sum(n for _, n in sums[1]),
            TIED: sum(built.data_parallel.gradients[name].numel() for name in built.pipeline.shared),
        },
        memory=recorder.memory.peak,
        peak_at=recorder.memory.peak_at,
        calls=_scaled(recorder.calls, count, len(batches)),
        micro_batches=count,
        seconds=time.monotonic() - start,
    )


def _sums(built: TrainState, *, whole: bool) -> list[tuple[int, int]]:
    """Elements of the gradients that tensor-parallel ranks add up, all of them and those that lie here. `whole`: of
    parameters that have no part."""
    found = []
    for one in built.tensor_parallel.sums:
        parameter = built.parameters.get(one.name)
        if parameter is not None and (one.rows is None) is whole:
            here, row = built.data_parallel.rows(one.name), prod(parameter.shape[1:])
            first, last = (0, parameter.shape[0]) if one.rows is None else (one.rows.start, one.rows.stop)
            held = max(0, min(last, here.stop) - max(first, here.start))
            found.append(((last - first) * row, held * row))
    return found


def _in_layers(built: TrainState) -> tuple[int, int]:
    experts = built.tensor_parallel.experts
    divisions = [
        bucket.division
        for bucket in built.data_parallel.buckets
        if bucket.names[0] not in experts and bucket.names[0].startswith("layers.")
    ]
    return sum(sum(map(prod, one.shapes.values())) for one in divisions), sum(one.numel for one in divisions)


def _padding_again(built: TrainState) -> int:
    dense = [b for b in built.data_parallel.buckets if b.names[0] not in built.tensor_parallel.experts]
    # one that several chunks or ends use is gathered for each
    return _padding([b for b in dense if b.chunk is None or any(name.startswith("layers.") for name in b.names)])


def _padding(buckets: list[Bucket]) -> int:
    return sum(b.division.numel - sum(map(prod, b.division.shapes.values())) for b in buckets)


def _sizes(built: TrainState, size: Callable[[Division], int]) -> RankParameters:
    """Of all buckets, by what lies in them."""
    experts = built.tensor_parallel.experts
    total = dict.fromkeys((False, True), 0)
    for bucket in built.data_parallel.buckets:
        total[bucket.names[0] in experts] += size(bucket.division)
    return RankParameters(total[False], total[True])


def _check(spec: Spec) -> None:
    """Refuses what has to read numbers. RecipeError."""
    own, problems = spec.parallelism.offload, []
    if isinstance(spec.optim, MuonSpec) and spec.world_size > 1:
        text = "optim.kind=muon can't be traced: its ranks tell each other what they hold, and a trace has one of them"
        problems.append(Problem("optim.kind", f"{text}; leave --trace out, or set optim=adamw", ""))
    for name, value in (("layers", own.layers), ("optimizer", own.optimizer)):
        if value:
            key = f"parallelism.offload.{name}"
            text = f"{key}={value} can't be traced: what goes to the CPU is copied, and a trace has nothing to copy"
            problems.append(Problem(key, f"{text}; leave --trace out, or set {key}=0", ""))
    if problems:
        raise RecipeError(problems)


def _kernels(spec: Spec) -> KernelsSpec:
    """What runs on tensors without numbers: nothing compiled, and in place of kernels that write into memory plain
    operations, but for what a GPU's kernel does without a copy of its own."""
    adamw = "torch" if spec.kernels.adamw == "torch" else "reference"
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
    B, S, documents = spec.train.micro_batch, spec.data.seq_len, None
    found = []
    for _ in range(shape_of(spec).micro_batches):
        tokens, labels = (torch.empty(B, S, dtype=torch.int64, device=_META) for _ in range(2))
        if spec.data.document_mask:
            documents = torch.empty(B, S, dtype=torch.int32, device=_META)
        mask, ids = (torch.empty(n, dtype=t, device=_META) for n, t in (((B, S), torch.bool), (B, torch.int64)))
        found.append(Batch(tokens, labels, mask, ids, documents))
    return found


def _enough(spec: Spec) -> int:
    """Micro batches after which every further one does the same again."""
    shape = shape_of(spec)
    if shape.schedule == "gpipe":
        return shape.micro_batches
    return min(shape.micro_batches, 2 * shape.pp * shape.virtual)


def _name_what_is_held(built: TrainState, recorder: Recorder) -> None:
    """Everything else that was made so far is the optimizer's."""
    memory = recorder.memory
    for chunk in built.chunks:
        for x in (*chunk.parameters(), *chunk.buffers()):
            memory.name(x, WEIGHTS)
    for bucket in built.data_parallel.buckets:
        for buffer, kind in ((bucket.weights, WEIGHTS), (bucket.sums, GRADIENTS)):
            if buffer is not None:
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
