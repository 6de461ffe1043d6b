"""Which implementation of attention was measured to be the fastest for a use. Torch-free."""

from collections.abc import Collection, Iterable, Iterator
from math import exp, inf, log
from operator import itemgetter
from typing import Literal, NamedTuple

from megaspec.core.frozen import Frozen, PositiveInt
from megaspec.estimate.curves import Seconds

AttentionKind = Literal["causal", "window", "documents"]

HEAD_SIZES = (64, 128)
"""Sizes of heads that are measured."""
HEADS = 32
"""Query heads of what is measured."""
KV_HEADS = 8
NOISE = 1.02
"""Times of the same kernel differ by so much."""


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
    deterministic: bool = False
    """Gradients are added in one order, as with train.deterministic=true."""


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
    rates: Iterable[AttentionRate],
    *,
    among: Collection[str],
    kind: AttentionKind,
    head_size: int,
    deterministic: bool = False,
) -> str | None:
    """The implementation with the least time over all points at which every one that was measured was measured; of
    those that differ by less than measurements do the first of `among`. `deterministic`: in one order of sums, else in
    any.

    None: fewer than two of `among` were, at heads of this size and in this order, so that nothing is compared.
    """
    times = _times(rates, kind=kind, head_size=head_size, deterministic=deterministic)
    times = {name: points for name, points in times.items() if name in among}
    if len(times) < 2:
        return None
    shared = set.intersection(*(set(points) for points in times.values()))
    if not shared:
        return None
    totals = {name: sum(points[point] for point in shared) for name, points in times.items()}
    most = NOISE * min(totals.values())
    return next(name for name in among if totals.get(name, inf) <= most)


def faster_ones(
    rates: Iterable[AttentionRate], than: str, *, kind: AttentionKind, head_size: int, deterministic: bool = False
) -> dict[str, float]:
    """Implementations that were measured to take less than another by more than measurements differ, the fastest
    first, with the share of its time that they take; over the points at which both were measured in this order of
    sums."""
    times = _times(rates, kind=kind, head_size=head_size, deterministic=deterministic)
    own = times.pop(than, {})
    shares = {}
    for name, points in times.items():
        seconds = 0.0
        own_seconds = 0.0
        for point in own.keys() & points.keys():
            seconds += points[point]
            own_seconds += own[point]
        # 0 of 0 where no point is of both
        if NOISE * seconds < own_seconds:
            shares[name] = seconds / own_seconds
    return dict(sorted(shares.items(), key=itemgetter(1)))


def _times(
    rates: Iterable[AttentionRate], *, kind: AttentionKind, head_size: int, deterministic: bool
) -> dict[str, dict[_Point, float]]:
    """Seconds by implementation and point."""
    times: dict[str, dict[_Point, float]] = {}
    for rate in rates:
        if (rate.kind, rate.head_size, rate.deterministic) == (kind, head_size, deterministic):
            points = times.setdefault(rate.implementation, {})
            points[_Point(rate.tokens, rate.seen)] = rate.seconds
    return times


def against_causal(
    rates: Iterable[AttentionRate], implementation: str, *, head_size: int, seq_len: int, window: int | None
) -> float | None:
    """How many times as long as sdpa's causal attention of sequences of `seq_len` an implementation takes, in a window
    or without, in any order of sums; None: it was not measured at heads of this size."""
    of_size = [one for one in rates if one.head_size == head_size and not one.deterministic]
    plain = next((one for one in of_size if is_plain(one)), None)
    own = [one for one in of_size if one.implementation == implementation]
    if plain is None:
        return None
    if window is None:
        whole = next((one for one in own if one.kind == "causal"), None)
        return None if whole is None else whole.seconds / plain.seconds
    points = sorted((one.seen, one.seconds) for one in own if one.kind == "window")
    if not points:
        return None
    # a window costs by the token, causal attention by the token and the length
    return _between(points, window) / plain.seconds * plain.tokens / seq_len


def against_any_order(
    rates: Iterable[AttentionRate], implementation: str, *, kind: AttentionKind, head_size: int, seen: float
) -> float | None:
    """How many times as long as in any order of sums an implementation takes in one, both passes together. None: it was
    not measured in both at heads of this size."""
    rates = tuple(rates)
    seconds = {}
    for deterministic in (False, True):
        times = _times(rates, kind=kind, head_size=head_size, deterministic=deterministic)
        points = sorted((point.seen, taken) for point, taken in times.get(implementation, {}).items())
        if not points:
            return None
        seconds[deterministic] = _between(points, seen)
    return seconds[True] / seconds[False]


def one_order_as_on(another: Iterable[AttentionRate], own: Iterable[AttentionRate]) -> Iterator[AttentionRate]:
    """Rates in one order of sums of a GPU of which only those in any were measured: another one's, whose architecture
    and so whose kernels are the same, as many times as long as sdpa's causal attention takes here."""
    plain = {rate.head_size: rate.seconds for rate in own if is_plain(rate)}
    another = tuple(another)
    plain_there = {rate.head_size: rate.seconds for rate in another if is_plain(rate)}
    for rate in another:
        size = rate.head_size
        if rate.deterministic and size in plain and size in plain_there:
            yield rate.model_copy(update={"seconds": rate.seconds * plain[size] / plain_there[size]})


def is_plain(rate: AttentionRate) -> bool:
    """What others are compared with: whole sequences that hide nothing through sdpa, sums in any order."""
    return (rate.implementation, rate.kind, rate.deterministic) == ("sdpa", "causal", False)


def _between(points: list[tuple[int, float]], seen: float) -> float:
    """Seconds, linear in the logarithms; below the first point that of the first, above the last in proportion."""
    first, last = points[0], points[-1]
    if seen <= first[0]:
        return first[1]
    if seen >= last[0]:
        return last[1] * seen / last[0]
    right = next(i for i, point in enumerate(points) if point[0] > seen)
    (low, low_seconds), (high, high_seconds) = points[right - 1 : right + 1]
    share = log(seen / low) / log(high / low)
    return exp((1 - share) * log(low_seconds) + share * log(high_seconds))
