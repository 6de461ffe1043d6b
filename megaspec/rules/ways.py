"""Ways out of a broken rule: the nearest values of a setting that mend it, each tried before it is suggested."""

from collections.abc import Sequence
from typing import NamedTuple

from megaspec.core.problems import one_of, show
from megaspec.rules.case import Case

# Values of one setting that are tried for each that is suggested.
_TRIED = 4


class Way(NamedTuple):
    """A setting, and values of it that would keep the rule that is broken."""

    key: str
    values: Sequence[object]
    near: float | None = None
    """The value that they should be close to; None: they stand in order of preference."""
    most: int = 6
    """How many are suggested."""


def way_out(case: Case, *ways: Way, key: str = "") -> str:
    """`try 1, 2 or 4, or model.d_ffn=336`: values that break no other rule, those of `key` (the first way's) bare.

    Where none is such a value, what keeps this rule at least, and that more has to change.
    """
    key = key or ways[0].key
    found = [(way.key, _mending(case, way)) for way in ways]
    words = [_words(name, values, key) for name, values in found if values]
    if words:
        return f"try {', or '.join(words)}"
    nearest = [_words(way.key, _ordered(way)[: way.most], key) for way in ways if way.values]
    if not nearest:
        return f"no value of {key} keeps the rule: set the others otherwise"
    return f"no one setting mends it: try {nearest[0]} along with others"


def mending(case: Case, way: Way) -> bool:
    """Whether some value of a way mends."""
    return bool(_mending(case, way))


def _mending(case: Case, way: Way) -> list[object]:
    found: list[object] = []
    for value in _ordered(way)[: _TRIED * way.most]:
        if len(found) < way.most and (case.mends is None or case.mends({way.key: value})):
            found.append(value)
    return found


def _ordered(way: Way) -> Sequence[object]:
    if way.near is None:
        # a range stays one: a wrong setting may make it a billion values long, of which a few are tried
        return way.values
    return sorted(way.values, key=lambda value: abs(value - way.near))


def _words(name: str, values: Sequence[object], key: str) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    shown = one_of([show(value) for value in (sorted(values) if numbers else values)])
    return shown if name == key else f"{name}={shown}"
