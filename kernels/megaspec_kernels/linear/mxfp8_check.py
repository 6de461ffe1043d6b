"""Whether Transformer Engine's MXFP8 is what mxfp8.py says, on the GPU at hand.

No GPU of ours has such tensor cores, so that no test has seen these kernels run: a run asks them before it trains.
Casts have to make the same bytes, but for the sign of zero, which its kernels differ in among themselves. Products are
held to fp64, of the factors that its casts have made. They may be off by a share of the sum of their terms' sizes:
one scale that is twice as large, or another one's, is off by a tenth and more.
"""

# M tokens, I inputs, O outputs

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.linear import mxfp8, te_mxfp8
from megaspec_kernels.linear.factors import Cast, Factor, Layout
from megaspec_kernels.linear.mxfp8 import BLOCK

# Tokens, inputs and outputs. Of the first its scales have padding on all sides, and tokens fill no block.
SIZES = ((72, 160, 96), (256, 384, 512))
# Of the sum of the terms' sizes: bf16 rounds what comes out, and sums may have fewer bits than fp32; weight gradients
# are added up in fp32.
OF_RESULTS = 2.0**-7
_OF_SUMS = 2.0**-12
_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
E4M3 = torch.float8_e4m3fn


def difference(device: torch.device, gradient: torch.dtype) -> str | None:
    """What differs, in words; None: nothing does. `gradient`: the format of gradients of outputs."""
    return first_of(_differences(device, gradient))


def first_of(differences: Iterator[str]) -> str | None:
    """The first of them, or that what is asked fails; None: there is none."""
    try:
        return next(differences, None)
    except (RuntimeError, ValueError, AssertionError, TypeError, AttributeError) as error:
        # what the package refuses, was not built for, or calls otherwise in another version
        told = str(error).strip().partition("\n")[0]
        return f"it fails: {told}"


def _differences(device: torch.device, gradient: torch.dtype) -> Iterator[str]:
    for M, n_in, n_out in SIZES:
        x_MI = _drawn(M, n_in, device)
        weight_OI = _drawn(n_out, n_in, device)
        grad_MO = _drawn(M, n_out, device)
        for matrix in (x_MI, weight_OI, grad_MO):
            for dtype in dict.fromkeys((E4M3, gradient)):
                yield from _of_casts(matrix, dtype)
        x = te_mxfp8.cast(x_MI, E4M3)
        weight = te_mxfp8.cast(weight_OI, E4M3)
        grad = te_mxfp8.cast(grad_MO, gradient)
        yield from _of_result("forward", "TN", weight.rows, x.rows)
        yield from _of_result("input gradient", "NN", weight.columns, grad.rows)
        truth, terms = _truth("NT", x.columns, grad.columns)
        multiply = partial(te_mxfp8.product, "NT", x.columns, grad.columns)
        yield from of_sum(multiply, truth, terms, "weight gradient (NT)")


def _drawn(rows: int, columns: int, device: torch.device) -> Tensor:
    """In bf16: blocks of many sizes, one that is the format's largest number, and one of zeros, in both layouts."""
    draw = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randn(rows, columns, generator=draw)
    blocks = (-(-rows // BLOCK), columns // BLOCK)
    exponents = torch.randint(-3, 4, blocks, generator=draw).float()
    sizes = torch.exp2(exponents).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    numbers *= sizes
    # what scales are made of, at and beside the border between two of them
    numbers[0, 0] = 448.0
    numbers[1, BLOCK] = 450.0
    numbers[2, 2 * BLOCK] = -57344.0
    numbers[BLOCK : 2 * BLOCK, :BLOCK] = 0.0
    return numbers.to(device, torch.bfloat16)


def _of_casts(matrix: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """In both layouts at once, and in each alone."""
    expected = mxfp8.cast(matrix, dtype)
    what = f"{_NAMES[dtype]} of {tuple(matrix.shape)}"
    both = te_mxfp8.cast(matrix, dtype)
    rows = te_mxfp8.cast(matrix, dtype, columns=False)
    columns = te_mxfp8.cast(matrix, dtype, rows=False)
    for found in (both, Cast(rows.rows, columns.columns)):
        yield from _of_factors(found.rows, expected.rows, f"rows in {what}")
        yield from _of_factors(found.columns, expected.columns, f"columns in {what}")


def _of_factors(found: Factor, expected: Factor, what: str) -> Iterator[str]:
    yield from of_bytes(found.scale, expected.scale, f"scales of {what}")
    yield from of_bytes(_with_one_zero(found.values), _with_one_zero(expected.values), f"numbers of {what}")


def _with_one_zero(values: Tensor) -> Tensor:
    """As bytes, -0 as 0."""
    as_bytes = values.view(torch.uint8)
    return torch.where(as_bytes == 0x80, 0, as_bytes)


def of_bytes(found: Tensor, expected: Tensor, what: str) -> Iterator[str]:
    """What of bytes differs."""
    if found.shape != expected.shape:
        yield f"{what} are {tuple(found.shape)} for {tuple(expected.shape)}"
        return
    wrong = int((found != expected).sum())
    if wrong:
        yield f"{wrong} of {expected.numel()} {what}"


def _of_result(what: str, layout: Layout, a: Factor, b: Factor) -> Iterator[str]:
    found = te_mxfp8.product(layout, a, b, dtype=torch.bfloat16, fast=layout == "TN")
    truth, terms = _truth(layout, a, b)
    yield from of_numbers(found, truth, OF_RESULTS * terms, f"{what} ({layout})")


def of_sum(multiply: Callable[..., Tensor], truth: Tensor, terms: Tensor, what: str) -> Iterator[str]:
    """What of a weight gradient differs, which replaces what is no number, and is added. `multiply`: takes `dtype`,
    `into` and `overwrite`. `truth`, `terms`: the product, and the sums of its terms' sizes."""
    total = torch.full(truth.shape, torch.nan, dtype=torch.float32, device=truth.device)
    for times in (1, 2):
        multiply(dtype=torch.float32, into=total, overwrite=times == 1)
        which = what if times == 1 else f"{what} that is added"
        yield from of_numbers(total, times * truth, times * _OF_SUMS * terms, which)


def _truth(layout: Layout, a: Factor, b: Factor) -> tuple[Tensor, Tensor]:
    """-> a product in fp64, and the sums of its terms' sizes."""
    sizes = []
    for factor in (a, b):
        sizes.append(factor._replace(values=factor.values.to(torch.float32).abs()))
    product = mxfp8.product(layout, a, b, dtype=torch.float64)
    return product, mxfp8.product(layout, *sizes, dtype=torch.float64)


def of_numbers(found: Tensor, truth: Tensor, allowed: Tensor, what: str) -> Iterator[str]:
    """What of numbers is further off than allowed."""
    if found.shape != truth.shape:
        yield f"{what} is {tuple(found.shape)} for {tuple(truth.shape)}"
        return
    # NaN is off, too
    wrong = int((~((found.to(torch.float64) - truth).abs() <= allowed)).sum())
    if wrong:
        yield f"{wrong} of {truth.numel()} numbers of the product {what}"
