"""Products of fp8 rows with the fp8 matrices of their groups: dequantised and multiplied, in at least fp32.

y_e  = x_e W_eᵀ     rows in, rows out: sums over what is the last dimension of both
dW_e = dy_eᵀ x_e    a matrix a group: sums over the rows of each, both in columns
"""

# E groups, R rows, K numbers that a sum is over, N columns of the result, P rows with padding, O outputs, I inputs

import torch
from torch import Tensor

from megaspec_kernels.grouped.reference import grouped_product


def product(
    a_RK: Tensor,
    b_ENK: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    ends_E: Tensor,
    *,
    dtype: torch.dtype,
    whole: bool = True,
    fast: bool = False,
) -> Tensor:
    """(a · a_scale) (b_e · b_scale)ᵀ for the rows of each group e, [R, N] in `dtype`; rows of no group are zero.

    `a_scale`: [R or 1, 1]. `b_scale`: [E, N or 1]. Both factors lie along K in memory, the way that Hopper's tensor
    cores take them. `ends_E`: int32, ascending. `whole`: every row belongs to a group. `fast`: sums may be kept in
    fewer bits than fp32 has; not here.
    """
    wide = torch.promote_types(a_scale.dtype, dtype)
    a = a_RK.to(wide) * a_scale
    b = b_ENK.to(wide) * b_scale[:, :, None]
    return grouped_product(a, b.transpose(1, 2), ends_E, whole=whole).to(dtype)


def weight_product(
    a_OP: Tensor, b_IP: Tensor, a_scale: Tensor, b_scale: Tensor, ends_E: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """(a_e · a_scale) (b_e · b_scale)ᵀ for each group e of columns, [E, O, I] in `dtype`, which is what it is added up
    in: an implementation that rounds to a narrower format returns that.

    `a_scale`: [E or 1, O or 1]. `b_scale`: [E or 1, I or 1]. `ends_E`: int32, multiples of 16, ascending, no group
    empty (fp8_cast/groups.py, note "Padding").
    """
    wide = torch.promote_types(a_scale.dtype, dtype)
    out_EOI = grouped_product(a_OP.to(wide), b_IP.to(wide).t(), ends_E)
    # powers of two: multiplied with them behind the sum, nothing is rounded
    return (out_EOI * a_scale[:, :, None] * b_scale[:, None, :]).to(dtype)
