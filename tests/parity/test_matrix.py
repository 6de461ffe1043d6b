"""The matrix in README.md says what the cases are."""

from itertools import combinations
from typing import get_args

import pytest

from megaspec.core.axes import DENSE_AXES, EXPERT_AXES
from megaspec.recipe import Recipe
from tests.families import FAMILIES
from tests.parity.cases import Case
from tests.parity.matrix import README, matrix, with_matrix
from tests.parity.often import candidates, holds, often, touches
from tests.parity.rows import AXES, MORE

OFTEN = [case for case in candidates() if case in often()]
# of which a layout has one
DATA = ("dp", "zero1", "zero2", "fsdp", "hsdp")


def test_the_readme_holds_it() -> None:
    text = README.read_text()
    assert with_matrix(text) == text, "run `make matrix`"


@pytest.mark.parametrize("row", [*AXES, *MORE])
def test_no_row_is_empty(row: str) -> None:
    assert any((AXES | MORE)[row](case) for case in OFTEN), row


def test_what_all_cases_hold_those_hold_that_run_by_default() -> None:
    assert len(OFTEN) < len(candidates())
    assert set().union(*map(holds, OFTEN)) == set().union(*map(holds, candidates()))


def test_a_case_touches_the_bug_of_a_part_of_it() -> None:
    bug = Case(dp=2, ep=2, router="softmax", mask="uneven", optimizer="sgd")
    assert touches(Case(dp=4, ep=2, router="softmax", mask="empty_micro", tied=True), bug)
    assert not touches(Case(dp=2, ep=2, router="softmax"), bug)
    assert not touches(Case(dp=2, ep=2, router="sigmoid", mask="uneven"), bug)
    assert not touches(Case(dp=2, etp=2, router="softmax", mask="uneven"), bug)


def test_every_two_axes_meet() -> None:
    for (a, has_a), (b, has_b) in combinations(AXES.items(), 2):
        if not (a in DATA and b in DATA):
            assert any(has_a(case) and has_b(case) for case in OFTEN), f"{a} with {b}"


def test_four_axes_meet() -> None:
    assert any(case.tp > 1 and case.pp > 1 and case.cp > 1 and case.ep > 1 for case in OFTEN)


def kinds_of(section: str) -> set[str]:
    """The kinds that a section of a recipe can have."""
    classes = get_args(Recipe.model_fields[section].annotation)
    return {get_args(one.model_fields["kind"].annotation)[0] for one in classes}


def test_every_model_and_optimizer_is_compared() -> None:
    assert {case.family for case in OFTEN} == set(FAMILIES), "add it to the cases in sets.py, and a row in matrix.py"
    assert {case.optimizer for case in OFTEN} == kinds_of("optim"), (
        "add it to the cases in sets.py, and a row in matrix.py"
    )


def test_every_axis_has_a_row() -> None:
    # data parallel has a row for each strategy; edp is what is left of the others
    by_strategy = {"dp_replicate", "dp_shard", "edp"}
    assert {*DENSE_AXES, *EXPERT_AXES} - by_strategy <= set(AXES), "add it to AXES in matrix.py"


def test_a_case_is_counted_where_it_belongs() -> None:
    case = Case(tp=2, sequence=True, dp=2, strategy="zero1")
    assert [name for name, has in AXES.items() if has(case)] == ["tp", "sp", "zero1"]
    assert "| etp |" in matrix()
