"""Casts to NVFP4 and products of such matrices as equations (NVIDIA 2025, Pretraining Large Language Models with NVFP4,
arXiv 2509.25149).

Note "NVFP4". Numbers are e2m1, of which the largest is 6, and 16 of them along which a product sums share a scale in
e4m3; a matrix has one more in fp32, made of its largest element amax, so that the largest scale is e4m3's largest: a
number stands for code · scale · amax / (6 · 448). Two numbers are a byte, the first in its lower half. The three
products take lines along which they sum: rows [M, K / 2] of a matrix, and columns [K, M / 2], turned round.

weight    blocks of 16x16, so that rows and columns are the same numbers
input     rows in blocks of 1x16; columns are rotated first
gradient  as an input, and rounded at random, so that what is lost is zero in the mean

Note "Rotation". Columns are what weight gradients sum over, so that both factors can be turned by one orthogonal
matrix: each 16 tokens of a feature by a Hadamard matrix with signs, which spreads what stands out. Signs are fixed, as
Transformer Engine has them, and what is rotated is rounded to the matrix's format.

Note "Draws". Numbers that round are those of torch's generator of the device, in the reference and in Transformer
Engine, which draw others of it. A step sets it: see parallelism/fp8.py.

What is not finite is not kept: e2m1 has neither NaN nor infinity. Residual streams pass it on beside the products.
"""

# M rows, K columns of a matrix; L lines along which a product sums, N numbers and n blocks of each

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megaspec_kernels.linear.factors import Cast, Factor
from megaspec_kernels.linear.mxfp8 import in_units

BLOCK = 16
LARGEST = 6.0
LARGEST_SCALE = 448.0
HEAD = 16
"""Bytes before the scales of a Factor, in the first four of which amax lies, so that what follows is aligned."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What codes 0 to 7 stand for; with 8 more they are negative."""
# Between which codes a number lies, and whether one in the middle goes up: to the even code.
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of the rotation."""

Rounding = Literal["stochastic", "nearest"]
"""Of gradients; everything else is rounded to nearest."""
Role = Literal["input", "weight", "gradient"]


class Agreement(NamedTuple):
    """How ranks that hold parts of a matrix come to its largest element."""

    largest: Callable[[Tensor], Tensor]
    """The elementwise maximum over them."""
    group: Any
    """Their process group; None: one rank holds all."""


ALONE = Agreement(lambda amax: amax, None)


def cast(x_MK: Tensor, role: Role, *, rounding: Rounding, columns: bool = True, agreement: Agreement = ALONE) -> Cast:
    """A matrix in rows, and in columns where they are asked for. K is a multiple of 32; in columns there are zeros
    behind M rows up to one."""
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    lines = [x_MK.to(wide)]
    if columns:
        turned = in_units(x_MK).t().to(wide)
        if role != "weight":
            turned = rotated(turned).to(x_MK.dtype).to(wide)
        lines.append(turned)
    amax = torch.stack([one.abs().amax() for one in lines]).to(torch.float32)
    amax = agreement.largest(amax)
    at_random = role == "gradient" and rounding == "stochastic"
    found = []
    for i, one in enumerate(lines):
        found.append(_cast(one, amax[i : i + 1], squares=role == "weight", at_random=at_random))
    return Cast(found[0], found[1] if columns else None)


def _cast(x_LN: Tensor, amax: Tensor, *, squares: bool, at_random: bool) -> Factor:
    encode = torch.clamp(LARGEST * LARGEST_SCALE / amax, max=torch.finfo(torch.float32).max)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    of_blocks = x_LN.unflatten(1, (-1, BLOCK))
    block_amax_Ln = of_blocks.abs().amax(2)
    if squares:
        block_amax_Ln = block_amax_Ln.unflatten(0, (-1, BLOCK)).amax(1).repeat_interleave(BLOCK, 0)
    # in this order of operations, as Transformer Engine has it
    scale = block_amax_Ln.to(torch.float32) * (encode * torch.tensor(1 / LARGEST, dtype=torch.float32))
    scale = scale.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    factor = 1.0 / (scale.to(torch.float32) * (1.0 / encode))
    factor = factor.clamp(max=torch.finfo(torch.float32).max)
    scaled = (of_blocks * factor[:, :, None]).clamp(-LARGEST, LARGEST).flatten(1)
    codes = coded(scaled, at_random=at_random)
    values = codes[:, 0::2] | (codes[:, 1::2] << 4)
    # columns were turned round without being moved
    return Factor(values.contiguous(), packed_scale(scale.view(torch.uint8), amax))


def coded(scaled: Tensor, *, at_random: bool) -> Tensor:
    """Numbers up to 6 -> their codes. To nearest, ties to the even code, or at random to one of both neighbours so that
    the mean is the number."""
    size = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    if at_random:
        below, low, gap = neighbours(size)
        draws = torch.rand(size.shape, dtype=torch.float32, device=size.device)
        code = (below + (draws < (size - low) / gap)).to(torch.uint8)
    else:
        for middle, goes_up in _MIDDLES:
            code += size >= middle if goes_up else size > middle
    return code | (torch.signbit(scaled).to(torch.uint8) << 3)


class Neighbours(NamedTuple):
    """Of sizes from 0 to 6: e2m1's number at or below each, and the next one above."""

    code: Tensor
    """int64: of the lower one."""
    low: Tensor
    gap: Tensor
    """From the lower one to the upper one."""


def neighbours(size: Tensor) -> Neighbours:
    """Of 6 the lower one is 4."""
    numbers = torch.tensor(NUMBERS, dtype=size.dtype, device=size.device)
    code = torch.zeros_like(size, dtype=torch.int64)
    for number in NUMBERS[1:-1]:
        code += size >= number
    low = numbers[code]
    return Neighbours(code, low, numbers[code + 1] - low)


def rotated(x_LN: Tensor) -> Tensor:
    """Each 16 numbers of a line by the rotation. N is a multiple of 16."""
    turn = _rotation().to(x_LN.device, x_LN.dtype)
    return (x_LN.unflatten(1, (-1, BLOCK)) @ turn).flatten(1)


@cache
def _rotation() -> Tensor:
    """[16, 16] in fp64: signs on the rows of a Hadamard matrix (Sylvester 1867), over 4."""
    index = torch.arange(BLOCK, device="cpu")
    both = index[:, None] & index[None, :]
    ones = sum((both >> bit) & 1 for bit in range(4))
    signs = torch.tensor(SIGNS, dtype=torch.float64, device="cpu")
    return signs[:, None] * (1.0 - 2.0 * (ones % 2)) / 4


def packed_scale(scale_Ln: Tensor, amax: Tensor) -> Tensor:
    """Bytes of e4m3 and fp32 [1] -> one tensor of bytes."""
    head = torch.zeros(HEAD, dtype=torch.uint8, device=scale_Ln.device)
    head[:4] = amax.view(torch.uint8)
    return torch.cat((head, scale_Ln.flatten()))


class Scales(NamedTuple):
    """Of a matrix in one layout."""

    of_blocks: Tensor
    """Bytes of e4m3 [L, n]."""
    amax: Tensor
    """fp32 [1]."""


def scales_of(factor: Factor) -> Scales:
    """The inverse of packed_scale."""
    of_blocks = factor.scale[HEAD:].view(factor.values.shape[0], -1)
    return Scales(of_blocks, factor.scale[:4].view(torch.float32))


def product(
    a: Factor,
    b: Factor,
    *,
    dtype: torch.dtype,
    into: Tensor | None = None,
    overwrite: bool = True,
) -> Tensor:
    """B Aᵀ of lines that both sum along, [lines of b, lines of a] in `dtype`; in `into` where that is given, added to
    what is there unless `overwrite`."""
    wide = torch.promote_types(torch.float32, dtype)
    found = (dequantised(b, dtype=wide) @ dequantised(a, dtype=wide).t()).to(dtype)
    if into is None:
        return found
    if overwrite:
        return into.copy_(found)
    return into.add_(found)


def dequantised(factor: Factor, *, dtype: torch.dtype) -> Tensor:
    """What lines stand for, [L, N]."""
    scales = scales_of(factor)
    signed = NUMBERS + tuple(-one for one in NUMBERS)
    numbers = torch.tensor(signed, dtype=dtype, device=factor.values.device)
    codes = torch.stack((factor.values & 15, factor.values >> 4), dim=2).flatten(1)
    values = numbers[codes.to(torch.int64)].unflatten(1, (-1, BLOCK))
    each = scales.of_blocks.view(torch.float8_e4m3fn).to(dtype) * (scales.amax.to(dtype) / (LARGEST * LARGEST_SCALE))
    return (values * each[:, :, None]).flatten(1)
