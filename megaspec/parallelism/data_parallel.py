"""Data parallelism: who holds, sums and updates what (Rajbhandari et al. 2020), one engine for all strategies.

Note on the strategies. Parameters lie in buckets: flat buffers in equal shards, cut between rows (flat.py).

            sums of gradients                                 weights
replicate   whole; all-reduced in the last backward pass      whole, all updated here
zero1       whole; reduce-scattered in the last one           whole; this rank's shard is updated, then all are gathered
zero2       shard; the whole from a unit's backward pass      as zero1
            to its reduction, in each pass
fsdp, hsdp  as zero2                                          shard; the whole while a unit runs, forward or backward

Shards are summed over their replicas once a step. Reductions and gathers have communicators and streams of their own,
so that they run beside each other and the computation. Whole buffers get and lose memory in the order of the
computation's stream, which waits for a collective before the memory that it works on is dropped.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megaspec.core.layout import Layout, replicated
from megaspec.core.layout import rows as rows_of
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.embedding import Embedding, LearnedPositions
from megaspec.nn.linear import Linear
from megaspec.nn.transfer import Side
from megaspec.parallelism.bucket import Bucket, ShardGroup
from megaspec.parallelism.flat import divide
from megaspec.parallelism.gathers import Gathers
from megaspec.parallelism.mesh import Mesh
from megaspec.parallelism.reductions import Reductions
from megaspec.parallelism.spec import DpStrategy


@dataclass(frozen=True)
class Sharing:
    """What data-parallel ranks share out, and how they exchange it."""

    strategy: DpStrategy
    bucket_bytes: float
    """Gradients of a bucket, with replicate and zero1; the other strategies have one for each unit."""
    grad_reduce: str = "fp32"
    """bf16: gradients are rounded on their way between ranks. fp32: at least fp32. Here they are summed in at least
    fp32 either way."""
    overlap_grad_reduce: bool = True
    """Reduce while the backward pass still runs; else after it, with zero2, fsdp and hsdp after each unit."""
    overlap_param_gather: bool = True
    """Gather weights while what comes before them still runs."""


@dataclass
class _Part:
    """A unit, and the buckets that its parameters lie in."""

    unit: Unit
    names: list[str]
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        """Its backward pass follows its forward pass at once."""
        return self.unit.name == "head"

    @cached_property
    def is_table(self) -> bool:
        """Nothing but rows to look up, which the backward pass does not read."""
        inside = [m for top in _modules(self.unit) for m in top.modules()]
        return all(isinstance(m, Embedding | LearnedPositions) for m in inside if m._parameters)


class DataParallel:
    """The sums of gradients over micro batches and ranks, in at least fp32, and what this rank updates of the weights.

    `parameters`: the model's on this rank, by global name; with fsdp and hsdp they have memory inside `full_weights`
    and while their unit runs. `gradients`, `weights`, `shards`: what the optimizer works on: this rank's rows of each
    parameter's gradient, of the parameter itself, and where they lie in the global one.

    Buckets are filled from the last parameter to the first, the order in which the backward pass makes gradients.
    Linear layers add to them inside the matrix product; other parameters through a hook on their `.grad`, which a
    compiled block calls at its end: theirs are behind those of the unit's linear layers.
    """

    def __init__(
        self,
        chunks: Sequence[Decoder],
        *,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        sharing: Sharing,
        experts: frozenset[str] = frozenset(),
        shared: frozenset[str] = frozenset(),
    ):
        """`experts`: parameters that lie on the expert grid. `shared`: those that another pipeline rank holds as well,
        to be divided alike there. All ranks must call this together."""
        strategy = sharing.strategy
        self._shards_weights = strategy in ("fsdp", "hsdp")
        self._keeps_sums = strategy in ("replicate", "zero1")
        held = [chunk.global_parameters() for chunk in chunks]
        self.parameters: dict[str, nn.Parameter] = {n: p for parameters in held for n, p in parameters.items()}
        self._parts = [
            [_Part(unit, _names_of(unit, parameters)) for unit in chunk.units]
            for chunk, parameters in zip(chunks, held, strict=True)
        ]
        missing = self.parameters.keys() - {n for parts in self._parts for part in parts for n in part.names}
        assert not missing, f"{sorted(missing)} belong to no unit of the model"
        # a weight that has its name from another module leaves its gradient to autograd
        modules = {f"{n}.weight": m for c in chunks for n, m in c.named_modules() if isinstance(m, Linear)}
        self._linears = {n: m for n, m in modules.items() if n in self.parameters}
        shard_groups = {is_expert: ShardGroup.of(mesh, strategy, experts=is_expert) for is_expert in (False, True)}
        self.buckets: list[Bucket] = []
        for chunk, names in self._groups(held, experts, shared, sharing.bucket_bytes):
            kind = shard_groups[names[0] in experts]
            shapes = {name: tuple(self.parameters[name].shape) for name in names}
            self.buckets.append(Bucket(divide(shapes, shards=kind.shards), kind, chunk=chunk))
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        for part in (part for parts in self._parts for part in parts):
            part.buckets = list(dict.fromkeys(self._bucket_of[name] for name in part.names))
        self._reductions = Reductions(
            self.buckets,
            self.parameters,
            # first in line, since other ranks wait for what it sends
            side=Side(mesh.device, priority=-1),
            form=torch.bfloat16 if sharing.grad_reduce == "bf16" else None,
            kept=self._keeps_sums,
            overlap=sharing.overlap_grad_reduce,
        )
        if strategy != "replicate":
            for bucket in self.buckets:
                bucket.hold_weights(self.parameters, kept=not self._shards_weights)
        self._gathers = Gathers(
            [] if strategy == "replicate" else self.buckets[::-1],
            side=Side(mesh.device, priority=-1),
            kept=not self._shards_weights,
            overlap=sharing.overlap_param_gather,
        )
        self._reductions.connect(self._linears)
        self._share_out(layouts)
        self._backward_at: list[_Part | None] = [None] * len(chunks)
        if strategy != "replicate":
            for chunk, parts in enumerate(self._parts):
                for index, part in enumerate(parts):
                    part.unit.run = self._wrapped(part.unit.run, chunk, index)

    def _groups(
        self, held: Sequence[Mapping[str, nn.Parameter]], experts: frozenset[str], shared: frozenset[str], most: float
    ) -> Iterator[tuple[int | None, list[str]]]:
        """The chunk and the names of each bucket, in the order of the backward pass."""
        used = Counter(name for names in held for name in names)
        alone = shared | {name for name, count in used.items() if count > 1}
        for chunk in reversed(range(len(held))):
            first = {n: i for i, part in reversed(list(enumerate(self._parts[chunk]))) for n in part.names}
            own = [name for name in reversed(held[chunk]) if name not in alone]
            own.sort(key=lambda name, first=first: (-first[name], name not in self._linears))
            lists, limit = [own], most
            if not self._keeps_sums:
                users = Counter(name for part in self._parts[chunk] for name in part.names)
                several = [name for name in own if users[name] > 1]
                units = [[n for n in own if n in set(p.names) - set(several)] for p in reversed(self._parts[chunk])]
                lists, limit = [*([name] for name in several), *units], float("inf")
            for names in lists:
                kinds = [[n for n in names if (n in experts) == is_expert] for is_expert in (False, True)]
                cuts = [cut for kind in kinds for cut in self._cut(kind, limit)]
                # by the parameter that fills the bucket
                yield from ((chunk, cut) for cut in sorted(cuts, key=lambda cut: names.index(cut[-1])))
        yield from ((None, [name]) for name in sorted(alone & self.parameters.keys()))

    def _cut(self, names: Sequence[str], most: float) -> Iterator[list[str]]:
        """Consecutive names of at least `most` bytes of gradients together, and the rest."""
        pending: list[str] = []
        size = 0
        for name in names:
            parameter = self.parameters[name]
            pending.append(name)
            size += parameter.numel() * torch.promote_types(parameter.dtype, torch.float32).itemsize
            if size >= most:
                yield pending
                pending, size = [], 0
        if pending:
            yield pending

    def _share_out(self, layouts: Mapping[str, Layout]) -> None:
        """What the optimizer works on."""
        self.weights: dict[str, Tensor] = {}
        self.shards: dict[str, Layout] = {}
        for name, parameter in self.parameters.items():
            bucket, rows = self._bucket_of[name], self.rows(name)
            division, shard_group = bucket.division, bucket.shard_group
            self.weights[name] = parameter
            if bucket.weights is not None:
                self.weights[name] = division.part(bucket.weights.own, name, shard_group.index)
            layout = rows_of(layouts[name], rows.start, rows.stop)
            self.shards[name] = replicated(layout, index=shard_group.replica, count=shard_group.replicas)
        self.gradients: dict[str, Tensor] = {
            name: bucket.division.part(bucket.sums.own, name, bucket.shard_group.index)
            for bucket in self.buckets
            for name in bucket.names
        }

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank updates."""
        bucket = self._bucket_of[name]
        return bucket.division.rows(name, bucket.shard_group.index)

    def start_step(self) -> None:
        """Forgets the last step's sums; the first gradient of each parameter overwrites them."""
        self._reductions.start_step()

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Call before each backward pass of a micro batch through a chunk; `last`: it is the step's last one there."""
        self._reductions.start_backward(chunk, last=last)
        # a stage may be empty
        if self._shards_weights and self._parts[chunk]:
            self._gathers.start(self._parts[chunk][-1].buckets)

    @property
    def has_unsummed(self) -> bool:
        """Gradients have arrived since the last `finish`."""
        return self._reductions.has_unsummed

    def finish(self) -> None:
        """Waits until every gradient is the sum over all micro batches and ranks. The host goes on."""
        self._reductions.finish()

    def gather_weights(self) -> None:
        """Call when the weights have been updated: lets every rank have what others have updated.

        The units' `run` waits for the weights that it needs; whatever else reads parameters calls `wait_weights`.
        """
        self._gathers.renew()

    def wait_weights(self) -> None:
        """What is started after it finds the parameters up to date; with fsdp and hsdp inside `full_weights` only."""
        self._gathers.wait()

    @contextmanager
    def full_weights(self) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters, whole and up to date on every rank while the context lasts. All ranks call it together."""
        self.wait_weights()
        if self._shards_weights:
            self._gathers.need(self.buckets)
        yield self.parameters
        if self._shards_weights:
            self._gathers.release(self.buckets)

    def _wrapped(self, run: Callable[..., Tensor], chunk: int, index: int) -> Callable[..., Tensor]:
        """A unit's `run` with its weights there, and a mark on its output for the backward pass."""
        part, after = self._parts[chunk][index], self._parts[chunk][index + 1 : index + 2]

        def wrapped(x: Tensor, *rest: object) -> Tensor:
            self._gathers.need(part.buckets)
            for following in after:
                self._gathers.start(following.buckets)
            y = run(x, *rest)
            if y.requires_grad and not self._keeps_sums:
                # the gradient of y is there when all that comes after y is through its backward pass
                y.register_hook(lambda _: self._before_backward(chunk, index))
            if not (self._shards_weights and part.stays and y.requires_grad):
                self._gathers.release(part.buckets)
            return y

        return wrapped

    def _before_backward(self, chunk: int, index: int) -> None:
        """The backward pass reaches a unit, and has left the one after it."""
        self._leave(chunk)
        if self._backward_at[chunk] is None:
            Variable._execution_engine.queue_callback(lambda: self._end_backward(chunk))
        part = self._backward_at[chunk] = self._parts[chunk][index]
        for bucket in part.buckets:
            if self._reductions.sums_inside(bucket):
                self._reductions.prepare(bucket)
        if self._shards_weights and not part.is_table:
            if not part.stays:
                self._gathers.need(part.buckets)
            if index > 0 and not self._parts[chunk][index - 1].is_table:
                self._gathers.start(self._parts[chunk][index - 1].buckets)

    def _leave(self, chunk: int) -> None:
        part = self._backward_at[chunk]
        if part is not None and self._shards_weights and not part.is_table:
            self._gathers.release(part.buckets)

    def _end_backward(self, chunk: int) -> None:
        self._leave(chunk)
        self._backward_at[chunk] = None


def _modules(unit: Unit) -> list[nn.Module]:
    return [module for module in unit.modules if module is not None]


def _names_of(unit: Unit, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters that a unit uses, by global name, in the order of the chunk."""
    inside = {id(p) for module in _modules(unit) for p in module.parameters()}
    return [name for name, parameter in parameters.items() if id(parameter) in inside]
