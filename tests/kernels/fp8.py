"""fp8 as its definition has it, in fp64 and in other words than the kernels': what tests hold them to."""

import torch
from torch import Tensor

# Bits of the mantissa, exponent of the smallest normal number, largest number.
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


def on_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of a format, ties to even; beyond the largest one the largest."""
    mantissa, least, largest = FORMATS[dtype]
    x = x.double()
    _, exponent = torch.frexp(x)
    # numbers between 2^e and 2^(e + 1) lie 2^(e - mantissa) apart
    step = torch.exp2((exponent - 1).clamp(min=least).double() - mantissa)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def power_of_two_scale(amax: float, dtype: torch.dtype) -> float:
    """The smallest power of two with which amax fits, by trying them."""
    if amax == 0:
        return 1.0
    largest = FORMATS[dtype][2]
    scale = 2.0**-126
    while amax > largest * scale:
        scale *= 2
    return scale


def quantised(x: Tensor, dtype: torch.dtype, block: tuple[int | None, int | None]) -> Tensor:
    """What is left of a matrix [M, K] when the elements of each block are put on the grid by a scale of their own."""
    x = x.double()
    out = torch.empty_like(x)
    rows = block[0] or x.shape[0]
    columns = block[1] or x.shape[1]
    for m in range(0, x.shape[0], rows):
        for k in range(0, x.shape[1], columns):
            part = x[m : m + rows, k : k + columns]
            scale = power_of_two_scale(part.abs().max().item(), dtype)
            out[m : m + rows, k : k + columns] = on_grid(part / scale, dtype) * scale
    return out
