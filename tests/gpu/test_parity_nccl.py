"""Layouts over NCCL against one GPU: the harness of tests/parity on two devices."""

import pytest
import torch

from tests.conftest import Tell
from tests.parity.cases import Case
from tests.parity.checks import check, check_low
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

CASES = [
    Case(tp=2, mask="uneven", kv_heads=2, family="llama"),
    Case(tp=2, sequence=True, accumulate=3, mask="uneven", kv_heads=1, pad=8, tied=True),
    Case(tp=2, sequence=True, mask="uneven", family="gpt", documents=True, tied=True, optimizer="sgd"),
    Case(dp=2, accumulate=3, mask="empty_rank", kv_heads=2),
    Case(dp=2, mask="uneven", family="gpt", dropout=True, attention="reference", optimizer="sgd"),
]
# Sizes that the fused kernels take.
FUSED = [
    Case(tp=2, sequence=True, mask="uneven", kv_heads=2, d_head=64, cross_entropy="triton"),
    Case(tp=2, sequence=True, mask="uneven", kv_heads=2, d_head=64, cross_entropy="triton", compile="block"),
    Case(dp=2, accumulate=3, mask="uneven", kv_heads=2, d_head=64, cross_entropy="triton", compile="block"),
]

# Tokens that are gathered in fp8, by one scale and with scales of their own.
IN_FP8 = [
    Case(tp=2, sequence=True, precision="fp8 tensorwise", accumulate=2, mask="uneven"),
    Case(tp=2, sequence=True, precision="fp8 delayed", accumulate=2, compile="block"),
    Case(tp=2, sequence=True, precision="fp8 rowwise", accumulate=2, family="gpt"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_equals_one_gpu(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    check(gpu_pool, case, tell, steps=20, device="cuda")


@pytest.mark.parametrize("case", [c for c in CASES if c.optimizer == "sgd" or c.family == "llama"] + FUSED, ids=str)
def test_bf16_is_as_close_to_the_truth_as_one_gpu(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    check_low(gpu_pool, case, tell, device="cuda")


@pytest.mark.parametrize("case", IN_FP8, ids=str)
def test_products_in_fp8_are_those_of_one_gpu(gpu_pool: RankPool, case: Case, tell: Tell) -> None:
    """Everything but the grid is fp64: what differs in the last bits rounds to the same numbers."""
    check(gpu_pool, case, tell, steps=3, device="cuda")
