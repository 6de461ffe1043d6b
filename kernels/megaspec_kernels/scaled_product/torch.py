"""A product of fp8 matrices through torch's scaled_mm: cuBLASLt on the tensor cores of sm89 and newer."""

# M rows, N columns of the result, K numbers that each is a sum over

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import Block
from megaspec_kernels.scaled_product.scales import as_read, has_short_lines

# What the sides of a product are multiples of.
UNIT = 16


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
    """See reference.py. N and K are multiples of 16; with scales of blocks K is one of 128."""
    product = _product(a_MK, b_NK, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=dtype, fast=fast)
    if into is None:
        return product
    # a pass of its own: torch's scaled product adds to nothing
    if overwrite:
        return into.copy_(product)
    return into.add_(product)


def _product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    if a_MK.is_meta:
        return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)
    is_blocked = has_short_lines(a_block) or has_short_lines(b_block)
    if is_blocked:
        return _of_blocks(a_MK, b_NK, a_scale, b_scale, a_block=a_block, b_block=b_block, dtype=dtype)
    if a_scale.numel() == b_scale.numel() == 1:
        return torch._scaled_mm(
            a_MK, b_NK.t(), scale_a=a_scale.view(()), scale_b=b_scale.view(()), out_dtype=dtype, use_fast_accum=fast
        )
    if dtype == torch.bfloat16:
        # of each row of the result and of each column; a scale of the whole matrix is one for every row of it
        rows = a_scale.expand(a_MK.shape[0], 1).contiguous()
        columns = b_scale.expand(b_NK.shape[0], 1).contiguous().t()
        return torch._scaled_mm(a_MK, b_NK.t(), scale_a=rows, scale_b=columns, out_dtype=dtype, use_fast_accum=fast)
    # Scales of rows come in front of the sum over K, and torch writes no fp32 with them: it is multiplied with them
    # afterwards, which rounds nothing, since they are powers of two.
    one = torch.ones((), device=a_MK.device)
    y_MN = torch._scaled_mm(a_MK, b_NK.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=fast)
    return y_MN.mul_(a_scale).mul_(b_scale.t())


def _of_blocks(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
) -> Tensor:
    """1x128 with 128x128, or with 1x128."""
    a_scale, a_recipe = _for_torch(a_scale, a_block)
    b_scale, b_recipe = _for_torch(b_scale, b_block)
    # fewer bits in the sums are not to be had with scales of blocks
    return F.scaled_mm(a_MK, b_NK.t(), a_scale, a_recipe, b_scale, b_recipe, output_dtype=dtype)


def _for_torch(scale: Tensor, block: Block) -> tuple[Tensor, F.ScalingType]:
    """Scales [m, k] as torch takes them: turned round where they are read, so that torch sees [m, k] of parts of rows
    and [k, m] of squares."""
    kind = F.ScalingType.BlockWise128x128
    if block[0] == 1:
        kind = F.ScalingType.BlockWise1x128
    return as_read(scale, block).t(), kind
