"""Few cases for many combinations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tests.parity.cases import Case

Factors = Mapping[str, tuple]
"""Field of a case -> its values."""
Legal = Callable[[Mapping[str, object]], bool]
"""False when a (possibly partial) choice of values can't be a case."""


def covering(factors: Factors, legal: Legal) -> list[dict[str, Any]]:
    """Few choices in which every legal pair of values of two factors occurs at least once.

    Greedy: each case starts from a pair that is still missing and takes, factor by factor, the value that completes
    most missing pairs.
    """
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in _pairs(list(factors))
        for x, y in product(factors[a], factors[b])
        if legal({a: x, b: y})
    }
    choices = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: sorted(map(repr, pair))))
        _complete(chosen, factors, legal, missing, turn=len(choices))
        missing -= _pairs_of(chosen)
        choices.append(chosen)
    return choices


def dressed(
    layouts: Sequence[Case],
    layout_of: Callable[[Case], Mapping[str, object]],
    factors: Factors,
    legal: Callable[[Case, Mapping[str, object]], bool],
) -> list[Case]:
    """Each layout once, with values of the factors such that pairs of them, and of them with what `layout_of` says of
    a layout, occur as far as there are layouts for them.

    `legal` is asked of the layout and a (possibly partial) choice.
    """
    seen: set[frozenset] = set()
    cases = []
    for number, layout in enumerate(layouts):
        fixed = set(layout_of(layout).items())
        chosen: dict[str, object] = {}
        for name in sorted(factors, key=lambda n: -len(factors[n])):
            possible = [v for v in _turned(factors[name], number) if legal(layout, chosen | {name: v})]
            gains = [
                sum(frozenset({(name, v), other}) not in seen for other in {*fixed, *chosen.items()}) for v in possible
            ]
            chosen[name] = possible[gains.index(max(gains))]
        seen |= {frozenset({a, b}) for a in chosen.items() for b in {*fixed, *chosen.items()} if a != b}
        cases.append(replace(layout, **chosen))
    return cases


def full_product(factors: Factors, rest: Sequence[Case]) -> list[Case]:
    """Every choice of `factors`; what they leave open goes through the cases of `rest`."""
    return [
        replace(rest[i % len(rest)], **dict(zip(factors, values, strict=True)))
        for i, values in enumerate(product(*factors.values()))
    ]


def _complete(chosen: dict, factors: Factors, legal: Legal, missing: set[frozenset], *, turn: int) -> None:
    for name in sorted((n for n in factors if n not in chosen), key=lambda n: -len(factors[n])):
        possible = [v for v in _turned(factors[name], turn) if legal(chosen | {name: v})]
        gains = [sum(frozenset({(name, v), other}) in missing for other in chosen.items()) for v in possible]
        chosen[name] = possible[gains.index(max(gains))]


def _turned(values: tuple, turn: int) -> tuple:
    """Ties go to another value each time."""
    return values[turn % len(values) :] + values[: turn % len(values)]


def _pairs(names: list[str]) -> list[tuple[str, str]]:
    return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]


def _pairs_of(chosen: Mapping[str, object]) -> set[frozenset]:
    return {frozenset({a, b}) for a in chosen.items() for b in chosen.items() if a != b}
