"""Which rank is slow, from how long each takes by itself: pure arithmetic on a table of seconds.

Note "By itself". While one rank is late the others wait for it in the next collective, so the whole step takes as long
on each and says nothing. What is compared here is each rank's time outside of collectives.

Note "Steady time". What a step takes a rank when nothing disturbs it: of its last LOOK_BACK steps the one that a share
STEADY_AT of them are below. A neighbour that takes a core, or a pause, has to disturb nearly all of those steps to move
it, while a slow rank is slow in all of them. With a look every WINDOW steps a slow rank is seen within
LOOK_BACK + WINDOW = 50 steps wherever it begins.

Note "By chance". A rank is named when its steady time is above the group's (the median over ranks, the lower of the
middle two: of two ranks one can be slow) by a share that is worth a word, by milliseconds, and by so many standard
errors that noise reaches them in one of FALSE_RUNS runs of RUN_STEPS steps, all ranks and looks counted: the more
ranks, the more errors it takes (Bonferroni's bound, normal quantiles). The standard error is the larger of what ranks
differ by among themselves (a robust spread, where there are enough of them) and of what the rank's own steps say:
order statistics around a quantile tell its error whatever their distribution (Woodruff, 1952).

What is measured once a window, saves and the product of a device, is compared by window: a rank is named when it is
behind in PERSISTENT of the last OF_LAST.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, sqrt
from statistics import NormalDist, fmean, median, median_low

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
STEADY, NOISE = "steady", "noise"
"""Of a row, beside PHASES: a rank's steady time, see the note, and the standard error of it, both in seconds."""
WINDOW = 10
"""Steps between two looks."""
LOOK_BACK = 40
"""Steps that a steady time is taken over."""
STEADY_AT = 0.15
"""The share of them that lies below it. Lower, single steps decide; higher, bursts of fewer steps do."""
OF_LAST = 4
"""Windows that are looked back at."""
PERSISTENT = 3
"""So many of them have to agree, of what is measured once a window: one may be disturbed by others."""
LEAST_SHARE = 0.14
"""Of a step: less is not worth a word. A rank that is a fifth slower stays above it under noise of some percent."""
LEAST_SECONDS = 0.003
"""Less is the operating system's."""
FALSE_RUNS = 0.01
RUN_STEPS = 1000
"""Of so many runs of so many steps one may have a false name, were noise normal."""
_NOISES = 4.0
"""Few ranks of which one is behind by so many times what they usually differ by say nothing of what they differ by."""
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

    value: str
    """The entry of a row that ranks are compared by."""
    phases: tuple[str, ...]
    """Of which one is named."""
    persistent: int
    """Windows of the last OF_LAST that have to agree."""
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
            # it is taken over OF_LAST windows already
            _Series(STEADY, STEP, 1, LEAST_SHARE, LEAST_SECONDS),
            # disks differ from save to save
            _Series(SAVE, (SAVE,), PERSISTENT, 0.5, 0.5),
            # GPUs of one kind differ by some percent under the same limit of power
            _Series(DEVICE, (DEVICE,), PERSISTENT, 0.15, 0.0),
        )
        self._noise: dict[int, deque[float]] = {}
        """By rank, newest last."""
        looks = sum(len(group) for group in self._groups) * RUN_STEPS / WINDOW
        self._errors = NormalDist().inv_cdf(1 - FALSE_RUNS / looks)
        """Standard errors that are not reached by chance."""

    def add(self, table: Sequence[Mapping[str, float]]) -> list[Slow]:
        """`table`: by rank, seconds of each of PHASES, the median over a window, and what `steady_time` says. What a
        window did not have is missing."""
        if len(table) < 2:
            return []
        found: dict[int, Slow] = {}
        for series in self._series:
            if any(series.value not in row for row in table):
                continue
            values = [row[series.value] for row in table]
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
        errors = [0.0] * len(group)
        if series.value == STEADY:
            errors = self._own_errors(group, table)
        found = []
        for rank, behind, error in zip(group, excess, errors, strict=True):
            windows = series.behind.setdefault(rank, deque(maxlen=OF_LAST))
            windows.append(behind if behind > max(least, self._errors * max(scale, error)) else 0.0)
            lost = [one for one in windows if one > 0]
            if not lost:
                series.named.discard(rank)
            if windows[-1] and len(lost) >= series.persistent and rank not in series.named:
                series.named.add(rank)
                phase, usual = _worst(series.phases, rank, group, table)
                found.append(Slow(rank, phase, median(lost), usual, median(lost) / expected))
        return found

    def _own_errors(self, group: Sequence[int], table: Sequence[Mapping[str, float]]) -> list[float]:
        """Standard errors of how far each rank of a group is behind, by what its own steps and the others' say."""
        usual = []
        for rank in group:
            history = self._noise.setdefault(rank, deque(maxlen=_HISTORY))
            history.append(table[rank][NOISE])
            usual.append(fmean(history))
        return [hypot(one, median_low(usual)) for one in usual]

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


def steady_time(steps: Sequence[float]) -> dict[str, float]:
    """STEADY and NOISE of a rank's last LOOK_BACK steps, in seconds each; empty where there were fewer."""
    if len(steps) < LOOK_BACK:
        return {}
    ordered = sorted(steps[-LOOK_BACK:])
    at = round(STEADY_AT * LOOK_BACK) - 1
    # how many steps lie below a quantile is binomial: its standard deviation, in steps
    deviation = sqrt(LOOK_BACK * STEADY_AT * (1 - STEADY_AT))
    # what that is in seconds is read two of them to either side: nearer ones differ too much by chance
    beside = int(2 * deviation)
    seconds_a_step = (ordered[at + beside] - ordered[at - beside]) / (2 * beside)
    return {STEADY: ordered[at], NOISE: deviation * seconds_a_step}


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
