"""Which implementation of attention was measured to be the fastest for a use. Torch-free."""

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from megaspec.core.frozen import Frozen, PositiveInt
from megaspec.estimate.curves import Seconds

AttentionKind = Literal["causal", "window", "documents"]

HEADS = 32
"""Query heads of what is measured."""
KV_HEADS = 8


class AttentionRate(Frozen):
    """Forward and backward pass of one layer over one row of packed tokens: bf16, 32 query heads on 8."""

    implementation: str
    """A name of the catalog."""
    kind: AttentionKind
    head_size: PositiveInt
    tokens: PositiveInt
    """Of the row."""
    seen: PositiveInt
    """Keys of a window, or tokens of a document in the mean; of causal attention the row's."""
    seconds: Seconds


class _Point(NamedTuple):
    """What implementations are compared by."""

    tokens: int
    seen: int


def kind_of(*, documents: bool, window: bool) -> AttentionKind:
    """What decides, of a model whose layers may differ: what hides most."""
    if documents:
        return "documents"
    if window:
        return "window"
    return "causal"


def fastest(
    rates: Iterable[AttentionRate], *, among: Collection[str], kind: AttentionKind, head_size: int
) -> str | None:
    """The implementation with the least time over all points at which every one that was measured was measured.

    None: fewer than two of `among` were, at heads of this size, so that nothing is compared.
    """
    times: dict[str, dict[_Point, float]] = {}
    for rate in rates:
        if rate.kind == kind and rate.head_size == head_size and rate.implementation in among:
            points = times.setdefault(rate.implementation, {})
            points[_Point(rate.tokens, rate.seen)] = rate.seconds
    if len(times) < 2:
        return None
    shared = set.intersection(*(set(points) for points in times.values()))
    if not shared:
        return None
    return min(times, key=lambda name: sum(times[name][point] for point in shared))
