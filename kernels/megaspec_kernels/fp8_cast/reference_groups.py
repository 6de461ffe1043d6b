"""Quantising rows that belong to groups: the largest elements of each group's columns, the cast by scales of groups,
and the turn into columns, group by group. See groups.py, and reference.py for what becomes of elements."""

# E groups, R rows, I columns of a matrix, P rows with padding

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.groups import group_of_rows
from megaspec_kernels.fp8_cast.reference import cast


def group_amax(x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """max|x| of each group's columns, [E, I] in at least fp32; NaN where there is one, zero of a group without rows.

    `ends_E`: int32, ascending: group e has the rows from ends[e - 1] to ends[e].
    """
    wide_RI = x_RI.to(torch.promote_types(x_RI.dtype, torch.float32)).abs()
    E = ends_E.shape[0]
    group_R = group_of_rows(ends_E, x_RI.shape[0])
    # one group more for rows of none
    amax = wide_RI.new_zeros(E + 1, x_RI.shape[1])
    return amax.scatter_reduce(0, group_R[:, None].expand(x_RI.shape), wide_RI, "amax")[:E]


def group_cast(
    x_RI: Tensor, scale: Tensor, ends_E: Tensor, *, dtype: torch.dtype, saturated: Tensor | None = None
) -> Tensor:
    """x / scale in fp8 [R, I]; rows of no group are zero.

    `scale`: [E or 1, I or 1], of each group's columns. `saturated`: see reference.py.
    """
    E = ends_E.shape[0]
    group_R = group_of_rows(ends_E, x_RI.shape[0])
    has_group_R = group_R < E
    scale_RI = scale.expand(E, -1)[group_R.clamp(max=E - 1)]
    kept_RI = torch.where(has_group_R[:, None], x_RI, 0)
    values_RI, _ = cast(kept_RI, scale_RI.expand(x_RI.shape), block=(1, 1), dtype=dtype, saturated=saturated)
    return values_RI


def group_columns(x_RI: Tensor, ends_E: Tensor, ends_of_padded_E: Tensor, *, columns: int) -> Tensor:
    """[R, I] in fp8 -> [I, P] with P = `columns`: the rows of each group in columns, with zeros behind them up to where
    the padded group ends, and behind all groups."""
    starts = [0, *ends_E.tolist()]
    padded_starts = [0, *ends_of_padded_E.tolist()]
    x_bytes = x_RI.view(torch.uint8)
    out_IP = x_bytes.new_zeros(x_RI.shape[1], columns)
    for e, place in enumerate(padded_starts[:-1]):
        rows = x_bytes[starts[e] : starts[e + 1]]
        out_IP[:, place : place + rows.shape[0]] = rows.t()
    return out_IP.view(x_RI.dtype)
