"""Products of fp8 matrices against the product of what their factors stand for, in fp64."""

from functools import partial

import pytest
import torch

from megaspec_kernels.catalog import Use, choose, unmet
from megaspec_kernels.fp8_cast.formats import Block, scale_of
from megaspec_kernels.gate import check
from megaspec_kernels.registry import REGISTRY
from tests.kernels.fp8 import quantised

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ALL: Block = (None, None)
LINES: Block = (1, None)
PAIRS = [
    (ALL, ALL, E4M3),
    (ALL, ALL, E5M2),
    (LINES, LINES, E4M3),
    (LINES, LINES, E5M2),
    ((1, 128), (128, 128), E4M3),
    ((1, 128), (1, 128), E4M3),
]


def factors(M: int, N: int, K: int, a_block: Block, b_block: Block, dtype: torch.dtype, device: torch.device) -> tuple:
    """Both in fp64, both in fp8 with their scales in fp32."""
    draw = torch.Generator().manual_seed(M + N + K)
    made = []
    for rows, block, form in ((M, a_block, dtype), (N, b_block, E4M3)):
        x = torch.randn(rows, K, generator=draw) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=draw).float())
        cast = REGISTRY["fp8_cast"]["reference"]
        scale = scale_of(cast.amax(x, block=block), form)
        values, _ = cast.cast(x, scale, block=block, dtype=form)
        made.append((quantised(x, form, block).to(device), values.to(device), scale.to(device)))
    return tuple(made)


@pytest.mark.parametrize("name", list(REGISTRY["scaled_product"]))
@pytest.mark.parametrize(("a_block", "b_block", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 128), (80, 256, 384), (128, 144, 256)])
def test_product(name, a_block, b_block, dtype, out, M, N, K, device) -> None:
    if name == "torch":
        if device.type == "cpu":
            pytest.skip("torch's scaled product is tested on a GPU")
        if a_block[1] is not None and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("scales of blocks are Hopper's")
    (a, a8, a_scale), (b, b8, b_scale) = factors(M, N, K, a_block, b_block, dtype, device)
    product = REGISTRY["scaled_product"][name]
    call = partial(product, a8, b8, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=out)
    truth = a @ b.t()
    plain = (a.float() @ b.float().t()).to(out)
    check({"out": call()}, {"out": plain}, {"out": truth})
    if name == "torch" and a_block[1] is None:
        # fewer bits in the sums: of fp8's own error not a part, 2^-11 of the terms
        size = (a.abs() @ b.abs().t()).max()
        assert (call(fast=True).double() - truth).abs().max() <= 2**-7 * size


def test_the_reference_in_fp64_is_exact() -> None:
    (a, a8, a_scale), (b, b8, b_scale) = factors(48, 32, 256, (1, 128), (128, 128), E4M3, torch.device("cpu"))
    product = REGISTRY["scaled_product"]["reference"]
    found = product(
        a8, b8, a_scale.double(), b_scale.double(), a_block=(1, 128), b_block=(128, 128), dtype=torch.float64
    )
    assert torch.equal(found, a @ b.t())


def test_wide_models_take_the_reference() -> None:
    assert choose("scaled_product", device="cuda", sm=90, use=Use(precision="bf16")) == "torch"
    assert choose("scaled_product", device="cuda", sm=90, use=Use(precision="fp64")) == "reference"
    assert unmet("scaled_product", "torch", device="cuda", sm=80) == "needs sm89, this GPU is sm80"
