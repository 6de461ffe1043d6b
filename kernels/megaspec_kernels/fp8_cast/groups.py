"""Groups of rows, each with scales of its own, and where the rows of each lie when a product sums over them.

Note "Padding". A product that sums over the rows of a group reads them along memory, in columns, and every group begins
at a multiple of 16 bytes there, the least that Hopper's tensor memory accelerator reads. So groups are padded to whole
units of rows with zeros, and a group without rows to one unit: its sum is zero then, where a grouped product over no
rows leaves what lay in memory, or stops.

Note "Units". Kernels go through padded rows: a unit is of one group whatever the sizes are, so that each program has
the same work, and the four rows of an int32 of the columns are always of one group. Where the rows of each unit lie is
found once for all casts of a layer of experts. Behind the last group are units of the rows that belong to none.
"""

# E groups, R rows, P rows with padding, U units of them

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.padding import UNIT


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows sorted by group, and the same once each group is padded. All tensors are int32, on the rows' device."""

    ends: Tensor
    """[E], ascending: group e has the rows from ends[e - 1] to ends[e]."""
    padded: Tensor
    """[E]: the end of each group with its padding, multiples of UNIT."""
    first: Tensor
    """[U]: the first row of each unit; past `last` where it has none."""
    last: Tensor
    """[U]: where the rows of its group end."""
    group: Tensor
    """[U]: its group; E: its rows are of none."""
    rows: int
    """R"""

    @property
    def columns(self) -> int:
        """P"""
        return self.first.shape[0] * UNIT

    @cached_property
    def of_rows(self) -> Tensor:
        """int64 [R]: the group of each row; of rows of none, the last one. Found once for all products of a layer."""
        return group_of_rows(self.ends, self.rows).clamp(max=self.ends.shape[0] - 1)


def group_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """[R]: the group of each row; E for those behind the last end."""
    row_R = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, row_R, right=True)


def scale_of_rows(scale_E: Tensor, groups: Groups) -> Tensor:
    """[E, 1] -> [R, 1]: of each row's group; of rows of no group, the last one's. [1, 1] stays as it is."""
    if scale_E.shape[0] == 1:
        return scale_E
    return scale_E[groups.of_rows]
