"""What the formulas behind `plan` say, beside what a trace counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES, coordinates, rank_groups
from megaspec.resolve.activations import share_of
from megaspec.resolve.communication import Collective, Mesh, collectives_of, gradient_width, mesh_of
from megaspec.resolve.memory import memory_of
from megaspec.resolve.parameters import partial_gradients, rank_parameters
from megaspec.runtime.trace import Trace
from megaspec.runtime.trace_memory import KINDS
from megaspec.spec import Spec

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

    @property
    def agrees(self) -> bool:
        return self.tolerance is None or abs(self.traced - self.planned) <= self.tolerance * max(self.planned, 1)


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
    for kind in KINDS:
        tolerance = MEMORY_TOLERANCE if kind in ("weights", "gradients", "optimizer") else None
        yield Row(kind.replace("_", " "), "bytes", getattr(planned, kind), trace.memory.get(kind, 0), tolerance)
    yield Row("all memory", "bytes", planned.allocated, sum(trace.memory.values()), MEMORY_TOLERANCE)


def _collectives(spec: Spec, trace: Trace) -> Iterator[Row]:
    """By kind and by the axes of the dense grid along which the ranks lie."""
    plain = spec.model_copy(update={"kernels": spec.kernels.model_copy(update={"compile": "none"})})
    mesh = mesh_of(plain, None)
    planned: Counter[tuple[str, str]] = Counter()
    for one in collectives_of(plain, None, trace.stage):
        size = one.times * _padded(one, spec, trace)
        if one.what in trace.summed:
            size = trace.summed[one.what] * gradient_width(spec)
        planned[one.kind, _along(_group(one, mesh, trace.rank), mesh)] += round(size)
    traced: Counter[tuple[str, str]] = Counter()
    for call, times in trace.calls.items():
        traced[call.kind, _along(call.ranks, mesh)] += call.bytes * times
    for kind, along in sorted(planned.keys() | traced.keys()):
        what = f"{kind.replace('_', ' ')} over {along}"
        yield Row(what, "bytes", planned[kind, along], traced[kind, along], 0.0)


def _padded(one: Collective, spec: Spec, trace: Trace) -> float:
    """Its bytes with the padding of buckets, which are padded so that every rank has as much and no row is cut."""
    if not one.what.endswith(("gradients", "weights")) or one.phase == "step":
        return one.bytes
    is_expert = one.what.startswith("experts'")
    number, size = (trace.count.expert, trace.sizes.expert) if is_expert else (trace.count.dense, trace.sizes.dense)
    if one.kind == "all_gather" and one.phase == "backward" and not is_expert:
        return one.bytes + trace.padding_again * share_of(spec).width
    return one.bytes * size / number


def _group(one: Collective, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks that a planned collective spans, as if all of the axes took part."""
    axes = tuple(one.group.split("·"))
    names, sizes = (DENSE_AXES, mesh.dense) if set(axes) <= set(DENSE_AXES) else (EXPERT_AXES, mesh.expert)
    return next(tuple(group) for group in rank_groups(axes, sizes, names) if rank in group)


def _along(ranks: tuple[int, ...], mesh: Mesh) -> str:
    places = [coordinates(rank, mesh.dense) for rank in ranks]
    return "·".join(axis for axis in DENSE_AXES if len({place[axis] for place in places}) > 1)
