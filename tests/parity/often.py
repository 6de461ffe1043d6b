"""Which cases of the sets in sets.py run by default: few that hold together what all of them hold.

The others are marked slow. What has to stay is said by `holds`: no cell of the matrix becomes empty, no three or four
axes together, no way of an axis beside a way of another one, no value of a feature, and no planted bug whose case they
touch.
"""

from collections.abc import Hashable
from dataclasses import fields
from functools import cache
from itertools import combinations

from tests.parity.bugs import BUGS
from tests.parity.cases import Case
from tests.parity.rows import AXES, MORE, is_alone
from tests.parity.sets import DEFAULT, cases_of, names_of

ONE_RANK = Case()
DEGREES = ("tp", "dp", "pp", "cp", "ep", "etp")
OF_ATTENTION = ("packed documents", "grouped key/value heads", "dropout", "attention sinks", "capped scores")
AS_IT_COMES = ("optimizer", "n_layers", "attention", "virtual")
"""Fields in which a case may differ from a planted bug's."""


def candidates() -> list[Case]:
    """The cases of all sets that are no slow ones."""
    return list(dict.fromkeys(case for name in DEFAULT for case in cases_of(name)))


@cache
def often() -> frozenset[Case]:
    """The cases that run by default: long ones, then one after the other that which adds most for its ranks."""
    held = {case: holds(case) for case in candidates()}
    chosen = set(cases_of("long"))
    missing = set().union(*held.values()).difference(*(held[case] for case in chosen))
    while missing:
        best = max(held, key=lambda case: len(held[case] & missing) / (1 + case.ranks))
        missing -= held[best]
        chosen.add(best)
    return frozenset(chosen)


def holds(case: Case) -> set[Hashable]:
    """What is lost unless this case runs, or another one that holds the same."""
    axes = [name for name, has in AXES.items() if has(case)]
    rows = [name for name, has in MORE.items() if has(case)]
    found: set[Hashable] = {("alone", axis) for axis in axes if is_alone(case)}
    found |= {(row, axis) for row in (*axes, *rows) for axis in axes}
    found |= {*combinations(axes, 3), *combinations(axes, 4)}
    ways = sorted(_ways(case).items())
    found |= {*ways, *combinations(ways, 2)}
    # how attention goes over the parts of a sequence
    found |= {(way, row) for way in ways if way[0] == "context" for row in rows if row in OF_ATTENTION}
    found |= _differences(case).items()
    found |= {("bug", bug.name) for bug in BUGS if touches(case, bug.case)}
    return found


def touches(case: Case, of_bug: Case) -> bool:
    """Whether a case has all that a planted bug's case has: what it divides over how many ranks, and what it sets."""
    for name, value in _differences(of_bug).items():
        found = getattr(case, name)
        if name in DEGREES:
            fits = found >= value
        elif name in ("accumulate", "mask"):
            fits = found != getattr(ONE_RANK, name)
        else:
            fits = found == value or name in AS_IT_COMES
        if not fits:
            return False
    return True


def _ways(case: Case) -> dict[str, Hashable]:
    """The way of each axis that a case divides, with what changes how a pipeline or the context goes."""
    trivial = names_of(ONE_RANK)
    ways = {name: way for name, way in names_of(case).items() if way != trivial[name] and name != "also"}
    if case.pp == 1:
        ways.pop("pipeline", None)
    if case.cp == 1:
        ways.pop("context", None)
    if case.ep * case.etp == 1:
        ways.pop("experts", None)
    return ways


@cache
def _differences(case: Case) -> dict[str, Hashable]:
    """The fields of a case that are not those of a plain model on one rank."""
    found = {field.name: getattr(case, field.name) for field in fields(case)}
    return {name: value for name, value in found.items() if value != getattr(ONE_RANK, name)}
