"""Groups of rows, each with scales of its own, and where the rows of each lie when a product sums over them.

Note "Padding". A product that sums over the rows of a group reads them along memory, in columns, and every group begins
at a multiple of 16 bytes there, the least that Hopper's tensor memory accelerator reads. So groups are padded to whole
units of rows with zeros, and a group without rows to one unit: its sum is zero then, where a grouped product over no
rows leaves what lay in memory, or stops.
"""

# E groups, R rows, P rows with padding

import torch
from torch import Tensor

UNIT = 16


def padded_ends(ends_E: Tensor) -> Tensor:
    """The end of each group once it is padded, int32 [E]. The host reads nothing."""
    sizes_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    units_E = ((sizes_E + (UNIT - 1)) // UNIT).clamp(min=1)
    return (units_E * UNIT).cumsum(0).to(torch.int32)


def padded_rows(rows: int, groups: int) -> int:
    """So many are enough for the padded groups, however the rows are spread over them: known without a look at the
    device."""
    return -(-rows // UNIT) * UNIT + groups * UNIT


def group_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """[R]: the group of each row; E for those behind the last end."""
    row_R = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, row_R, right=True)


def scale_of_rows(scale_E: Tensor, ends_E: Tensor, rows: int) -> Tensor:
    """[E, 1] -> [R, 1]: of each row's group; of rows of no group, the last one's. [1, 1] stays as it is."""
    if scale_E.shape[0] == 1:
        return scale_E
    group_R = group_of_rows(ends_E, rows).clamp(max=ends_E.shape[0] - 1)
    return scale_E[group_R]
