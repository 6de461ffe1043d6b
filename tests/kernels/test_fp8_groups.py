"""Rows of groups in fp8: each group as if it were a matrix of its own."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from megaspec_kernels.fp8_cast import triton
from megaspec_kernels.fp8_cast.formats import LARGEST, scale_of
from megaspec_kernels.fp8_cast.groups import scale_of_rows
from megaspec_kernels.fp8_cast.padding import UNIT, padded_rows
from megaspec_kernels.gate import filled_with_nan
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel
from tests.kernels.fp8 import quantised
from tests.kernels.test_fp8_cast import numbers, same_bits

E4M3 = torch.float8_e4m3fn
KERNELS = REGISTRY["fp8_cast"]
INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
# rows of each group, and rows of none behind them
SIZES = [((5, 0, 3, 8), 0), ((0, 1, 0), 2), ((0, 0), 0), ((63, 130, 0, 1, 17), 9), ((0, 40), 0), ((32, 16), 0)]
# what a tile holds goes on into the next one, and so does the fullest of many groups
FULL = (3, 0, 1, 290, 16, 0, 0, 77, 5)
E5M2 = torch.float8_e5m2
# Widths that 16 divides are taken in pairs of neighbours: less than a tile, and more. Few, since the interpreter takes
# one program after the other.
BITS = [
    *((sizes, rest, width, E4M3) for sizes, rest in SIZES for width in (24, 48)),
    ((63, 130, 0, 1, 17), 9, 1, E4M3),
    ((63, 130, 0, 1, 17), 9, 144, E5M2),
    ((5, 0, 3, 8), 0, 24, E5M2),
    (FULL, 13, 144, E4M3),
    # more tiles than lie below each other in a grid
    ((1200, 3), 5, 48, E4M3),
]
RECORDED = [
    *((sizes, rest, 24, gathers) for sizes, rest in SIZES[:4] for gathers in (False, True)),
    ((0, 0), 0, 48, True),
    ((63, 130, 0, 1, 17), 9, 48, False),
    (FULL, 13, 144, False),
    (FULL, 13, 144, True),
]


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
@pytest.mark.parametrize("by_column", [False, True])
def test_the_reference_is_the_definition(dtype, sizes, rest, by_column) -> None:
    cpu = torch.device("cpu")
    x = numbers(sum(sizes) + rest, 24)
    ends = ends_of(sizes, cpu)
    kernel = KERNELS["reference"]
    groups = kernel.groups(ends, x.shape[0])
    amax = kernel.group_amax(x, ends, by_column=by_column)
    scale = scale_of(amax, dtype)
    found, turned = kernel.group_cast(x, scale, groups, dtype=dtype, columns=True)
    block = (None, 1) if by_column else (None, None)
    assert turned.shape == (24, padded_rows(sum(sizes) + rest, len(sizes)))
    last = 0
    for e, (mine, part) in enumerate(zip(parts(found, sizes), parts(x, sizes), strict=True)):
        end = groups.padded[e].item()
        # whole units, and one for a group without rows
        assert end - last == max(UNIT, -(-sizes[e] // UNIT) * UNIT)
        assert torch.equal(turned[:, last : last + sizes[e]].float(), mine.float().t())
        assert not turned[:, last + sizes[e] : end].float().any()
        last = end
        if part.shape[0]:
            assert torch.equal(mine.double() * scale[e].double(), quantised(part, dtype, block))
        else:
            assert not amax[e].any()
    assert not turned[:, last:].float().any()
    assert not found[sum(sizes) :].to(torch.float32).any()


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("sizes", "rest", "width", "dtype"), BITS, ids=str)
def test_every_implementation_makes_the_same_bits(name, sizes, rest, width, dtype, device) -> None:
    kernel = kernel_on(name, device)
    plain = KERNELS["reference"]
    x = numbers(sum(sizes) + rest, width, torch.bfloat16)
    if x.shape[0] > 4:
        x[1, 0] = nan
        x[3, width // 2] = -inf
    here = x.to(device)
    ends = ends_of(sizes, torch.device("cpu"))
    ends_here = ends.to(device)
    groups = plain.groups(ends, x.shape[0])
    with filled_with_nan():
        groups_here = kernel.groups(ends_here, x.shape[0])
    assert groups_here.columns == groups.columns
    assert torch.equal(groups_here.padded.cpu(), groups.padded)
    for by_column in (False, True):
        amax = plain.group_amax(x, ends, by_column=by_column)
        with filled_with_nan():
            found_amax = kernel.group_amax(here, ends_here, by_column=by_column)
        assert torch.equal(found_amax.cpu().nan_to_num(-1), amax.nan_to_num(-1))
        scale = scale_of(amax, dtype)
        expected = plain.group_cast(x, scale, groups, dtype=dtype, columns=True)
        for rows, columns in ((True, True), (True, False), (False, True)):
            with filled_with_nan():
                found = kernel.group_cast(here, scale.to(device), groups_here, dtype=dtype, rows=rows, columns=columns)
            assert not rows or same_bits(found[0], expected[0])
            assert not columns or same_bits(found[1], expected[1])


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("sizes", "rest", "width", "gathers"), RECORDED, ids=str)
def test_one_scale_for_all_is_known_before_and_what_is_seen_is_recorded(
    name, sizes, rest, width, gathers, device
) -> None:
    kernel = kernel_on(name, device)
    plain = KERNELS["reference"]
    rows = sum(sizes) + rest
    tokens = 11 if gathers else rows
    x = numbers(tokens, width, torch.bfloat16)
    index = None
    index_here = None
    if gathers:
        draw = torch.Generator().manual_seed(rows)
        # rows without a token are empty
        index = torch.randint(-1, tokens, (rows,), generator=draw, dtype=torch.int32)
        index_here = index.to(device)
    elif rows > sum(sizes):
        # of no group: nobody sees it
        x[sum(sizes), 0] = 2.0**100
    ends = ends_of(sizes, torch.device("cpu"))
    groups = plain.groups(ends, rows)
    groups_here = kernel.groups(ends.to(device), rows)
    here = x.to(device)
    broken = here.clone()
    if tokens > 4:
        broken[3, width // 2] = -inf
        broken[1, width - 1] = nan
    for what in (here, broken):
        for exponent in (-12, 40):
            scale = torch.full((1, 1), 2.0**exponent)
            seen = torch.full((1,), 2.0**-40)
            saturated = torch.full((1,), 7, dtype=torch.int64)
            recorded = {"seen": seen.to(device), "saturated": saturated.to(device), "scale_copy": torch.empty(1, 1)}
            recorded["scale_copy"] = recorded["scale_copy"].to(device)
            form = {"dtype": E4M3, "columns": True}
            expected = plain.group_cast(
                what.cpu(), scale, groups, index_R=index, seen=seen, saturated=saturated, **form
            )
            with filled_with_nan():
                found = kernel.group_cast(what, scale.to(device), groups_here, index_R=index_here, **recorded, **form)
            assert same_bits(found[0], expected[0])
            assert same_bits(found[1], expected[1])
            assert recorded["seen"].item() == seen.item()
            assert recorded["saturated"].item() == saturated.item()
            assert recorded["scale_copy"].item() == scale.item()
            if exponent == -12 and sum(sizes) > 30:
                assert saturated.item() > 7


def test_gathered_and_quantised_is_quantised_and_gathered() -> None:
    plain = KERNELS["reference"]
    x = numbers(9, 32, torch.bfloat16)
    index = torch.tensor([4, 1, 1, 8, 0, 3], dtype=torch.int32)
    groups = plain.groups(ends_of((2, 0, 4), torch.device("cpu")), 6)
    scale = torch.full((1, 1), 2.0**-3)
    found, _ = plain.group_cast(x, scale, groups, dtype=E4M3, index_R=index)
    before, _ = plain.cast(x, scale, block=(None, None), dtype=E4M3)
    assert same_bits(found, before.view(torch.uint8)[index].view(E4M3))


def test_scales_of_rows_are_those_of_their_groups() -> None:
    scale = torch.tensor([[1.0], [2.0], [4.0]])
    groups = KERNELS["reference"].groups(torch.tensor([2, 2, 3], dtype=torch.int32), 4)
    assert scale_of_rows(scale, groups).flatten().tolist() == [1.0, 1.0, 4.0, 4.0]
    assert scale_of_rows(scale[:1], groups).tolist() == [[1.0]]
