"""The matrix in README.md says what the cases are."""

from itertools import combinations

import pytest

from tests.parity.cases import Case
from tests.parity.matrix import AXES, MORE, README, matrix, with_matrix
from tests.parity.sets import DEFAULT, cases_of

OFTEN = [case for name in DEFAULT for case in cases_of(name)]
# of which a layout has one
DATA = ("dp", "zero1", "zero2", "fsdp", "hsdp")


def test_the_readme_holds_it() -> None:
    text = README.read_text()
    assert with_matrix(text) == text, "run `make matrix`"


@pytest.mark.parametrize("row", [*AXES, *MORE])
def test_no_row_is_empty(row: str) -> None:
    assert any((AXES | MORE)[row](case) for case in OFTEN), row


def test_every_two_axes_meet() -> None:
    for (a, has_a), (b, has_b) in combinations(AXES.items(), 2):
        if not (a in DATA and b in DATA):
            assert any(has_a(case) and has_b(case) for case in OFTEN), f"{a} with {b}"


def test_four_axes_meet() -> None:
    assert any(case.tp > 1 and case.pp > 1 and case.cp > 1 and case.ep > 1 for case in OFTEN)


def test_a_case_is_counted_where_it_belongs() -> None:
    case = Case(tp=2, sequence=True, dp=2, strategy="zero1")
    assert [name for name, has in AXES.items() if has(case)] == ["tp", "sp", "zero1"]
    assert "| etp |" in matrix()
