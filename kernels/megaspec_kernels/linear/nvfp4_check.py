"""Whether Transformer Engine's NVFP4 is what nvfp4.py says, on the GPU at hand: see mxfp8_check.py.

Casts that round to nearest make the same bytes: matrices are such that a rotation's sums are exact in fp32, in any
order. Of gradients that are rounded at random scales are the same bytes, every code is one of both neighbours of its
number, and over many draws as many go up as have to, those that lie near the upper one more often.
"""

# M tokens, I inputs, O outputs; L lines along which a product sums, N numbers of each

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.linear import nvfp4, te_nvfp4
from megaspec_kernels.linear.factors import Cast, Factor
from megaspec_kernels.linear.mxfp8 import in_units
from megaspec_kernels.linear.mxfp8_check import OF_RESULTS, first_of, of_bytes, of_numbers, of_sum
from megaspec_kernels.linear.nvfp4 import BLOCK, LARGEST, NUMBERS, Role, Rounding

# Tokens, inputs and outputs. Of the first its scales have padding on all sides, tokens fill no block, and rotations are
# a kernel of their own; of the second casts and rotations are one.
SIZES = ((72, 160, 96), (256, 384, 512))
# Casts of a matrix by which its draws are judged, and standard deviations that their sums may be off.
_DRAWS = 32
_DEVIATIONS = 6.0
# What each number may be off in the mean: the instruction that rounds has four numbers of 32 random bits.
_OF_BITS = 2.0**-8


def difference(device: torch.device, rounding: Rounding) -> str | None:
    """What differs, in words; None: nothing does. torch's generators stay as they are."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return first_of(_differences(device, rounding))


def _differences(device: torch.device, rounding: Rounding) -> Iterator[str]:
    for M, n_in, n_out in SIZES:
        matrices: dict[Role, Tensor] = {
            "input": _drawn(M, n_in, device),
            "weight": _drawn(n_out, n_in, device),
            "gradient": _drawn(M, n_out, device),
        }
        casts: dict[Role, Cast] = {}
        for role, matrix in matrices.items():
            casts[role] = te_nvfp4.cast(matrix, role, rounding="nearest")
            rows = te_nvfp4.cast(matrix, role, rounding="nearest", columns=False).rows
            expected = nvfp4.cast(matrix, role, rounding="nearest")
            what = f"{_name(role)} of {tuple(matrix.shape)}"
            yield from _of_factor(rows, expected.rows, f"rows alone of {what}")
            yield from _of_factor(casts[role].rows, expected.rows, f"rows of {what}")
            yield from _of_factor(casts[role].columns, expected.columns, f"columns of {what}")
        if rounding == "stochastic":
            yield from _of_draws(matrices["gradient"])
            casts["gradient"] = te_nvfp4.cast(matrices["gradient"], "gradient", rounding="stochastic")
        x, weight, grad = casts.values()
        yield from _of_result("forward", weight.rows, x.rows)
        yield from _of_result("input gradient", weight.columns, grad.rows)
        truth, terms = _truth(x.columns, grad.columns)
        multiply = partial(te_nvfp4.product, x.columns, grad.columns)
        yield from of_sum(multiply, truth, terms, "weight gradient")


def _name(role: Role) -> str:
    return f"a {role}" if role != "input" else "an input"


def _drawn(rows: int, columns: int, device: torch.device) -> Tensor:
    """In bf16: multiples of a power of two for each block, of which sums of 16 are exact in fp32."""
    draw = torch.Generator().manual_seed(rows + columns)
    numbers = (torch.randn(rows, columns, generator=draw) * 48).round().clamp(-255, 255) / 64
    blocks = (-(-rows // BLOCK), columns // BLOCK)
    exponents = torch.randint(-2, 3, blocks, generator=draw).float()
    numbers *= torch.exp2(exponents).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    # a block of zeros in both layouts
    numbers[2 * BLOCK : 3 * BLOCK, :BLOCK] = 0.0
    return numbers.to(device, torch.bfloat16)


def _of_factor(found: Factor, expected: Factor, what: str) -> Iterator[str]:
    mine = nvfp4.scales_of(found)
    others = nvfp4.scales_of(expected)
    yield from of_bytes(mine.amax, others.amax, f"largest elements of {what}")
    yield from of_bytes(mine.of_blocks, others.of_blocks, f"scales of {what}")
    yield from of_bytes(_with_one_zero(found.values), _with_one_zero(expected.values), f"pairs of numbers of {what}")


def _with_one_zero(values: Tensor) -> Tensor:
    """Codes [L, N], -0 as 0."""
    codes = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    return torch.where(codes == 8, 0, codes)


def _of_draws(grad_MO: Tensor) -> Iterator[str]:
    wide = in_units(grad_MO).to(torch.float32)
    turned = nvfp4.rotated(wide.t()).to(grad_MO.dtype).to(torch.float32)
    exact = nvfp4.cast(grad_MO, "gradient", rounding="nearest")
    layouts = {"rows": (grad_MO.to(torch.float32), exact.rows), "columns": (turned, exact.columns)}
    found: dict[str, list[Tensor]] = {name: [] for name in layouts}
    for _ in range(_DRAWS):
        cast = te_nvfp4.cast(grad_MO, "gradient", rounding="stochastic")
        for name, factor in (("rows", cast.rows), ("columns", cast.columns)):
            _, expected = layouts[name]
            yield from of_bytes(factor.scale, expected.scale, f"scales of {name} that are rounded at random")
            found[name].append(nvfp4.dequantised(factor, dtype=torch.float64))
    for name, (numbers_LN, expected) in layouts.items():
        yield from _of_neighbours(numbers_LN, expected, torch.stack(found[name]), name)


def _of_neighbours(exact_LN: Tensor, factor: Factor, found_CLN: Tensor, name: str) -> Iterator[str]:
    """Numbers and how they were rounded in each of C casts. `factor`: has their scales."""
    scales = nvfp4.scales_of(factor)
    step = scales.of_blocks.view(torch.float8_e4m3fn).to(torch.float64)
    step = step * (scales.amax.to(torch.float64) / (nvfp4.LARGEST * nvfp4.LARGEST_SCALE))
    step_LN = step.repeat_interleave(BLOCK, 1)
    size = (exact_LN.to(torch.float64).abs() / step_LN.clamp(min=1e-300)).clamp(max=LARGEST)
    _, low, gap = nvfp4.neighbours(size)
    share = (size - low) / gap
    rounded = found_CLN * exact_LN.to(torch.float64).sign() / step_LN.clamp(min=1e-300)
    ups = (rounded - low) / gap
    is_neighbour = (ups.abs() < 1e-4) | ((ups - 1).abs() < 1e-4)
    # scales are inverted in fp32: what lies upon a number may lie beside it, on either side
    is_upon = (exact_LN == 0) | (share < 1e-4) | (share > 1 - 1e-4)
    is_near = (rounded - size).abs() <= NUMBERS[-1] - NUMBERS[-2]
    wrong = int((~(is_neighbour | (exact_LN == 0) | (is_upon & is_near))).sum())
    if wrong:
        yield f"{wrong} of {is_neighbour.numel()} numbers of {name} are rounded at random to no neighbour"
    off = torch.where(is_upon, 0.0, ups - share)
    variance = torch.where(is_upon, 0.0, share * (1 - share))
    for weights, what in ((torch.ones_like(share), "in the mean"), (share - 0.5, "by how near they are")):
        total = (off * weights).sum().abs()
        casts = len(found_CLN)
        allowed = _DEVIATIONS * (casts * (variance * weights.square()).sum()).sqrt()
        allowed += _OF_BITS * casts * torch.where(is_upon, 0.0, weights.abs()).sum()
        if not total <= allowed:
            yield f"numbers of {name} that are rounded at random do not go up as often as they have to, {what}"
    if variance.sum() > 0 and torch.equal(found_CLN[0], found_CLN[1]):
        yield f"numbers of {name} are rounded by the same draws each time"


def _of_result(what: str, a: Factor, b: Factor) -> Iterator[str]:
    found = te_nvfp4.product(a, b, dtype=torch.bfloat16)
    truth, terms = _truth(a, b)
    yield from of_numbers(found, truth, OF_RESULTS * terms, what)


def _truth(a: Factor, b: Factor) -> tuple[Tensor, Tensor]:
    """-> a product in fp64, and the sums of its terms' sizes."""
    a_wide = nvfp4.dequantised(a, dtype=torch.float64)
    b_wide = nvfp4.dequantised(b, dtype=torch.float64)
    return b_wide @ a_wide.t(), b_wide.abs() @ a_wide.abs().t()
