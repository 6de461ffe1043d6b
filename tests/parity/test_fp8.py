"""Products in fp8 on many ranks are those of one rank: the same scales, the same numbers on the grid.

Everything but the grid is fp64, so what differs in the last bits rounds to the same numbers. One rank takes the micro
batches of all ranks one after the other, since each has scales of its own.
"""

from dataclasses import replace

import pytest

from megaspec.verify.parity import TOLERANCES, compare
from tests.conftest import Tell
from tests.parity.bugs import FP8, Bug
from tests.parity.cases import Case, alone
from tests.parity.checks import check
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool
from tests.source_patch import check as check_patch

RECIPES = ("tensorwise", "delayed", "rowwise")
LAYOUTS = [
    Case(tp=2, mask="uneven", accumulate=2),
    Case(tp=2, sequence=True, mask="uneven", kv_heads=2, accumulate=2),
    Case(dp=2, accumulate=2, mask="uneven"),
    Case(dp=2, strategy="fsdp", accumulate=2, mask="uneven"),
    Case(pp=2, schedule="zb_h1", accumulate=3, mask="uneven"),
]
OTHERS = [
    Case(tp=4, sequence=True, precision="fp8 tensorwise", family="gpt", tied=True, accumulate=2),
    Case(tp=2, dp=2, sequence=True, strategy="fsdp", precision="fp8 rowwise", accumulate=3, documents=True),
    Case(dp=2, strategy="zero1", precision="fp8 delayed", accumulate=2),
    Case(dp=2, strategy="zero2", precision="fp8 tensorwise", accumulate=3, optimizer="sgd"),
    Case(tp=2, pp=2, schedule="zb_v", virtual=2, n_layers=4, precision="fp8 delayed", accumulate=4),
    Case(pp=2, schedule="interleaved", virtual=2, n_layers=4, precision="fp8 rowwise", accumulate=2),
    Case(dp=2, precision="fp8 delayed", n_layers=4, trainable="upper"),
    Case(tp=2, precision="fp8 blockwise", wide=True, accumulate=2),
    Case(tp=2, sequence=True, precision="fp8 blockwise", wide=True, accumulate=2),
    Case(dp=2, strategy="fsdp", precision="fp8 blockwise", wide=True, accumulate=2),
    Case(dp=2, strategy="fsdp", precision="fp8 delayed", also=(("parallelism.recompute", {"kind": "full"}),)),
    Case(tp=2, sequence=True, precision="fp8 tensorwise", also=(("parallelism.recompute.kind", "selective"),)),
]
STEPS = 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_rank(pool: RankPool, layout: Case, recipe: str, tell: Tell) -> None:
    check(pool, replace(layout, precision=f"fp8 {recipe}"), tell, steps=STEPS)


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_layouts_together_equal_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=STEPS)


def test_the_grid_is_felt() -> None:
    """What is compared here would not be the same without fp8."""
    wide = truth_of(Case(accumulate=2), steps=1)
    for recipe in (*RECIPES, "blockwise"):
        found = truth_of(Case(precision=f"fp8 {recipe}", accumulate=2), steps=1)
        error = abs(found.norms[0] - wide.norms[0]) / wide.norms[0]
        assert 1e-4 < error < 0.2, (recipe, error)


def test_micro_batches_have_scales_of_their_own() -> None:
    one = truth_of(Case(precision="fp8 tensorwise"), steps=1)
    four = truth_of(Case(precision="fp8 tensorwise", accumulate=4), steps=1)
    assert alone(Case(dp=4, precision="fp8 tensorwise")).accumulate == 4
    assert one.norms[0] != four.norms[0]
    assert abs(one.norms[0] - four.norms[0]) < 0.1 * one.norms[0]


@pytest.mark.parametrize("bug", FP8, ids=str)
def test_planted_bugs_are_caught(bug: Bug, tell: Tell) -> None:
    check_patch(bug.patch)
    truth = truth_of(bug.case, steps=STEPS)
    with RankPool(patches=(bug.patch,)) as ranks:
        findings = compare(run_case(ranks, bug.case, steps=STEPS), truth, TOLERANCES["fp64"])
    fired = [f for f in findings if not f.passed and f.tolerance]
    assert fired, f"not caught: {findings[0]}"
    tell(f"{bug}: {fired[0]}, margin {fired[0].margin:.0e}")
    assert fired[0].margin >= 100
