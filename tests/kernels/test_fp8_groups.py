"""Rows of groups in fp8: each group as if it were a matrix of its own."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from megaspec_kernels.fp8_cast import triton
from megaspec_kernels.fp8_cast.formats import LARGEST, scale_of
from megaspec_kernels.fp8_cast.groups import padded_ends, padded_rows, scale_of_rows
from megaspec_kernels.gate import filled_with_nan
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel
from tests.kernels.fp8 import quantised
from tests.kernels.test_fp8_cast import numbers, same_bits

E4M3 = torch.float8_e4m3fn
KERNELS = REGISTRY["fp8_cast"]
INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
# rows of each group, and rows of none behind them
SIZES = [((5, 0, 3, 8), 0), ((0, 1, 0), 2), ((0, 0), 0), ((63, 130, 0, 1, 17), 9), ((0, 40), 0), ((32, 16), 0)]
WIDTHS = [1, 24, 200]


def kernel_on(name: str, device: torch.device) -> Fp8CastKernel:
    # groups are Triton's in both
    if name in ("triton", "cuda") and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    return KERNELS[name]


def ends_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def parts(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return x[: sum(sizes)].split(sizes)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=str)
@pytest.mark.parametrize("by_columns", [False, True])
def test_the_reference_is_the_definition(dtype, sizes, rest, by_columns) -> None:
    cpu = torch.device("cpu")
    x = numbers(sum(sizes) + rest, 24)
    ends = ends_of(sizes, cpu)
    kernel = KERNELS["reference"]
    amax = kernel.group_amax(x, ends)
    if not by_columns:
        amax = amax.amax(1, keepdim=True)
    scale = scale_of(amax, dtype)
    found = kernel.group_cast(x, scale, ends, dtype=dtype)
    block = (None, 1) if by_columns else (None, None)
    for e, (mine, part) in enumerate(zip(parts(found, sizes), parts(x, sizes), strict=True)):
        if part.shape[0]:
            assert torch.equal(mine.double() * scale[e].double(), quantised(part, dtype, block))
        else:
            assert not amax[e].any()
    assert not found[sum(sizes) :].to(torch.float32).any()


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_every_implementation_makes_the_same_bits(name, sizes, rest, width, dtype, device) -> None:
    kernel = kernel_on(name, device)
    plain = KERNELS["reference"]
    x = numbers(sum(sizes) + rest, width, torch.bfloat16)
    if x.shape[0] > 4:
        x[1, 0] = nan
        x[3, width // 2] = -inf
    here = x.to(device)
    cpu = torch.device("cpu")
    ends = ends_of(sizes, cpu)
    ends_here = ends.to(device)
    amax = plain.group_amax(x, ends)
    for scale in (scale_of(amax, dtype), scale_of(amax.amax(1, keepdim=True), dtype), torch.full((1, 1), 2.0**-12)):
        seen = torch.zeros(1, dtype=torch.int64)
        seen_here = seen.to(device)
        expected = plain.group_cast(x, scale, ends, dtype=dtype, saturated=seen)
        with filled_with_nan():
            found = kernel.group_cast(here, scale.to(device), ends_here, dtype=dtype, saturated=seen_here)
        assert same_bits(found, expected)
        assert seen_here.item() == seen.item()
    assert seen.item() > 0 or sum(sizes) < 30 or width == 1
    with filled_with_nan():
        found_amax = kernel.group_amax(here, ends_here)
    assert torch.equal(found_amax.cpu().nan_to_num(-1), amax.nan_to_num(-1))
    padded = padded_ends(ends)
    columns = padded_rows(x.shape[0], len(sizes))
    with filled_with_nan():
        turned = kernel.group_columns(found, ends_here, padded.to(device), columns=columns)
    assert same_bits(turned, plain.group_columns(expected, ends, padded, columns=columns))


@pytest.mark.parametrize(("sizes", "rest"), SIZES, ids=str)
def test_groups_are_padded_to_whole_units(sizes, rest) -> None:
    cpu = torch.device("cpu")
    ends = ends_of(sizes, cpu)
    padded = padded_ends(ends)
    columns = padded_rows(sum(sizes) + rest, len(sizes))
    assert padded.dtype == torch.int32
    assert columns % 16 == 0
    assert padded[-1] <= columns
    x = numbers(sum(sizes) + rest, 24).to(E4M3)
    turned = KERNELS["reference"].group_columns(x, ends, padded, columns=columns).float()
    last = 0
    for part, size, end in zip(parts(x, sizes), sizes, padded.tolist(), strict=True):
        assert end - last == max(16, -(-size // 16) * 16)
        assert torch.equal(turned[:, last : last + size], part.float().t())
        assert not turned[:, last + size : end].any()
        last = end
    assert not turned[:, last:].any()


def test_scales_of_rows_are_those_of_their_groups() -> None:
    scale = torch.tensor([[1.0], [2.0], [4.0]])
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    assert scale_of_rows(scale, ends, 4).flatten().tolist() == [1.0, 1.0, 4.0, 4.0]
    assert scale_of_rows(scale[:1], ends, 4).tolist() == [[1.0]]
