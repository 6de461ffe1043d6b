"""Data parallelism: who holds, sums and updates what (Rajbhandari et al. 2020), one engine for all strategies.

Note on the strategies. Parameters lie in buckets: flat buffers in equal shards, cut between rows (flat.py).

            sums of gradients                                 weights
replicate   whole; all-reduced in the last backward pass      whole, all updated here
zero1       whole; reduce-scattered in the last one           whole; this rank's shard is updated, then all are gathered
zero2       shard; the whole from a unit's backward pass      as zero1
            to its reduction, in each pass
fsdp, hsdp  as zero2                                          shard; the whole while a unit runs, forward or backward

A frozen parameter has no sum, and lies in a bucket of its own kind: with fsdp and hsdp shared out as all weights are,
otherwise whole on every rank, since nobody updates it.

Shards are summed over their replicas once a step. Reductions and gathers have communicators and streams of their own,
so that they run beside each other and the computation. Whole buffers get and lose memory in the order of the
computation's stream, which waits for a collective before the memory that it works on is dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megaspec.core.layout import Layout, replicated
from megaspec.core.layout import rows as rows_of
from megaspec.core.weight_facts import WeightFacts
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.each_norm import each_norm
from megaspec.nn.embedding.module import Embedding
from megaspec.nn.head.module import OutputHead
from megaspec.nn.linear import Linear, WeightGradientSums
from megaspec.nn.range_names import OPTIMIZER
from megaspec.nn.ranges import marked
from megaspec.nn.transfer import Side
from megaspec.parallelism.bucket import Bucket, ShardGroup
from megaspec.parallelism.bucketing import Bucketing, ChunkMembers, Member, buckets_of
from megaspec.parallelism.flat import of_places
from megaspec.parallelism.fp8_gather import Fp8Gather
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
class _ShardedUnit:
    """A unit, and the buckets that its parameters lie in."""

    unit: Unit
    names: list[str]
    is_table: bool
    """Nothing but rows to look up, which the backward pass does not read."""
    buckets: list[Bucket] = field(default_factory=list)
    runs_backward: bool = True
    """The backward pass comes here: something is trained in it or before it. Known from its forward pass."""

    @property
    def stays(self) -> bool:
        """Its backward pass follows its forward pass at once."""
        return self.unit.role == "head"


class DataParallel:
    """The strategy. The sums of gradients over micro batches and ranks, in at least fp32, and what this rank updates of
    the weights.

    `apply` makes what follows. `parameters`: the model's on this rank, by global name; with fsdp and hsdp they have
    memory inside `full_weights` and while their unit runs. `gradients`, `weights`, `shards`: what the optimizer works
    on: this rank's rows of each parameter's gradient, of the parameter itself, and where they lie in the global one.

    `norms`: of gradients that nobody changes behind `finish_grads`, this rank's rows, scalars; there behind it.

    Buckets are filled from the last parameter to the first, the order in which the backward pass makes gradients.
    Linear layers add to them inside the matrix product; other parameters through a hook on their `.grad`, which a
    compiled block calls at its end: theirs are behind those of the unit's linear layers. With replicate and zero1 the
    tables of embedding and output head are added to in place as well, in the passes of a step.
    """

    def __init__(self, mesh: Mesh, sharing: Sharing, *, facts: Mapping[str, WeightFacts]):
        """`facts`: of the whole model's parameters, by global name."""
        self._mesh = mesh
        self._sharing = sharing
        self._facts = facts
        self._shards_weights = sharing.strategy in ("fsdp", "hsdp")
        self._keeps_sums = sharing.strategy in ("replicate", "zero1")

    def apply(
        self,
        chunks: Sequence[Decoder],
        *,
        layouts: Mapping[str, Layout],
        sums: WeightGradientSums,
        shared: frozenset[str] = frozenset(),
        changed_later: frozenset[str] = frozenset(),
        on_update: Callable[[], None] = lambda: None,
        on_free: Callable[[Sequence[str]], None] = lambda names: None,
        in_fp8: Fp8Gather | None = None,
    ) -> None:
        """Moves the parameters into buckets and wraps the units that use them. All ranks must call it together.

        `layouts`: of the parameters as they lie on this rank. `sums`: of this model's weight gradients. `shared`:
        parameters that another pipeline rank holds as well, to be divided alike there. `changed_later`: those whose
        gradients others add something to behind `finish_grads`. `on_update` is called when
        weights have changed, `on_free` with the names of weights whose memory this rank is about to free. `in_fp8`:
        what gathers weights in fp8; None: nothing does.
        """
        is_shared_out = self._sharing.strategy != "replicate"
        self._in_fp8 = in_fp8
        self._narrow = frozenset() if in_fp8 is None else in_fp8.names
        """Weights that are gathered in fp8."""
        held = [chunk.global_parameters() for chunk in chunks]
        self.parameters: dict[str, nn.Parameter] = {}
        for parameters in held:
            self.parameters |= parameters
        self._units = [self._units_of(chunk, parameters) for chunk, parameters in zip(chunks, held, strict=True)]
        self._linears = self._linears_of(chunks)
        self._make_buckets(held, shared)
        self._changed_later = changed_later
        self.norms: dict[str, Tensor] = {}
        self._reductions = self._make_reductions()
        if is_shared_out:
            for bucket in self.buckets:
                bucket.hold_weights(self.parameters, kept=not self._shards_weights)
                if bucket.names[0] in self._narrow:
                    bucket.hold_bytes()
        self._on_update = on_update
        self.on_reduce: Callable[[Bucket], None] | None = None
        """Is called with a bucket whose whole sums are about to be summed over ranks."""
        self._gathers = self._make_gathers([b for b in self.buckets if self.is_gathered(b)], on_free)
        self._reductions.connect(self._linears, self._tables_of(chunks), sums)
        self._share_out(layouts)
        self._backward_at: list[_ShardedUnit | None] = [None] * len(chunks)
        """The unit of each chunk whose backward pass runs."""
        if is_shared_out:
            self._wrap_units()

    def is_gathered(self, bucket: Bucket) -> bool:
        """Its weights are shared out, to be updated or because all are."""
        if self._sharing.strategy == "replicate":
            return False
        return self._shards_weights or bucket.is_trained

    def _make_reductions(self) -> Reductions:
        return Reductions(
            [bucket for bucket in self.buckets if bucket.is_trained],
            {name: parameter for name, parameter in self.parameters.items() if self._facts[name].is_trained},
            # first in line, since other ranks wait for what it sends
            side=Side(self._mesh.device, priority=-1),
            form=torch.bfloat16 if self._sharing.grad_reduce == "bf16" else None,
            kept=self._keeps_sums,
            overlap=self._sharing.overlap_grad_reduce,
            on_reduce=self._before_reduce,
            on_summed=self._take_norms,
        )

    def _before_reduce(self, bucket: Bucket) -> None:
        if self.on_reduce is not None:
            self.on_reduce(bucket)

    def _take_norms(self, bucket: Bucket) -> None:
        """Of gradients that are what they stay: beside the rest of the backward pass, where reductions are."""
        stay = {name: self.gradients[name] for name in bucket.names if name not in self._changed_later}
        with marked(OPTIMIZER):
            self.norms |= each_norm(stay)

    def _make_gathers(self, buckets: Sequence[Bucket], on_free: Callable[[Sequence[str]], None]) -> Gathers:
        return Gathers(
            # weights are needed from the first unit to the last, gradients are made the other way round
            buckets[::-1],
            side=Side(self._mesh.device, priority=-1),
            kept=not self._shards_weights,
            overlap=self._sharing.overlap_param_gather,
            on_free=on_free,
            on_bytes=self._hold_bytes,
        )

    def _hold_bytes(self, bucket: Bucket) -> None:
        self._in_fp8.hold(bucket)

    def _units_of(self, chunk: Decoder, parameters: Mapping[str, nn.Parameter]) -> list["_ShardedUnit"]:
        """The units of a chunk, which together use all of its parameters."""
        units = []
        missing = set(parameters)
        for unit in chunk.units:
            names = _names_of(unit, parameters)
            # the head multiplies by a table that it shares with the embedding
            is_table = unit.role != "head" and all(self._facts[name].is_table for name in names)
            units.append(_ShardedUnit(unit, names, is_table))
            missing -= set(names)
        assert not missing, f"{sorted(missing)} belong to no unit of the model"
        return units

    def _linears_of(self, chunks: Sequence[Decoder]) -> dict[str, Linear]:
        """The linear layers whose weights are trained, by the names of these."""
        found = {}
        for chunk in chunks:
            for name, module in chunk.named_modules():
                weight = f"{name}.weight"
                # a weight that has its name from another module leaves its gradient to autograd
                if isinstance(module, Linear) and weight in self.parameters and self._facts[weight].is_trained:
                    found[weight] = module
        return found

    def _tables_of(self, chunks: Sequence[Decoder]) -> dict[str, list[tuple[Embedding | OutputHead, bool]]]:
        """Trained tables whose gradients all of their users, embeddings and output heads, can sum in place, by name; of
        each user whether a backward pass through its chunk comes to it last.

        None where sums have no memory in the forward pass, in which the loss makes its own."""
        found: dict[str, list[tuple[Embedding | OutputHead, bool]]] = {}
        refused: set[str] = set()
        if not self._keeps_sums:
            return found
        for chunk in chunks:
            for name, holders in _holders_in(chunk).items():
                if not (self._facts[name].is_trained and all(map(_sums_in_place, holders))):
                    refused.add(name)
                    continue
                # the embedding, where a chunk has both
                has_embedding = any(isinstance(one.module, Embedding) for one in holders)
                for one in holders:
                    ends_pass = isinstance(one.module, Embedding) or not has_embedding
                    found.setdefault(name, []).append((one.module, ends_pass))
        return {name: users for name, users in found.items() if name not in refused}

    def _make_buckets(self, held: Sequence[Mapping[str, nn.Parameter]], shared: frozenset[str]) -> None:
        """`held`: the parameters of each chunk."""
        # in this order on all ranks, since communicators are made
        dense = ShardGroup.of(self._mesh, self._sharing.strategy, experts=False)
        experts = ShardGroup.of(self._mesh, self._sharing.strategy, experts=True)
        chunks = []
        for parameters, units in zip(held, self._units, strict=True):
            members = {name: self._member(name) for name in parameters}
            chunks.append(ChunkMembers(members, [one.names for one in units]))
        bucketing = Bucketing(
            self._sharing.strategy,
            self._sharing.bucket_bytes,
            wide=self._bytes_of_gradient,
            dense_shards=dense.shards,
            expert_shards=experts.shards,
        )
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[str, Bucket] = {}
        for planned in buckets_of(chunks, shared, bucketing):
            shard_group = experts if planned.kind.is_expert else dense
            if not planned.kind.is_trained and not self._shards_weights:
                # nobody updates it, and every rank holds all of it
                shard_group = shard_group.whole()
            division = of_places(planned.places)
            bucket = Bucket(division, shard_group, chunk=planned.chunk, is_trained=planned.kind.is_trained)
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(planned.names, bucket)
        for units in self._units:
            for one in units:
                # each once, in the order of the unit's parameters
                one.buckets = list(dict.fromkeys(self._bucket_of[name] for name in one.names))

    def _member(self, name: str) -> Member:
        facts = self._facts[name]
        return Member(
            tuple(self.parameters[name].shape),
            is_trained=facts.is_trained,
            is_expert=facts.is_expert,
            is_linear=name in self._linears,
            in_fp8=name in self._narrow,
        )

    @property
    def _bytes_of_gradient(self) -> int:
        """At least those of fp32; parameters of a model have one format."""
        first = next(iter(self.parameters.values()), None)
        if first is None:
            # a stage may be empty
            return torch.float32.itemsize
        return torch.promote_types(first.dtype, torch.float32).itemsize

    def _share_out(self, layouts: Mapping[str, Layout]) -> None:
        """What the optimizer works on."""
        self.weights: dict[str, Tensor] = {}
        self.shards: dict[str, Layout] = {}
        self.gradients: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            bucket = self._bucket_of[name]
            rows = self.rows(name)
            shard_group = bucket.shard_group
            if bucket.weights is None:
                self.weights[name] = parameter
            else:
                self.weights[name] = bucket.division.part(bucket.weights.own, name, shard_group.index)
            layout = rows_of(layouts[name], rows.start, rows.stop)
            self.shards[name] = replicated(layout, index=shard_group.replica, count=shard_group.replicas)
        # in the order of the buckets: so gradients that lie side by side are worked on one after the other
        for bucket in self.buckets:
            if not bucket.is_trained:
                continue
            for name in bucket.names:
                self.gradients[name] = bucket.division.part(bucket.sums.own, name, bucket.shard_group.index)

    def rows(self, name: str) -> slice:
        """The rows of a parameter that this rank updates."""
        bucket = self._bucket_of[name]
        return bucket.division.rows(name, bucket.shard_group.index)

    @property
    def gathered(self) -> dict[str, nn.Parameter]:
        """Parameters that other ranks update shares of, and that lie whole on this rank between steps."""
        if self._shards_weights:
            return {}
        return {name: one for name, one in self.parameters.items() if self.is_gathered(self._bucket_of[name])}

    def start_step(self) -> None:
        """Forgets the last step's sums; the first gradient of each parameter overwrites them."""
        self.norms = {}
        self._reductions.start_step()

    def start_backward(self, chunk: int, *, last: bool) -> None:
        """Call before each backward pass of a micro batch through a chunk; `last`: it is the step's last one there."""
        self._reductions.start_backward(chunk, last=last)
        # a stage may be empty
        if self._shards_weights and self._units[chunk]:
            self._gathers.prefetch(self._units[chunk][-1].buckets)

    @property
    def has_unsummed(self) -> bool:
        """Gradients have arrived since the last `finish_grads`."""
        return self._reductions.has_unsummed

    def finish_grads(self) -> None:
        """Waits until every gradient is the sum over all micro batches and ranks. The host goes on."""
        self._reductions.finish()

    def gather_weights(self) -> None:
        """Call when the weights have been updated: lets every rank have what others have updated.

        The units' `run` waits for the weights that it needs; whatever else reads parameters calls `wait_weights`.
        """
        self._on_update()
        if self._in_fp8 is not None:
            self._in_fp8.renew([bucket for bucket in self.buckets if bucket.bytes is not None])
        self._gathers.renew()

    def wait_weights(self) -> None:
        """What is started after it finds the parameters up to date; with fsdp and hsdp inside `full_weights` only."""
        self._gathers.wait()

    @contextmanager
    def full_weights(self) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters, whole and up to date on every rank while the context lasts. All ranks call it together."""
        self.wait_weights()
        if self._shards_weights:
            self._gathers.unshard(self.buckets, exact=True)
        yield self.parameters
        if self._shards_weights:
            self._gathers.reshard(self.buckets)

    def _wrap_units(self) -> None:
        for chunk, units in enumerate(self._units):
            for index, one in enumerate(units):
                one.unit.run = self._wrapped(one.unit.run, chunk, index)

    def _wrapped(self, run: Callable[..., Tensor], chunk: int, index: int) -> Callable[..., Tensor]:
        """A unit's `run` with its weights there, and a mark on its output for the backward pass."""
        units = self._units[chunk]
        here = units[index]

        def wrapped(x: Tensor, *rest: object) -> Tensor:
            self._gathers.unshard(here.buckets)
            # beside this unit's computation
            if index + 1 < len(units):
                self._gathers.prefetch(units[index + 1].buckets)
            y = run(x, *rest)
            here.runs_backward = y.requires_grad
            if y.requires_grad and not self._keeps_sums:
                # the gradient of y is there when all that comes after y is through its backward pass
                y.register_hook(lambda _: self._before_backward(chunk, index))
            if not (self._shards_weights and here.stays and y.requires_grad):
                self._gathers.reshard(here.buckets)
            return y

        return wrapped

    def _before_backward(self, chunk: int, index: int) -> None:
        """The backward pass reaches a unit, and has left the one after it."""
        self._leave(chunk)
        if self._backward_at[chunk] is None:
            Variable._execution_engine.queue_callback(lambda: self._end_backward(chunk))
        here = self._units[chunk][index]
        self._backward_at[chunk] = here
        for bucket in here.buckets:
            if self._reductions.sums_inside(bucket):
                self._reductions.prepare(bucket)
        if not self._shards_weights or here.is_table:
            return
        if not here.stays:
            self._gathers.unshard(here.buckets)
        # beside this unit's backward pass: what the one before it in the model needs
        if index == 0:
            return
        before = self._units[chunk][index - 1]
        if before.runs_backward and not before.is_table:
            self._gathers.prefetch(before.buckets)

    def _leave(self, chunk: int) -> None:
        one = self._backward_at[chunk]
        if one is not None and self._shards_weights and not one.is_table:
            self._gathers.reshard(one.buckets)

    def _end_backward(self, chunk: int) -> None:
        self._leave(chunk)
        self._backward_at[chunk] = None


class _Holder(NamedTuple):
    """A module that holds a parameter, and what it calls it."""

    module: nn.Module
    key: str


def _holders_in(chunk: Decoder) -> dict[str, list[_Holder]]:
    """The holders of each parameter of a chunk, by its global name."""
    names = {id(parameter): name for name, parameter in chunk.global_parameters().items()}
    holders: dict[str, list[_Holder]] = {}
    for module in chunk.modules():
        for key, parameter in module.named_parameters(recurse=False):
            holders.setdefault(names[id(parameter)], []).append(_Holder(module, key))
    return holders


def _sums_in_place(holder: _Holder) -> bool:
    """Whether a module can add the gradient of a parameter to a TableSum: of its table, not of a head's bias."""
    module = holder.module
    is_able = isinstance(module, Embedding) or (isinstance(module, OutputHead) and module.sums_in_place)
    return is_able and holder.key == "weight"


def _names_of(unit: Unit, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The parameters that a unit uses, by global name, in the order of the chunk."""
    inside = set()
    for module in unit.modules:
        # a chunk without the model's last norm, say, has None in its place
        if module is not None:
            inside |= {id(parameter) for parameter in module.parameters()}
    return [name for name, parameter in parameters.items() if id(parameter) in inside]
