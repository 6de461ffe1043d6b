"""New memory of GPUs holds NaN, and layouts compute what one GPU does: see tests/parity/test_filled.py."""

from collections.abc import Iterator

import pytest
import torch

from tests.conftest import Tell
from tests.parity.cases import Case
from tests.parity.checks import check
from tests.parity.test_filled import FILLED
from tests.ranks import RankPool
from tests.source_patch import check as check_patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

CASES = [
    Case(tp=2, sequence=True, accumulate=3, mask="uneven", kv_heads=2, pad=8),
    Case(dp=2, strategy="fsdp", accumulate=3, mask="empty_rank", tied=True),
    Case(pp=2, schedule="zb_v", virtual=2, n_layers=4, accumulate=4, mask="uneven"),
    Case(cp=2, documents=True, mask="uneven", options="sinks"),
    Case(dp=2, ep=2, router="softmax", drop="padded", strategy="zero1", mask="uneven"),
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, mask="uneven"),
]


@pytest.fixture(scope="module")
def filled() -> Iterator[RankPool]:
    check_patch(FILLED)
    with RankPool(device="cuda", timeout=300, patches=(FILLED,)) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_equal_one_gpu(filled: RankPool, case: Case, tell: Tell) -> None:
    check(filled, case, tell, steps=2, device="cuda")
