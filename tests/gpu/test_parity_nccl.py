"""Layouts over NCCL against one GPU: the harness of tests/parity on two devices."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.conftest import Tell
from tests.gpu.test_fp8 import PRODUCTS
from tests.parity.cases import Case
from tests.parity.checks import check, check_fp8, check_low
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
# As they are trained: the grid by Triton, products by tensor cores, bf16 outside. 96 or 48 tokens on each rank.
TRAINED = [
    Case(dp=2, mask="uneven"),
    Case(dp=2, strategy="zero1", mask="uneven"),
    Case(dp=2, strategy="fsdp", mask="uneven", compile="block"),
    Case(pp=2, schedule="zb_h1", n_layers=4, accumulate=2, mask="uneven"),
    Case(tp=2, mask="uneven"),
    Case(tp=2, sequence=True, mask="uneven", compile="block"),
    Case(cp=2, mask="uneven"),
]
# Weights that are gathered in fp8, which have one scale.
GATHERED = Case(dp=2, strategy="fsdp", mask="uneven", also=(("precision.gather_fp8", True),))
WITH_EXPERTS = [
    Case(dp=2, ep=2, router="softmax", mask="uneven"),
    Case(dp=2, ep=2, router="softmax", dispatch="all_gather", mask="uneven", strategy="zero1"),
    Case(dp=2, strategy="fsdp", router="softmax", mask="uneven"),
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


@pytest.mark.parametrize(
    ("recipe", "case"),
    [*product(PRODUCTS, TRAINED), ("tensorwise", GATHERED), ("delayed", GATHERED)],
    ids=str,
)
def test_fp8_as_it_is_trained_is_that_of_one_gpu(gpu_pool: RankPool, recipe: str, case: Case, tell: Tell) -> None:
    kernels = (("kernels.fp8_cast", "triton"), ("kernels.scaled_product", PRODUCTS[recipe]))
    case = replace(case, precision=f"fp8 {recipe} in bf16", wide=True)
    check_fp8(gpu_pool, case, tell, kernels=kernels, device="cuda")


@pytest.mark.parametrize("case", WITH_EXPERTS, ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_experts_in_fp8_are_those_of_one_gpu(gpu_pool: RankPool, recipe: str, case: Case, tell: Tell) -> None:
    kernels = (
        ("kernels.fp8_cast", "triton"),
        ("kernels.scaled_product", PRODUCTS[recipe]),
        ("kernels.grouped", "torch"),
        ("kernels.scaled_grouped", "torch"),
    )
    case = replace(case, precision=f"fp8 {recipe} in bf16", wide=True)
    check_fp8(gpu_pool, case, tell, kernels=kernels, device="cuda")
