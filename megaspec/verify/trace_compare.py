"""What the formulas behind `plan` say, beside what a trace counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megaspec.core.axes import (
    DENSE_AXES,
    EXPERT_AXES,
    EXPERT_SHARD_AXES,
    coordinates,
    expert_shard_degrees,
    rank_groups,
)
from megaspec.estimate.buckets import StageBuckets, stage_buckets
from megaspec.estimate.communication import AGREED, collectives_of
from megaspec.estimate.layer_run import layer_run
from megaspec.estimate.memory import memory_of
from megaspec.estimate.parameters import partial_gradients, rank_parameters
from megaspec.estimate.topology import Collective, Topology, topology_of
from megaspec.parallelism.stages import stages_of
from megaspec.spec import Spec
from megaspec.verify.trace import Trace
from megaspec.verify.trace_memory import KINDS

MEMORY_TOLERANCE = 0.05
"""Of all that is allocated."""


# Counts of steps and of what routers saw, which no plan counts and a trace puts to the optimizer: beside a model's
# weights nothing, beside a few that are trained much.
_FEW_BYTES = 1 << 16


@dataclass(frozen=True)
class Row:
    """A number that is known twice."""

    what: str
    unit: str
    """bytes or parameters"""
    planned: int
    traced: int
    tolerance: float | None
    """Relative; None: told, not judged."""
    is_bound: bool = False
    """The trace may find less."""
    slack: int = 0
    """What may differ whatever the tolerance."""

    @property
    def agrees(self) -> bool:
        if self.tolerance is None:
            return True
        difference = self.traced - self.planned
        if not self.is_bound:
            difference = abs(difference)
        return difference <= max(self.tolerance * self.planned, self.slack)


def compared(spec: Spec, trace: Trace) -> list[Row]:
    """Parameters and collectives, which have to be the same, and memory."""
    return [*_parameters(spec, trace), *_collectives(spec, trace), *_memory(spec, trace)]


def _parameters(spec: Spec, trace: Trace) -> Iterator[Row]:
    planned = rank_parameters(spec, trace.stage)
    yield Row("parameters", "parameters", planned.total, trace.count.total, 0.0)
    if planned.expert or trace.count.expert:
        yield Row("of experts", "parameters", planned.expert, trace.count.expert, 0.0)
    partial = partial_gradients(spec, trace.stage)
    yield Row("that see a part of the tokens", "parameters", partial.over_tp, trace.partial.over_tp, 0.0)
    yield Row("of heads on several ranks", "parameters", partial.over_copies, trace.partial.over_copies, 0.0)


def _memory(spec: Spec, trace: Trace) -> Iterator[Row]:
    planned = memory_of(spec, device="meta")[trace.stage]
    # the plan is of the ranks that have most, where ranks share out rows that they don't divide
    chunks = stages_of(spec.model.n_layers, spec.parallelism)[trace.stage]
    buckets = stage_buckets(spec, chunks)
    is_bound = trace.held < buckets.all.trained.most_held.total
    for kind in KINDS:
        tolerance = MEMORY_TOLERANCE if kind in ("weights", "gradients", "optimizer") else None
        slack = _FEW_BYTES
        if kind == "weights":
            slack += _copies_of_a_unit(spec, buckets)
        traced = trace.memory.get(kind, 0)
        yield Row(kind.replace("_", " "), "bytes", getattr(planned, kind), traced, tolerance, is_bound, slack)
    yield Row("all memory", "bytes", planned.allocated, sum(trace.memory.values()), MEMORY_TOLERANCE, is_bound)


def _copies_of_a_unit(spec: Spec, buckets: StageBuckets) -> int:
    """Bytes in fp8, in both layouts, of the weights that are gathered together for a pass and freed behind it: a trace
    whose peak lies elsewhere holds none of them, and one whose next weights are on their way in fp8 holds more."""
    if spec.parallelism.dp_strategy not in ("fsdp", "hsdp"):
        return 0
    degrees = layer_run(spec).degrees
    copies = [0]
    for layers in buckets.units:
        copies.append(sum(2 * layer.fp8_weights_on(degrees).total for layer in layers))
    return max(copies)


def _collectives(spec: Spec, trace: Trace) -> Iterator[Row]:
    """By kind and by the axes of the dense grid along which the ranks lie."""
    plain = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"compile": "none"})})
    topology = topology_of(plain, None)
    planned: Counter[tuple[str, str]] = Counter()
    for collective in collectives_of(plain, None, trace.stage):
        if collective.what == AGREED:
            continue
        size = collective.times * collective.bytes
        if collective.what in trace.summed:
            size = trace.summed[collective.what] * layer_run(spec).wide
        ranks = _group(collective, topology, trace.rank)
        planned[collective.kind, _along(ranks, topology)] += round(size)
    traced: Counter[tuple[str, str]] = Counter()
    for call, times in trace.calls.items():
        traced[call.kind, _along(call.ranks, topology)] += call.bytes * times
    for kind, along in sorted(planned.keys() | traced.keys()):
        what = f"{kind.replace('_', ' ')} over {along}"
        yield Row(what, "bytes", planned[kind, along], traced[kind, along], 0.0)


def _group(collective: Collective, topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks that a planned collective spans, as if all of the axes took part."""
    axes = tuple(collective.group.split("·"))
    if set(axes) <= set(DENSE_AXES):
        names = DENSE_AXES
        sizes = topology.dense
    elif axes == ("edp",) and collective.ranks < topology.expert["edp"]:
        # what is shared out is sent inside a replica
        axes = ("edp_shard",)
        names = EXPERT_SHARD_AXES
        sizes = expert_shard_degrees(topology.dense, ep=topology.expert["ep"], etp=topology.expert["etp"])
    else:
        names = EXPERT_AXES
        sizes = topology.expert
    return next(tuple(group) for group in rank_groups(axes, sizes, names) if rank in group)


def _along(ranks: tuple[int, ...], topology: Topology) -> str:
    """`dp_shard·cp`: the axes on which the ranks differ."""
    places = [coordinates(rank, topology.dense) for rank in ranks]
    axes = []
    for axis in DENSE_AXES:
        indices = {place[axis] for place in places}
        if len(indices) > 1:
            axes.append(axis)
    return "·".join(axes)
