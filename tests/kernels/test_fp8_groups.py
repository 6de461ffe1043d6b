"""Rows of groups in fp8, and their products: each group as if it were a matrix of its own."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from megaspec_kernels.catalog import Use, choose, unmet
from megaspec_kernels.fp8_cast import triton
from megaspec_kernels.fp8_cast.formats import LARGEST, scale_of
from megaspec_kernels.fp8_cast.groups import padded_ends, padded_rows, scale_of_rows
from megaspec_kernels.gate import check, filled_with_nan
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel
from megaspec_kernels.scaled_grouped.bench import held
from tests.kernels.fp8 import quantised
from tests.kernels.test_fp8_cast import numbers, same_bits

E4M3 = torch.float8_e4m3fn
KERNELS = REGISTRY["fp8_cast"]
INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
# rows of each group, and rows of none behind them
SIZES = [((5, 0, 3, 8), 0), ((0, 1, 0), 2), ((0, 0), 0), ((63, 130, 0, 1, 17), 9), ((0, 40), 0), ((32, 16), 0)]
WIDTHS = [1, 24, 200]


def kernel_on(name: str, device: torch.device) -> Fp8CastKernel:
    if name == "triton" and device.type == "cpu" and not INTERPRETED:
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


@pytest.mark.parametrize("name", list(REGISTRY["scaled_grouped"]))
def test_rows_of_no_group_are_zero_and_empty_groups_have_no_gradient(name, device) -> None:
    if name == "torch" and (device.type == "cpu" or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("torch's scaled grouped product is Hopper's")
    kernel = REGISTRY["scaled_grouped"][name]
    x = torch.randn(20, 32, device=device).to(E4M3)
    weight = torch.randn(3, 48, 32, device=device).to(E4M3)
    one = torch.ones(1, 1, device=device)
    ends = ends_of((4, 0, 9), device)
    with filled_with_nan():
        y = kernel.product(x, weight, one, one.expand(3, 1), ends, dtype=torch.bfloat16, whole=False)
        padded = padded_ends(ends)
        turned = KERNELS["reference"].group_columns(x, ends, padded, columns=padded_rows(20, 3))
        total = kernel.weight_product(turned, turned, one, one, padded, dtype=torch.float32)
    assert y.shape == (20, 48)
    assert not y[13:].any()
    assert (y[:13] != 0).any(dim=1).all()
    assert total.dtype == torch.float32
    assert not total[1].any()
    rows = x[4:13].double()
    assert torch.allclose(total[2].double(), rows.t() @ rows, rtol=1e-2, atol=1e-1)
    assert kernel.product(x[:0], weight, one, one.expand(3, 1), 0 * ends, dtype=torch.bfloat16).shape == (0, 48)


def test_wide_models_and_other_gpus_take_the_reference() -> None:
    use = Use(precision="bf16", widths=(2880,))
    assert choose("scaled_grouped", device="cuda", sm=90, use=use) == "torch"
    assert choose("scaled_grouped", device="cuda", sm=90, use=Use(precision="fp64")) == "reference"
    assert unmet("scaled_grouped", "torch", device="cuda", sm=100, use=use) == "runs up to sm90, this GPU is sm100"
    odd = unmet("scaled_grouped", "torch", device="cuda", sm=90, use=Use(precision="bf16", widths=(2880, 24)))
    assert odd == "needs matrices whose widths are multiples of 16, one is 24 wide"


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
def test_ragged_groups_pass_the_gate_on_hopper(by_rows: bool, device: torch.device) -> None:
    """The three products of experts through torch's kernel, in memory that holds NaN, beside the reference."""
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's scaled grouped product is Hopper's")
    with filled_with_nan():
        comparisons = [one for one in held("torch", device) if ("rows" in one.name.rpartition("of")[2]) == by_rows]
    assert len(comparisons) == 3
    for one in comparisons:
        check(one.fast, one.plain, one.truth)
