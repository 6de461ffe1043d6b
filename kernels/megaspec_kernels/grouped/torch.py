"""Grouped matrix products through torch's grouped_mm: on Hopper one CUTLASS kernel that reads the groups itself."""

# E groups, R rows, I inputs, O outputs

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.grouped.empty_groups import zero_empty_groups


def grouped_product(a: Tensor, b: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
    """[R, I], [E, I, O] -> [R, O] or [O, R], [R, I] -> [E, O, I], bf16 summed in fp32; see reference.py.

    The host reads nothing. I and O are multiples of 8 (steps of 16 bytes), R is any number.
    """
    over_rows = b.dim() == 2  # the second form, which sums over the rows of each group
    if a.numel() == 0:
        # grouped_mm refuses a product over no rows at all
        if over_rows:
            return a.new_zeros(ends_E.shape[0], a.shape[0], b.shape[1])
        return a.new_zeros(0, b.shape[2])
    out = F.grouped_mm(_aligned(a), _aligned(b), offs=ends_E)
    if over_rows:
        # nothing says what an empty group holds then: on Blackwell it is what lay in memory (pytorch 172439)
        return zero_empty_groups(out, ends_E)
    if not whole:
        # rows of no group are never written
        past = torch.arange(out.shape[0], device=out.device) >= ends_E[-1]
        return out.masked_fill_(past[:, None], 0)
    return out


def _aligned(x: Tensor) -> Tensor:
    """The same values, dense along rows or columns and with steps of 16 bytes along the other dimension."""
    rows, columns = x.shape[-2:]
    row_stride, column_stride = x.stride()[-2:]
    is_by_rows = column_stride == 1 and row_stride >= columns
    is_by_columns = row_stride == 1 and column_stride >= rows
    # elements from one row to the next, or from one column to the next
    step = 1
    if is_by_rows:
        step = row_stride
    elif is_by_columns:
        step = column_stride
    if step * x.itemsize % 16 == 0:
        return x
    return x.contiguous()
