"""A product of fp8 matrices with scales: dequantised and multiplied, in at least fp32."""

# M rows, N columns of the result, K numbers that each is a sum over

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import Block, spread


def scaled_product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
    fast: bool = False,
    into: Tensor | None = None,
    overwrite: bool = False,
) -> Tensor:
    """(a · a_scale) (b · b_scale)ᵀ, [M, N] in `dtype`.

    Both factors are contiguous along K, the way that Hopper's tensor cores take them. Scales are as fp8_cast makes
    them: one for each block. `fast`: sums may be kept in fewer bits than fp32 has; not here. `into`: [M, N], contiguous
    and in `dtype`: the product is added to it, or where it is to `overwrite` replaces it; it is what is returned.
    """
    wide = torch.promote_types(a_scale.dtype, dtype)
    a = a_MK.to(wide) * spread(a_scale, a_block, a_MK.shape)
    b = b_NK.to(wide) * spread(b_scale, b_block, b_NK.shape)
    product = (a @ b.t()).to(dtype)
    if into is None:
        return product
    if overwrite:
        return into.copy_(product)
    return into.add_(product)
