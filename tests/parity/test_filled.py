"""New memory holds NaN, and layouts compute what one rank does: it is written before it is read.

With train.deterministic torch would fill it; `_set_determinism` in runtime/build.py relies on this and has it not. The
same over NCCL is in tests/gpu/test_filled_nccl.py.
"""

from collections.abc import Iterator

import pytest

from megaspec.verify.parity import TOLERANCES, compare
from tests.conftest import Tell
from tests.parity.cases import Case
from tests.parity.checks import check
from tests.parity.tasks import run_case, truth_of
from tests.ranks import RankPool
from tests.source_patch import Patch
from tests.source_patch import check as check_patch

# Only a mode that warns fills without refusing what has no deterministic form.
FILLED = Patch(
    "megaspec.runtime.build",
    "    torch.use_deterministic_algorithms(spec.train.deterministic)\n",
    "    torch.use_deterministic_algorithms(True, warn_only=True)\n"
    "    assert torch.utils.deterministic.fill_uninitialized_memory\n",
)
CASES = [
    Case(tp=2, pp=2, sequence=True, schedule="zb_h1", n_layers=4, accumulate=4, mask="uneven", kv_heads=2),
    Case(dp=2, strategy="fsdp", accumulate=3, mask="empty_rank", tied=True, pad=8),
    Case(cp=2, dp=2, strategy="zero2", documents=True, mask="uneven", options="sinks"),
    Case(cp=2, context="all_gather", family="gpt", mask="uneven"),
    Case(dp=2, ep=2, router="softmax", drop="padded", strategy="zero1", mask="uneven"),
    Case(tp=2, etp=2, sequence=True, router="sigmoid", dispatch="all_gather", drop="position", accumulate=2),
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, mask="uneven"),
    Case(tp=2, ep=2, sequence=True, router="softmax", precision="fp8 rowwise", accumulate=2),
]
# What blocks add to begins with what it finds.
BUG = Patch(
    "megaspec.parallelism.context",
    "d_q = torch.zeros_like(q_BTNH, dtype=lse_BNT.dtype)",
    "d_q = torch.empty_like(q_BTNH, dtype=lse_BNT.dtype)",
)


@pytest.fixture(scope="module")
def filled() -> Iterator[RankPool]:
    check_patch(FILLED)
    with RankPool(patches=(FILLED,)) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_equal_one_rank(filled: RankPool, case: Case, tell: Tell) -> None:
    check(filled, case, tell, steps=2)


def test_what_is_read_before_it_is_written_is_caught() -> None:
    case = Case(cp=2, context="all_gather", mask="uneven")
    check_patch(BUG)
    with RankPool(patches=(FILLED, BUG)) as ranks:
        findings = compare(run_case(ranks, case, steps=2), truth_of(case, steps=2), TOLERANCES["fp64"])
    assert not all(finding.passed for finding in findings)
