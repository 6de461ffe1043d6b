"""The parity harness is only as good as the bugs that it catches: each of these is one line of shipped source."""

import pytest

from megaspec.verify.parity import TOLERANCES, compare
from tests.conftest import Tell
from tests.halved import halved
from tests.parity.bugs import BUGS, FP8, LOADED, Bug
from tests.parity.cases import Case
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool
from tests.source_patch import check

STEPS = 2
MARGIN = 100.0


@pytest.mark.parametrize("bug", halved(BUGS), ids=str)
def test_caught(bug: Bug, tell: Tell) -> None:
    check(bug.patch)
    truth = truth_of(bug.case, steps=STEPS)
    with RankPool(patches=(bug.patch,)) as ranks:
        findings = compare(run_case(ranks, bug.case, steps=STEPS), truth, TOLERANCES["fp64"])
    fired = [f for f in findings if not f.passed and f.tolerance]
    assert fired, f"not caught: {findings[0]}"
    tell(f"{bug}: {fired[0]}, margin {fired[0].margin:.0e}")
    assert fired[0].margin >= MARGIN
    first_loss = next(f for f in findings if f.what == "loss at step 1")
    assert first_loss.passed == bug.invisible, f"{first_loss}"


def test_every_bug_is_a_line_that_is_there() -> None:
    for bug in (*BUGS, *FP8, *LOADED):
        check(bug.patch)


@pytest.mark.parametrize("case", halved(sorted({b.case for b in BUGS}, key=str)), ids=str)
def test_the_same_cases_pass_without_the_bug(pool: RankPool, case: Case) -> None:
    findings = compare(run_case(pool, case, steps=STEPS), truth_of(case, steps=STEPS), TOLERANCES["fp64"])
    assert all(f.passed for f in findings), findings[0]


def test_at_least_two_are_invisible_to_the_first_loss() -> None:
    assert sum(b.invisible for b in BUGS) >= 2
