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
    suggestions = []
    for way in ways:
        values = _mending(case, way)
        if values:
            suggestions.append(_words(way.key, values, key))
    if suggestions:
        return f"try {', or '.join(suggestions)}"
    for way in ways:
        if way.values:
            nearest = _words(way.key, _ordered(way)[: way.most], key)
            return f"no one setting mends it: try {nearest} along with others"
    return f"no value of {key} keeps the rule: set the others otherwise"


def mending(case: Case, way: Way) -> bool:
    """Whether some value of a way mends."""
    return bool(_mending(case, way))


def _mending(case: Case, way: Way) -> list[object]:
    """The nearest values of a way that break no rule; all of them where nobody can try them."""
    found: list[object] = []
    for value in _ordered(way)[: _TRIED * way.most]:
        # a try runs all rules: none is made once there are enough
        if len(found) < way.most and (case.mends is None or case.mends({way.key: value})):
            found.append(value)
    return found


def _ordered(way: Way) -> Sequence[object]:
    if way.near is None:
        # a range stays one: a wrong setting may make it a billion values long, of which a few are tried
        return way.values
    return sorted(way.values, key=lambda value: abs(value - way.near))


def _words(name: str, values: Sequence[object], key: str) -> str:
    """`1, 2 or 4`, with the setting's name before it unless that is `key`; numbers rise."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        values = sorted(values)
    shown = one_of([show(value) for value in values])
    if name == key:
        return shown
    return f"{name}={shown}"
