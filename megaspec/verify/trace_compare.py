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
from megaspec.estimate.communication import HEAD, LAYERS, Collective, Topology, collectives_of, topology_of
from megaspec.estimate.memory import memory_of, shared_out
from megaspec.estimate.parameters import partial_gradients, rank_parameters
from megaspec.estimate.share import share_of
from megaspec.spec import Spec
from megaspec.verify.trace import Trace
from megaspec.verify.trace_memory import KINDS

MEMORY_TOLERANCE = 0.05
"""Of all that is allocated."""


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

    @property
    def agrees(self) -> bool:
        apart = self.traced - self.planned if self.is_bound else abs(self.traced - self.planned)
        return self.tolerance is None or apart <= self.tolerance * max(self.planned, 1)


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
    planned = memory_of(spec, device="cpu")[trace.stage]
    # the plan is of the ranks that have most, where ranks share out rows that they don't divide
    is_bound = trace.held < shared_out(spec, rank_parameters(spec, trace.stage), from_strategy=1)
    for kind in KINDS:
        tolerance = MEMORY_TOLERANCE if kind in ("weights", "gradients", "optimizer") else None
        traced = trace.memory.get(kind, 0)
        yield Row(kind.replace("_", " "), "bytes", getattr(planned, kind), traced, tolerance, is_bound)
    yield Row("all memory", "bytes", planned.allocated, sum(trace.memory.values()), MEMORY_TOLERANCE, is_bound)


def _collectives(spec: Spec, trace: Trace) -> Iterator[Row]:
    """By kind and by the axes of the dense grid along which the ranks lie."""
    plain = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"compile": "none"})})
    topology = topology_of(plain, None)
    planned: Counter[tuple[str, str]] = Counter()
    every = collectives_of(plain, None, trace.stage)
    apart = {LAYERS, HEAD} & {one.what for one in every}
    for one in every:
        size = one.times * _padded(one, spec, trace, apart)
        if one.what in trace.summed:
            size = trace.summed[one.what] * share_of(spec).wide
        planned[one.kind, _along(_group(one, topology, trace.rank), topology)] += round(size)
    traced: Counter[tuple[str, str]] = Counter()
    for call, times in trace.calls.items():
        traced[call.kind, _along(call.ranks, topology)] += call.bytes * times
    for kind, along in sorted(planned.keys() | traced.keys()):
        what = f"{kind.replace('_', ' ')} over {along}"
        yield Row(what, "bytes", planned[kind, along], traced[kind, along], 0.0)


def _padded(one: Collective, spec: Spec, trace: Trace, apart: set[str]) -> float:
    """Its bytes with the padding of buckets, which are padded so that every rank has as much and no row is cut.
    `apart`: of LAYERS and HEAD, what is sent apart from the rest."""
    if not one.what.endswith(("gradients", "weights")) or one.phase == "step":
        return one.bytes
    is_expert = one.what.startswith("experts'")
    number, size = (trace.count.expert, trace.sizes.expert) if is_expert else (trace.count.dense, trace.sizes.dense)
    if is_expert:
        return one.bytes * size / number
    width = share_of(spec).width
    if one.kind == "all_gather" and one.phase == "backward":
        return one.bytes + trace.padding_again * width
    if one.kind == "all_gather":
        rest = size - number - (HEAD in apart) * trace.padding_at_head
        return one.bytes + (trace.padding_at_head if one.what == HEAD else rest) * width
    if one.kind == "reduce_scatter" and LAYERS in apart:
        number, size = trace.layers if one.what == LAYERS else (number - trace.layers[0], size - trace.layers[1])
    return one.bytes * size / number


def _group(one: Collective, topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks that a planned collective spans, as if all of the axes took part."""
    axes = tuple(one.group.split("·"))
    if set(axes) <= set(DENSE_AXES):
        names, sizes = DENSE_AXES, topology.dense
    elif axes == ("edp",) and one.ranks < topology.expert["edp"]:
        # what is shared out is sent inside a replica
        axes, names = ("edp_shard",), EXPERT_SHARD_AXES
        sizes = expert_shard_degrees(topology.dense, ep=topology.expert["ep"], etp=topology.expert["etp"])
    else:
        names, sizes = EXPERT_AXES, topology.expert
    return next(tuple(group) for group in rank_groups(axes, sizes, names) if rank in group)


def _along(ranks: tuple[int, ...], topology: Topology) -> str:
    places = [coordinates(rank, topology.dense) for rank in ranks]
    return "·".join(axis for axis in DENSE_AXES if len({place[axis] for place in places}) > 1)
