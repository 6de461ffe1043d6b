"""Quantising to fp8, to the bit."""

from collections.abc import Callable, Sequence
from math import inf, nan

import pytest
import torch
from torch import Tensor

from megaspec_kernels.bench import on_device
from megaspec_kernels.catalog import CATALOG
from megaspec_kernels.fp8_cast import triton
from megaspec_kernels.fp8_cast.formats import (
    COLUMN,
    LARGEST,
    ROW,
    SHORT_COLUMN,
    SHORT_ROW,
    scale_of,
    scale_shape,
    spread,
)
from megaspec_kernels.fp8_cast.tiles import TILES, TILES_OF_LARGEST, TILES_OF_LINES, TILES_OF_SHORT_LINES
from megaspec_kernels.gate import filled_with_nan
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel
from tests.kernels.fp8 import power_of_two_scale, quantised

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BLOCKS = [(None, None), (1, None), (None, 1), (1, 128), (128, 1), (128, 128)]
# the last two are of the sizes that models have, in whole tiles and not
SHAPES = [(1, 1), (63, 96), (130, 257), (128, 256), (144, 272)]
# the smallest that kernels take in pairs, and one of several tiles in both directions, of which the last are cut off
SHAPES_OF_LINES = [*SHAPES, (16, 16), (256, 400)]
KERNELS = REGISTRY["fp8_cast"]
INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret


def kernel_on(name: str, device: torch.device) -> Fp8CastKernel:
    if name == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    return KERNELS[name]


def numbers(M: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of many sizes, so that blocks have other scales and some elements become subnormal or zero."""
    draw = torch.Generator().manual_seed(M * 1000 + K)
    sizes = torch.exp2(torch.randint(-12, 6, (M, K), generator=draw).float())
    return (torch.randn(M, K, generator=draw) * sizes).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_definition(dtype, block, shape, wide) -> None:
    x = numbers(*shape, wide)
    kernel = KERNELS["reference"]
    amax = kernel.amax(x, block=block)
    assert amax.dtype == torch.promote_types(wide, torch.float32)
    assert tuple(amax.shape) == scale_shape(block, shape)
    scale = scale_of(amax, dtype)
    by_rows, by_columns = kernel.cast(x, scale, block=block, dtype=dtype, columns=True)
    found = by_rows.double() * spread(scale, block, shape).double()
    assert torch.equal(found, quantised(x, dtype, block))
    assert same_bits(by_rows.t().contiguous(), by_columns)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("amax", [1.0, 448.0, 448.1, 57344.0, 57345.0, 0.875, 0.8750001, 1e-30, 2.0**-118, 3e38])
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype, amax) -> None:
    amax = torch.tensor(amax)
    assert scale_of(amax, dtype).item() == power_of_two_scale(amax.item(), dtype)
    if amax.item() > 2.0**-90:
        assert scale_of(amax, dtype, margin=3).item() == 8 * power_of_two_scale(amax.item(), dtype)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_scale_is_defined_for_every_number(dtype) -> None:
    assert scale_of(torch.tensor([0.0, inf, nan]), dtype).tolist() == [1.0, 1.0, 1.0]
    # the smallest and the largest number of fp32, and numbers that only fp64 has
    scales = scale_of(torch.tensor([2.0**-149, 3.4e38]), dtype)
    assert torch.isfinite(scales).all()
    assert torch.isfinite(1 / scales).all()
    assert scale_of(torch.tensor([1e-300, 1e300], dtype=torch.float64), dtype).tolist() == [2.0**-126, 2.0**126]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_what_is_not_finite_becomes_nan_and_what_is_too_large_saturates(name, dtype, device) -> None:
    kernel = kernel_on(name, device)
    x = torch.tensor([[1.0, -2.0, inf, -inf], [nan, 0.0, -0.0, 4e6], [-4e6, 1e-20, 2.0**-149, 3e38]], device=device)
    x[1, 0].copysign_(torch.tensor(-1.0))
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    one = torch.ones(1, 1, device=device)
    found, _ = kernel.cast(x, one, block=(None, None), dtype=dtype, saturated=counter)
    largest = LARGEST[dtype]
    expected = torch.tensor([[1.0, -2.0, nan, nan], [nan, 0.0, -0.0, largest], [-largest, 0.0, 0.0, largest]])
    assert torch.equal(found.float().cpu().nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))
    # the three that are finite and beyond the largest number
    assert counter.item() == 3
    assert kernel.amax(x, block=(None, None)).isnan().all()
    assert kernel.amax(x[:1], block=(None, None)).item() == inf


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_every_implementation_makes_the_reference_s_bits(name, dtype, block, shape, wide, device) -> None:
    kernel = kernel_on(name, device)
    x = numbers(*shape, wide)
    # ties and their neighbours, by a scale that is 1
    ties = torch.tensor([448.0, 17.0, 19.0, 15.5, 2.0**-10, 1.5 * 2.0**-9, 2.5 * 2.0**-9, 464.0, 2.0**-17, -0.0])
    x.view(-1)[: len(ties)] = ties.to(wide)[: x.numel()]
    plain = KERNELS["reference"]
    amax = plain.amax(x, block=block)
    there = x.to(device)
    with filled_with_nan():
        assert torch.equal(kernel.amax(there, block=block).cpu(), amax)
        assert torch.equal(kernel.scale(there, block=block, dtype=dtype).cpu(), scale_of(amax, dtype))
        assert torch.equal(kernel.scale_of(amax.to(device), dtype).cpu(), scale_of(amax, dtype))
        for scale in (scale_of(amax, dtype), torch.ones_like(amax)):
            _check_cast(kernel.cast, there, scale, block, dtype)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_scales_are_those_of_the_definition(name, dtype, device) -> None:
    """Of all that largest elements can be: every exponent, the ends of what fits, none, infinity, NaN."""
    kernel = kernel_on(name, device)
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    near = [
        powers,
        powers * 1.75,
        torch.nextafter(powers * 1.75, torch.tensor(inf)),
        torch.tensor([0.0, inf, nan, 3.4e38]),
    ]
    amax = torch.cat(near).view(-1, 1)
    assert torch.equal(kernel.scale_of(amax.to(device), dtype).cpu(), scale_of(amax, dtype))
    for bad in (inf, nan):
        x = numbers(48, 80, torch.bfloat16)
        x[5, 7] = bad
        found = kernel.scale(x.to(device), block=(None, None), dtype=dtype).cpu()
        assert found.item() == 1.0


@pytest.mark.parametrize("shape", [(63, 96), (144, 272), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_one_pass_casts_and_records(name, wide, dtype, shape, device) -> None:
    """By a scale that is known before: both layouts, the largest finite element, how many saturate, a copy of it."""
    kernel = kernel_on(name, device)
    plain = KERNELS["reference"]
    x = numbers(*shape, wide)
    x[1, 2], x[3, 4], x[60, 95] = inf, -inf, nan
    largest = torch.where(torch.isfinite(x), x, 0).abs().max().float()
    scale = scale_of(largest.view(1, 1), dtype)
    # nothing saturates, a few do, most do; what was seen before is less or more
    for smaller, before in ((1.0, 0.0), (2.0**-3, 2.0**90), (2.0**-14, 1.0)):
        found = []
        for one, there in ((kernel, x.to(device)), (plain, x)):
            seen = torch.tensor([before], device=there.device)
            saturated = torch.full((1,), 5, dtype=torch.int64, device=there.device)
            copy = torch.full((1, 1), nan, device=there.device)
            known = (scale * smaller).to(there.device)
            with filled_with_nan():
                by_rows, by_columns = one.cast(
                    there,
                    known,
                    block=(None, None),
                    dtype=dtype,
                    columns=True,
                    seen=seen,
                    saturated=saturated,
                    scale_copy=copy,
                )
            found.append((by_rows, by_columns, seen, saturated, copy, known))
        for mine, asked in zip(*found, strict=True):
            assert same_bits(mine, asked)
        assert found[0][2].item() == max(before, largest.item())
        assert (found[0][3].item() == 5) == (smaller == 1.0)
        assert found[0][4].item() == found[0][5].item()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_every_number_of_bf16_becomes_what_the_reference_makes_of_it(name, dtype, device) -> None:
    """All 65,536, NaN of both signs among them; by scales that make them normal, subnormal and too large."""
    kernel = kernel_on(name, device)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(256, 256)
    x = bits.view(torch.bfloat16)
    for exponent in (-126, -10, 0, 126):
        scale = torch.full((1, 1), 2.0**exponent)
        found = []
        for one, there in ((kernel, x.to(device)), (KERNELS["reference"], x)):
            seen = torch.zeros(1, device=there.device)
            saturated = torch.zeros(1, dtype=torch.int64, device=there.device)
            pair = one.cast(
                there,
                scale.to(there.device),
                block=(None, None),
                dtype=dtype,
                columns=True,
                seen=seen,
                saturated=saturated,
            )
            found.append((*pair, seen, saturated))
        for mine, asked in zip(*found, strict=True):
            assert same_bits(mine, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (8192 + 16, 4096 + 48), (4096, 28672)], ids=str)
def test_large_matrices_have_the_reference_s_bits(shape) -> None:
    """Many blocks on every multiprocessor, whole tiles and not."""
    x = torch.randn(shape, device="cuda").bfloat16()
    x[shape[0] // 2, 17] = 3e38
    found = []
    for one in (KERNELS["triton"], KERNELS["reference"]):
        seen = torch.zeros(1, device="cuda")
        saturated = torch.zeros(1, dtype=torch.int64, device="cuda")
        scale = torch.full((1, 1), 2.0**-8, device="cuda")
        pair = one.cast(x, scale, block=(None, None), dtype=E4M3, columns=True, seen=seen, saturated=saturated)
        found.append((*pair, seen, saturated))
    for mine, asked in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.uint8), asked.view(torch.uint8))
    assert found[0][3].item() > 1


@pytest.mark.gpu
def test_a_graph_replays_the_cast() -> None:
    """It is started on the stream that torch is on, in a way that a graph can take."""
    x = torch.randn(512, 768, device="cuda").bfloat16()
    scale = torch.full((1, 1), 2.0**-6, device="cuda")
    seen = torch.zeros(1, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        return KERNELS["triton"].cast(x, scale, block=(None, None), dtype=E4M3, columns=True, seen=seen)

    replay = on_device(call)
    x.copy_(torch.randn(512, 768, device="cuda") * 3)
    seen.zero_()
    found = replay()
    asked = KERNELS["reference"].cast(x, scale, block=(None, None), dtype=E4M3, columns=True)
    for mine, one in zip(found, asked, strict=True):
        assert same_bits(mine, one)
    assert seen.item() == x.abs().max().item()


def test_every_tile_of_triton_makes_the_same_bits(device) -> None:
    """Tiles of which the fastest is chosen."""
    kernel_on("triton", device)
    x = numbers(256, 384, torch.bfloat16)
    one = torch.tensor([[2.0**-4]])
    asked = KERNELS["reference"].cast(x, one, block=(None, None), dtype=E5M2, columns=True)
    for tile in TILES.values():
        for count in (384, 272):
            part = x[:, :count].contiguous()
            seen = torch.zeros(1, device=device)
            with filled_with_nan():
                found = triton.cast(
                    part.to(device), one.to(device), block=(None, None), dtype=E5M2, columns=True, seen=seen, tile=tile
                )
            assert same_bits(found[0], asked[0][:, :count].contiguous()), tile
            assert same_bits(found[1], asked[1][:count]), tile
            assert seen.item() == part.abs().max().item()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 96), (144, 272), (256, 384)], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_columns_are_rows_turned_round(name, shape, dtype, device) -> None:
    """Every byte, NaN and signed zero among them."""
    kernel = kernel_on(name, device)
    draw = torch.Generator().manual_seed(7)
    x8 = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8).view(dtype)
    with filled_with_nan():
        found = kernel.columns(x8.to(device))
    assert found.is_contiguous()
    assert found.dtype == dtype
    assert same_bits(found, x8.view(torch.uint8).t().contiguous())
    # strides make no difference
    assert same_bits(kernel.columns(found.t()), found)


def test_every_tile_of_triton_turns_rows_round(device) -> None:
    kernel_on("triton", device)
    x8 = torch.arange(272 * 384, dtype=torch.int32).to(torch.uint8).view(272, 384).view(E4M3)
    for tile in TILES.values():
        assert same_bits(triton.columns(x8.to(device), tile=tile), x8.view(torch.uint8).t().contiguous()), tile


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_LINES, ids=str)
@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_lines_of_the_reference_are_those_of_the_definition(dtype, shape, wide) -> None:
    x = numbers(*shape, wide)
    kernel = KERNELS["reference"]
    row_amax, column_amax = kernel.amax_of_lines(x)
    assert torch.equal(row_amax, x.abs().amax(1, keepdim=True).to(row_amax.dtype))
    assert torch.equal(column_amax, x.abs().amax(0, keepdim=True).to(row_amax.dtype))
    whole = kernel.quantise_lines(x, dtype=dtype)
    assert torch.equal(whole.rows.double() * whole.row_scale.double(), quantised(x, dtype, ROW))
    assert torch.equal(whole.columns.double().t() * whole.column_scale.double(), quantised(x, dtype, COLUMN))
    short = kernel.quantise_short_lines(x, dtype=dtype)
    assert short.row_scale.dtype == short.column_scale.dtype == torch.promote_types(wide, torch.float32)
    assert short.row_scale.t().is_contiguous()
    assert short.column_scale.is_contiguous()
    factor = spread(short.row_scale, SHORT_ROW, shape).double()
    assert torch.equal(short.rows.double() * factor, quantised(x, dtype, SHORT_ROW))
    factor = spread(short.column_scale, SHORT_COLUMN, shape).double()
    assert torch.equal(short.columns.double().t() * factor, quantised(x, dtype, SHORT_COLUMN))


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_LINES, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_lines_have_the_reference_s_bits(name, wide, shape, dtype, device) -> None:
    _check_lines(kernel_on(name, device), numbers(*shape, wide), dtype, device)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", [(63, 96), (144, 272)], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_lines_that_are_zero_or_not_finite(name, shape, dtype, device) -> None:
    kernel = kernel_on(name, device)
    x = numbers(*shape, torch.bfloat16)
    x[1] = 0.0
    x[2] = -0.0
    x[:, 3] = 0.0
    x[4, 5], x[6, 7], x[8, 9], x[62, 95] = inf, -inf, nan, inf
    _check_lines(kernel, x, dtype, device)
    row_amax, column_amax = kernel.amax_of_lines(x.to(device))
    assert row_amax[1:9, 0].isnan().tolist() == [False] * 7 + [True]
    assert row_amax[[1, 2, 4, 6, 62], 0].tolist() == [0.0, 0.0, inf, inf, inf]
    assert column_amax[0, [3, 5, 7, 95]].tolist() == [0.0, inf, inf, inf]
    short = kernel.quantise_short_lines(x.to(device), dtype=dtype)
    assert short.row_scale[[1, 2, 4, 6, 8, 62], 0].tolist() == [1.0] * 6
    assert short.column_scale[0, [3, 5, 7, 9, 95]].tolist() == [1.0] * 5
    assert short.rows.float().isnan().nonzero().tolist() == [[4, 5], [6, 7], [8, 9], [62, 95]]
    assert short.columns.float().isnan().nonzero().tolist() == [[5, 4], [7, 6], [9, 8], [95, 62]]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", list(KERNELS))
def test_lines_of_every_number_of_bf16(name, turned, dtype, device) -> None:
    """All 65,536: subnormal numbers, NaN of both signs; in rows of numbers of one exponent, or in columns."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(512, 128)
    x = bits.view(torch.bfloat16)
    if turned:
        x = x.t().contiguous()
    _check_lines(kernel_on(name, device), x, dtype, device)


def test_every_tile_of_triton_makes_the_same_lines(device) -> None:
    kernel_on("triton", device)
    plain = KERNELS["reference"]
    for shape in ((128, 256), (144, 272)):
        x = numbers(*shape, torch.bfloat16)
        asked = plain.quantise_short_lines(x, dtype=E4M3)
        amax = plain.amax_of_lines(x)
        for what, tile in TILES_OF_SHORT_LINES.items():
            with filled_with_nan():
                found = triton.quantise_short_lines(x.to(device), dtype=E4M3, tile=tile)
            _check_same(found, asked, what)
        for what, tile in TILES_OF_LARGEST.items():
            with filled_with_nan():
                found_amax = triton.amax_of_lines(x.to(device), tile=tile)
            _check_same(found_amax, amax, what)
        for what, tile in TILES_OF_LINES.items():
            with filled_with_nan():
                lines = triton.quantise_lines(x.to(device), dtype=E4M3, tile=tile)
            _check_same(lines, plain.quantise_lines(x, dtype=E4M3), what)


def test_triton_takes_lines_of_many_tiles(device) -> None:
    kernel = kernel_on("triton", device)
    # five tiles of a row
    x = torch.full((16, 4 * 128 + 16), 2.0**-9, dtype=torch.bfloat16)
    # in the first tile of a row, in the third one and in the last one
    x[0, 0] = 3.0
    x[1, 300] = -5.0
    x[2, -1] = 700.0
    for matrix in (x, x.t().contiguous()):
        with filled_with_nan():
            found = kernel.quantise_lines(matrix.to(device), dtype=E4M3)
        _check_same(found, KERNELS["reference"].quantise_lines(matrix, dtype=E4M3), "wide")


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_wrong_amax_of_a_line_would_be_seen(name, device) -> None:
    """In the layout that it belongs to, and nowhere else."""
    kernel = kernel_on(name, device)
    x = numbers(144, 272, torch.bfloat16)
    row_amax, column_amax = KERNELS["reference"].amax_of_lines(x)
    asked = KERNELS["reference"].quantise_lines(x, dtype=E4M3)
    wrong = row_amax.clone()
    wrong[131] *= 2
    found = kernel.quantise_lines(x.to(device), dtype=E4M3, amax=(wrong.to(device), column_amax.to(device)))
    assert _lines_that_differ(found.rows, asked.rows) == [131]
    assert same_bits(found.columns, asked.columns)
    assert (found.row_scale.cpu() != asked.row_scale).nonzero().tolist() == [[131, 0]]
    wrong = column_amax.clone()
    wrong[:, 257] *= 2
    found = kernel.quantise_lines(x.to(device), dtype=E4M3, amax=(row_amax.to(device), wrong.to(device)))
    assert same_bits(found.rows, asked.rows)
    assert _lines_that_differ(found.columns, asked.columns) == [257]
    assert (found.column_scale.cpu() != asked.column_scale).nonzero().tolist() == [[0, 257]]


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_lines_of_an_empty_matrix(name, shape, device) -> None:
    kernel = kernel_on(name, device)
    _check_lines(kernel, torch.zeros(shape, dtype=torch.bfloat16), E4M3, device)


def test_lines_of_a_matrix_without_memory() -> None:
    x = torch.empty(48, 144, dtype=torch.bfloat16, device="meta")
    for kernel in KERNELS.values():
        assert [tuple(one.shape) for one in kernel.amax_of_lines(x)] == [(48, 1), (1, 144)]
        whole = kernel.quantise_lines(x, dtype=E5M2)
        assert [tuple(one.shape) for one in whole] == [(48, 144), (48, 1), (144, 48), (1, 144)]
        short = kernel.quantise_short_lines(x, dtype=E5M2)
        assert [tuple(one.shape) for one in short] == [(48, 144), (48, 2), (144, 48), (1, 144)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (8192 + 16, 4096 + 48), (4096, 28672)], ids=str)
def test_lines_of_large_matrices_have_the_reference_s_bits(shape) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    x[shape[0] // 2, 17] = nan
    plain = KERNELS["reference"]
    kernel = KERNELS["triton"]
    asked = plain.quantise_lines(x, dtype=E4M3)
    # what is written, while the kernel before still runs: many times, of what was just written
    for _ in range(20):
        _check_same(kernel.quantise_lines(x.clone(), dtype=E4M3), asked)
    amax = kernel.amax_of_lines(x)
    _check_same(kernel.quantise_lines(x, dtype=E4M3, amax=amax), asked)
    _check_same(kernel.quantise_short_lines(x, dtype=E4M3), plain.quantise_short_lines(x, dtype=E4M3))


def _check_lines(kernel: Fp8CastKernel, x: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """All that there is of lines against the reference."""
    plain = KERNELS["reference"]
    there = x.to(device)
    amax = plain.amax_of_lines(x)
    with filled_with_nan():
        for mine, asked in zip(kernel.amax_of_lines(there), amax, strict=True):
            # which NaN is open
            torch.testing.assert_close(mine.cpu(), asked, rtol=0, atol=0, equal_nan=True)
        _check_same(kernel.quantise_lines(there, dtype=dtype), plain.quantise_lines(x, dtype=dtype))
        _check_same(kernel.quantise_short_lines(there, dtype=dtype), plain.quantise_short_lines(x, dtype=dtype))
        # also others than those of the lines, by which some saturate
        for some in (amax, [torch.ones_like(one) for one in amax]):
            found = kernel.quantise_lines(there, dtype=dtype, amax=[one.to(device) for one in some])
            _check_same(found, plain.quantise_lines(x, dtype=dtype, amax=some))


def _check_same(found: Sequence[Tensor], asked: Sequence[Tensor], what: str = "") -> None:
    for place, (mine, one) in enumerate(zip(found, asked, strict=True)):
        assert mine.shape == one.shape
        assert mine.dtype == one.dtype
        # also where they lie: scales of short rows part by part
        for turned in (False, True):
            assert _lies_so(mine, turned) == _lies_so(one, turned), (place, what)
        assert same_bits(mine.contiguous().view(-1), one.contiguous().view(-1)), (place, what)


def _lies_so(x: Tensor, turned: bool) -> bool:
    """Row by row, or column by column."""
    return (x.t() if turned else x).is_contiguous()


def _lines_that_differ(found: Tensor, asked: Tensor) -> list[int]:
    differs = found.cpu().view(torch.uint8) != asked.view(torch.uint8)
    return differs.any(1).nonzero().view(-1).tolist()


def _check_cast(cast: Callable, x: Tensor, scale: Tensor, block, dtype) -> None:
    for rows, columns in ((True, True), (True, False), (False, True)):
        mine = torch.zeros(1, dtype=torch.int64, device=x.device)
        counted = torch.zeros(1, dtype=torch.int64)
        found = cast(x, scale.to(x.device), block=block, dtype=dtype, rows=rows, columns=columns, saturated=mine)
        asked = KERNELS["reference"].cast(
            x.cpu(), scale, block=block, dtype=dtype, rows=rows, columns=columns, saturated=counted
        )
        assert torch.equal(mine.cpu(), counted)
        for a, b in zip(found, asked, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.is_contiguous()
                assert same_bits(a, b)
        if rows and columns and block != (None, None):
            # other kernels may serve where nothing is counted
            found = cast(x, scale.to(x.device), block=block, dtype=dtype, columns=True)
            assert same_bits(found[0], asked[0])
            assert same_bits(found[1], asked[1])


@pytest.mark.parametrize("name", list(KERNELS))
def test_strides_make_no_difference(name, device) -> None:
    kernel = kernel_on(name, device)
    x = numbers(128, 192).to(device)
    turned = x.t().contiguous().t()
    one = torch.ones(1, 1, device=device)
    found = kernel.cast(turned, one, block=(None, None), dtype=E4M3)[0]
    assert same_bits(found, kernel.cast(x, one, block=(None, None), dtype=E4M3)[0])


def test_a_swapped_layout_would_be_seen() -> None:
    x = numbers(64, 64)
    by_rows, by_columns = KERNELS["reference"].cast(x, torch.ones(1, 1), block=(None, None), dtype=E5M2, columns=True)
    assert not same_bits(by_rows, by_columns)


def test_there_is_a_fused_implementation() -> None:
    assert list(CATALOG["fp8_cast"].implementations) == ["triton", "reference"]
