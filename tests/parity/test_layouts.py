"""Every layout trains the model that one rank trains."""

import math
from dataclasses import replace

import pytest
import torch

from tests.conftest import Tell
from tests.parity.cases import SEQUENCES, TOKENS, VOCAB, Case, alone
from tests.parity.checks import check, check_low
from tests.parity.often import candidates, often
from tests.parity.sets import cases_of
from tests.parity.tasks import logits, run_case, truth_of
from tests.ranks import RankPool

STEPS, SLOW_STEPS, LONG_STEPS = 2, 3, 20
# GPT-2 goes with plain descent here: its key bias has no gradient in exact arithmetic (softmax does not see it), and
# AdamW turns fp32's rounding noise in its place into steps of the size of the learning rate.
_LOWER = [
    Case(dp=2, accumulate=3, mask="uneven", optimizer="sgd"),
    Case(tp=2, sequence=True, mask="uneven", kv_heads=2),
    Case(tp=4, sequence=True, accumulate=3, mask="uneven", kv_heads=2, tied=True, pad=8, documents=True),
    Case(tp=2, dp=2, mask="empty_rank", family="gpt", tied=True, optimizer="sgd"),
]
LOWER = [*_LOWER[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in _LOWER[2:])]


def _by_default() -> list:
    """The cases of the sets that are no slow ones, those marked slow that often.py does not choose."""
    marked = []
    for case in candidates():
        if case not in cases_of("long"):
            marked.append(pytest.param(case, marks=[] if case in often() else pytest.mark.slow))
    return marked


@pytest.mark.parametrize("case", _by_default(), ids=str)
def test_steps_equal_those_of_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=STEPS)


_LONG = [*cases_of("long"), *(pytest.param(case, marks=pytest.mark.slow) for case in cases_of("long too"))]


@pytest.mark.parametrize("case", _LONG, ids=str)
def test_twenty_steps_equal_those_of_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=LONG_STEPS)


@pytest.mark.parametrize("case", LOWER, ids=str)
def test_fp32_equals_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, replace(case, precision="fp32"), tell, steps=LONG_STEPS)


@pytest.mark.parametrize("case", LOWER, ids=str)
def test_bf16_is_as_close_to_the_truth_as_one_rank_in_bf16(pool: RankPool, case: Case, tell: Tell) -> None:
    check_low(pool, case, tell)


def test_fp16_with_a_loss_scale_too(pool: RankPool, tell: Tell) -> None:
    case = Case(tp=2, sequence=True, accumulate=3, mask="uneven", kv_heads=1, optimizer="sgd", scale=256.0)
    check_low(pool, case, tell, precision="fp16")


def test_a_gradient_that_overflows_moves_nothing_on_any_rank(pool: RankPool) -> None:
    case = Case(tp=2, dp=2, mask="uneven", precision="fp16", scale=2.0**40)
    run = run_case(pool, case, steps=2)
    assert not any(math.isfinite(n) for n in run.norms)
    still = truth_of(replace(case, lr=1e-30), steps=1)
    for name, weight in still.weights.values.items():
        assert torch.equal(run.weights.values[name], weight), name


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, sequence=True, documents=True),
        Case(tp=4, pad=64, tied=True, family="gpt"),
        Case(tp=2, dp=2, sequence=True, pad=8, kv_heads=1),
    ],
    ids=str,
)
def test_every_rank_sees_the_whole_logits(pool: RankPool, case: Case) -> None:
    expected = logits(0, alone(case))
    assert expected.shape == (SEQUENCES, TOKENS, VOCAB)
    for found in pool.run(logits, case, ranks=case.ranks):
        assert found.shape == expected.shape
        assert abs(found - expected).max() <= 1e-12 * abs(expected).max()


WHOLE = (
    "second of two", "both pairs", "both triples", "all frozen", "all layers", "all pairs", "all triples",
    "hierarchies", "all schedules", "all contexts", "all dispatches",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", dict.fromkeys(case for name in WHOLE for case in cases_of(name)), ids=str)
def test_whole_sets(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=SLOW_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of("product"), ids=str)
def test_the_full_product_at_step_1(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=1)
