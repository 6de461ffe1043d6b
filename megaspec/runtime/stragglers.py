"""Which rank is slow, from how long each takes by itself: pure arithmetic on a table of seconds.

Note "By itself". While one rank is late the others wait for it in the next collective, so the whole step takes as long
on each and says nothing. What is compared here is each rank's time outside of collectives.

Note "Robust". A value is the median over the steps of a window, so that a single late step counts nothing; it is held
against the median over ranks (the lower of the middle two: of two ranks one can be slow). A rank is named when it is
behind in PERSISTENT of the last OF_LAST windows by more than a share of the whole step, by more than milliseconds, and
by more than what windows of the other ranks differ among themselves.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER, SAVE, DEVICE = PHASES = (
    "data",
    "forward",
    "backward",
    "reduce_gradients",
    "optimizer",
    "save",
    "device",
)
"""Of a step. `data`: the host waits for the batch. `save`: of a checkpoint, of the windows that had one. `device`: a
product of matrices that is the same on every GPU; it tells a slow GPU from a slow program."""
WINDOW = 10
"""Steps."""
OF_LAST = 4
"""Windows that are looked back at. With the one in which a rank becomes slow that makes 50 steps at most."""
PERSISTENT = 3
"""So many of them have to agree: one may be disturbed by others."""
LEAST_SHARE = 0.11
"""Of a step: less is not worth a word."""
LEAST_SECONDS = 0.003
"""Less is the operating system's."""
_NOISES = 4.0
"""How many times what the others differ among themselves."""
_SIGMA = 3.14
"""From the lower quartile of absolute deviations to the standard deviation of a normal distribution."""
_HISTORY = 20
"""Windows of which the noise is known."""
_FIRST_WINDOWS = 8
"""By which a rank that does what no other does is measured later."""


@dataclass(frozen=True)
class Slow:
    """A rank that is behind the others."""

    rank: int
    phase: str
    """In which it loses most."""
    seconds: float
    """That it loses in a step, in all phases together, or in a save."""
    usual_seconds: float
    """What that phase takes on the others."""
    share: float
    """`seconds` over what the whole step, or the save, should take."""


@dataclass
class _Series:
    """A kind of time that ranks are compared in: what a step takes in all, a save, the device's product."""

    name: str
    phases: tuple[str, ...]
    least_share: float
    """Of what it should take: less is not worth a word."""
    least_seconds: float
    """Less is the operating system's."""
    behind: dict[int, deque[float]] = field(default_factory=dict)
    """By rank: by how much it was, in the last windows; 0 where it was not."""
    named: set[int] = field(default_factory=set)
    noise: dict[int, deque[float]] = field(default_factory=dict)
    """By group: what its windows differed by, newest last."""
    past: dict[int, list[float]] = field(default_factory=dict)
    """By rank: its first windows."""


STEP = (DATA, FORWARD, BACKWARD, REDUCE, OPTIMIZER)


class Stragglers:
    """Takes a table a window, and names who is slow: once, and again when it was as fast as the others meanwhile.

    `groups`: ranks that do the same work, such as those of a pipeline stage. A rank that is alone in its group is held
    against its own first windows, and against how the others have changed since theirs.
    """

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._groups = [list(group) for group in groups]
        self._series = (
            _Series("step", STEP, LEAST_SHARE, LEAST_SECONDS),
            # disks differ from save to save
            _Series(SAVE, (SAVE,), 0.5, 0.5),
            # GPUs of one kind differ by some percent under the same limit of power
            _Series(DEVICE, (DEVICE,), 0.15, 0.0),
        )

    def add(self, table: Sequence[Mapping[str, float]]) -> list[Slow]:
        """`table`: by rank, seconds of each of PHASES, the median over a window. A phase that a window did not have is
        missing."""
        if len(table) < 2:
            return []
        found: dict[int, Slow] = {}
        for series in self._series:
            values = [_sum(row, series.phases) for row in table]
            if any(value is None for value in values):
                continue
            for number, group in enumerate(self._groups):
                for slow in self._of_group(series, number, group, values, table):
                    found.setdefault(slow.rank, slow)
        return list(found.values())

    def _of_group(
        self,
        series: _Series,
        number: int,
        group: Sequence[int],
        values: Sequence[float],
        table: Sequence[Mapping[str, float]],
    ) -> list[Slow]:
        expected = self._expected(series, group, values)
        if expected is None:
            return []
        excess = [values[rank] - expected for rank in group]
        least = max(series.least_seconds, series.least_share * expected)
        scale = _scale(series, number, group, excess, least=least)
        found = []
        for rank, behind in zip(group, excess, strict=True):
            windows = series.behind.setdefault(rank, deque(maxlen=OF_LAST))
            windows.append(behind if behind > max(least, _NOISES * scale) else 0.0)
            lost = [one for one in windows if one > 0]
            if not lost:
                series.named.discard(rank)
            if windows[-1] and len(lost) >= PERSISTENT and rank not in series.named:
                series.named.add(rank)
                phase, usual = _worst(series.phases, rank, group, table)
                found.append(Slow(rank, phase, median(lost), usual, median(lost) / expected))
        return found

    def _expected(self, series: _Series, group: Sequence[int], values: Sequence[float]) -> float | None:
        """What a rank of a group should take; None while that is not known."""
        if len(group) > 1:
            return median_low(values[rank] for rank in group)
        changes = []
        for rank, value in enumerate(values):
            past = series.past.setdefault(rank, [])
            if len(past) < _FIRST_WINDOWS:
                past.append(value)
            if min(past) > 0:
                changes.append(value / median_low(past))
        (alone,) = group
        if len(series.past[alone]) < _FIRST_WINDOWS or len(changes) < len(values):
            return None
        return median_low(series.past[alone]) * median_low(changes)


def _sum(row: Mapping[str, float], phases: Sequence[str]) -> float | None:
    """None: the window did not have one of them."""
    if any(phase not in row for phase in phases):
        return None
    return sum(row[phase] for phase in phases)


def _scale(series: _Series, number: int, group: Sequence[int], excess: Sequence[float], *, least: float) -> float:
    """What ranks of a group usually differ by, over the windows up to this one.

    Of four ranks or more up to half may be slow and not move the lower quartile. Of two or three who is slow would be
    the noise that hides it: there, only windows in which nobody was behind count.
    """
    history = series.noise.setdefault(number, deque(maxlen=_HISTORY))
    known = median(history) if history else 0.0
    spreads = sorted(abs(one) for one in excess)
    if len(group) > 3:
        history.append(_SIGMA * spreads[len(spreads) // 4])
    elif not any(any(series.behind.get(rank, ())) for rank in group) and spreads[-1] < 2 * _NOISES * known + least:
        # the largest of few says already more than a standard deviation
        history.append(spreads[-1] / 2)
    return median(history) if history else 0.0


def _worst(
    phases: Sequence[str], rank: int, group: Sequence[int], table: Sequence[Mapping[str, float]]
) -> tuple[str, float]:
    """The phase in which a rank loses most, and what that takes on the others."""
    others = [one for one in group if one != rank] or [one for one in range(len(table)) if one != rank]
    worst = phases[0]
    usual = 0.0
    lost = float("-inf")
    for phase in phases:
        of_others = median_low(table[one][phase] for one in others)
        if table[rank][phase] - of_others > lost:
            worst = phase
            usual = of_others
            lost = table[rank][phase] - of_others
    return worst, usual
