"""Quantising rows that belong to groups: where they lie, the largest elements of each group, and the cast by scales of
groups, in rows and in columns. See groups.py, and reference.py for what becomes of elements."""

# E groups, R rows, I columns of a matrix, P rows with padding, U units of them, M rows of what is gathered

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.groups import Groups, group_of_rows
from megaspec_kernels.fp8_cast.padding import UNIT, padded_rows
from megaspec_kernels.fp8_cast.reference import cast


def groups(ends_E: Tensor, rows: int) -> Groups:
    """Of so many rows, sorted by group. `ends_E`: int32, ascending. The host reads nothing."""
    sizes_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
    units_E = ((sizes_E + (UNIT - 1)) // UNIT).clamp(min=1)
    last_unit_E = units_E.cumsum(0)
    count = padded_rows(rows, ends_E.shape[0]) // UNIT
    unit_U = torch.arange(count, device=ends_E.device)
    group_U = torch.searchsorted(last_unit_E, unit_U, right=True)
    # one group more, of the rows behind the last end
    starts = torch.cat((ends_E.new_zeros(1), ends_E))
    ends = torch.cat((ends_E, ends_E.new_full((1,), rows)))
    first_units = torch.cat((last_unit_E.new_zeros(1), last_unit_E))
    first_U = starts[group_U] + (unit_U - first_units[group_U]) * UNIT
    return Groups(
        ends=ends_E,
        padded=(last_unit_E * UNIT).to(torch.int32),
        first=first_U.to(torch.int32),
        last=ends[group_U].to(torch.int32),
        group=group_U.to(torch.int32),
        rows=rows,
    )


def group_amax(x_RI: Tensor, ends_E: Tensor, *, by_column: bool = False) -> Tensor:
    """max|x| of each group [E, 1], or `by_column` of each group's columns [E, I], in at least fp32; NaN where there is
    one, zero of a group without rows.

    `ends_E`: int32, ascending: group e has the rows from ends[e - 1] to ends[e].
    """
    wide_RI = x_RI.to(torch.promote_types(x_RI.dtype, torch.float32)).abs()
    E = ends_E.shape[0]
    group_R = group_of_rows(ends_E, x_RI.shape[0])
    # one group more for rows of none
    amax = wide_RI.new_zeros(E + 1, x_RI.shape[1])
    amax = amax.scatter_reduce(0, group_R[:, None].expand(x_RI.shape), wide_RI, "amax")[:E]
    return amax if by_column else amax.amax(1, keepdim=True)


def group_cast(
    x: Tensor,
    scale: Tensor,
    groups: Groups,
    *,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = False,
    index_R: Tensor | None = None,
    seen: Tensor | None = None,
    saturated: Tensor | None = None,
    scale_copy: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """x / scale in fp8 -> [R, I] where `rows`, rows of no group zero, and [I, P] where `columns`: the rows of each
    group with zeros behind them up to where the padded group ends, and behind all groups.

    `x`: [R, I]; with `index_R`, int32, [M, I] of which row r is x[index[r]], zeros where that is negative. `scale`: [E
    or 1, I or 1], of each group's columns, powers of two. `seen`, `saturated`, `scale_copy`: see reference.py; of what
    belongs to a group.
    """
    if index_R is None:
        x_RI = x
    else:
        x_RI = torch.where(index_R[:, None] >= 0, x[index_R.clamp(min=0)], 0)
    E = groups.ends.shape[0]
    group_R = group_of_rows(groups.ends, groups.rows)
    kept_RI = torch.where((group_R < E)[:, None], x_RI, 0)
    scale_RI = scale.expand(E, -1)[group_R.clamp(max=E - 1)].expand(x_RI.shape)
    values_RI, _ = cast(kept_RI, scale_RI, block=(1, 1), dtype=dtype, seen=seen, saturated=saturated)
    if scale_copy is not None:
        scale_copy.copy_(scale)
    by_columns = _columns(values_RI, groups) if columns else None
    return values_RI if rows else None, by_columns


def _columns(values_RI: Tensor, groups: Groups) -> Tensor:
    """[R, I] in fp8 -> [I, P]"""
    row_P = groups.first.repeat_interleave(UNIT) + torch.arange(UNIT, device=groups.first.device).repeat(
        groups.first.shape[0]
    )
    is_row_P = (row_P < groups.last.repeat_interleave(UNIT)) & (row_P < groups.rows)
    # as bytes: they are moved, not computed with
    bytes_RI = values_RI.view(torch.uint8)
    one_more = torch.cat((bytes_RI, bytes_RI.new_zeros(1, bytes_RI.shape[1])))
    columns = one_more[torch.where(is_row_P, row_P, groups.rows)].t().contiguous()
    return columns.view(values_RI.dtype)
