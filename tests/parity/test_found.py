"""Layouts that were once wrong."""

import pytest

from tests.conftest import Tell
from tests.parity.cases import Case
from tests.parity.checks import check
from tests.ranks import RankPool

DEEP = {"pp": 2, "dp": 2, "ep": 2, "n_layers": 4, "mask": "uneven", "accumulate": 3}


@pytest.mark.parametrize(
    "case",
    [
        # a bucket of nothing but weight gradients that are deferred lost its memory between two of them
        Case(strategy="fsdp", schedule="zb_h1", router="softmax", **DEEP),
        Case(strategy="zero2", schedule="zb_v", virtual=2, router="sigmoid", **DEEP),
        # widths with so little in common that they lie in buffers of their own (parallelism/flat.py)
        Case(strategy="fsdp", dp=4, d_model=37, d_head=10, mask="uneven"),
        Case(strategy="zero2", dp=2, tp=2, d_model=37, d_head=10, mask="uneven", accumulate=2),
    ],
    ids=str,
)
def test_equals_one_rank(pool: RankPool, case: Case, tell: Tell) -> None:
    check(pool, case, tell, steps=3)
