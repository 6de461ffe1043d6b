"""Quantising rows that belong to groups, in a kernel for each of the three steps; the host reads no group's size."""

# E groups, R rows, I columns of a matrix, P rows with padding

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import LARGEST

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.fp8_cast.triton import INTERPRETED, fp8_bytes
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Rows and columns of a tile.
TILE = 128
AMAX_ROWS = 32
# Programs that share the rows of a group.
AMAX_PROGRAMS = 16
WARPS = 8

if triton is not None:

    @triton.jit
    def group_amax_kernel(x_ptr, ends_ptr, out_ptr, n_columns, rows_at_once: tl.constexpr, tile: tl.constexpr):
        group = tl.program_id(0)
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(ends_ptr + group)
        i = tl.program_id(1) * tile + tl.arange(0, tile)
        step = tl.num_programs(2) * rows_at_once
        bits = tl.zeros([rows_at_once, tile], tl.int32)
        for first in range(start + tl.program_id(2) * rows_at_once, end, step):
            r = first + tl.arange(0, rows_at_once)
            mask = (r < end)[:, None] & (i < n_columns)[None, :]
            x = tl.load(x_ptr + r.to(tl.int64)[:, None] * n_columns + i[None, :], mask=mask, other=0.0).to(tl.float32)
            # without the sign bits of floats are ordered as they are, infinity above all numbers and NaN above it
            bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        tl.atomic_max(out_ptr + group.to(tl.int64) * n_columns + i, tl.max(bits, axis=0), mask=i < n_columns)

    @triton.jit
    def groups_of(r, ends_ptr, E, block: tl.constexpr):
        """The group of each row of a tile; E behind the last end. `block`: a power of two from E on."""
        e = tl.arange(0, block)
        ends = tl.load(ends_ptr + e, mask=e < E, other=2147483647)
        return tl.sum((r[:, None] >= ends[None, :]).to(tl.int32), axis=1)

    @triton.jit
    def group_cast_kernel(
        x_ptr,
        scale_ptr,
        ends_ptr,
        out_ptr,
        saturated_ptr,
        R,
        n_columns,
        E,
        group_stride,
        column_stride,
        largest: tl.constexpr,
        counts: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        block: tl.constexpr,
        tile: tl.constexpr,
    ):
        r = tl.program_id(0) * tile + tl.arange(0, tile)
        i = tl.program_id(1) * tile + tl.arange(0, tile)
        group = groups_of(r, ends_ptr, E, block)
        inside = (r < R)[:, None] & (i < n_columns)[None, :]
        mask = inside & (group < E)[:, None]
        at = r.to(tl.int64)[:, None] * n_columns + i[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        place = group.to(tl.int64)[:, None] * group_stride + i[None, :] * column_stride
        scale = tl.load(scale_ptr + place, mask=mask, other=1.0)
        # 2^-e for 2^e, by its bits
        inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        y = x * inverse
        is_infinite = (x == float("inf")) | (x == -float("inf"))
        over = (tl.abs(y) > largest) & (is_infinite == 0)
        if counts:
            tl.atomic_add(saturated_ptr, tl.sum(tl.sum(over.to(tl.int64), axis=1), axis=0))
        # comparisons leave NaN as it is
        y = tl.where(y > largest, largest, y)
        y = tl.where(y < -largest, -largest, y)
        # one NaN for all that is not finite
        y = tl.where(is_infinite | (x != x), float("nan"), y)
        if interpreted:
            q = fp8_bytes(y, mantissa, least_exponent, largest).to(tl.uint8)
        elif mantissa == 3:
            q = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            q = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        tl.store(out_ptr + at, q, mask=inside)

    @triton.jit
    def group_columns_kernel(
        x_ptr, ends_ptr, padded_ptr, out_ptr, n_columns, P, E, block: tl.constexpr, tile: tl.constexpr
    ):
        p = tl.program_id(0) * tile + tl.arange(0, tile)
        i = tl.program_id(1) * tile + tl.arange(0, tile)
        group = groups_of(p, padded_ptr, E, block)
        has_group = group < E
        is_later = has_group & (group > 0)
        start = tl.load(ends_ptr + group - 1, mask=is_later, other=0)
        padded_start = tl.load(padded_ptr + group - 1, mask=is_later, other=0)
        end = tl.load(ends_ptr + group, mask=has_group, other=0)
        r = start + p - padded_start
        mask = (has_group & (r < end))[:, None] & (i < n_columns)[None, :]
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * n_columns + i[None, :], mask=mask, other=0)
        # to transposed addresses: tl.trans has corrupted fp8 tiles
        out_mask = (p < P)[:, None] & (i < n_columns)[None, :]
        tl.store(out_ptr + i.to(tl.int64)[None, :] * P + p[:, None], x, mask=out_mask)


def group_amax(x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """See reference_groups.py."""
    E = ends_E.shape[0]
    I = x_RI.shape[1]  # noqa: E741
    bits = torch.zeros(E, I, dtype=torch.int32, device=x_RI.device)
    if x_RI.numel() and not x_RI.is_meta:
        grid = (E, triton.cdiv(I, TILE), AMAX_PROGRAMS)
        group_amax_kernel[grid](x_RI.contiguous(), ends_E, bits, I, AMAX_ROWS, TILE, num_warps=4)
    return bits.view(torch.float32)


def group_cast(
    x_RI: Tensor, scale: Tensor, ends_E: Tensor, *, dtype: torch.dtype, saturated: Tensor | None = None
) -> Tensor:
    """See reference_groups.py."""
    assert x_RI.dtype != torch.float64, "the kernel computes in fp32"
    assert scale.dtype == torch.float32, f"scales in {scale.dtype}"
    R, I = x_RI.shape  # noqa: E741
    out = x_RI.new_empty(R, I, dtype=dtype)
    if x_RI.numel() == 0 or x_RI.is_meta:
        return out
    E = ends_E.shape[0]
    assert scale.shape[0] in (1, E), f"{tuple(scale.shape)} for {E} groups"
    assert scale.shape[1] in (1, I), f"{tuple(scale.shape)} for {I} columns"
    scale = scale.contiguous()
    group_cast_kernel[(triton.cdiv(R, TILE), triton.cdiv(I, TILE))](
        x_RI.contiguous(),
        scale,
        ends_E,
        out.view(torch.uint8),
        x_RI if saturated is None else saturated,
        R,
        I,
        E,
        # a scale for all has no steps
        scale.shape[1] if scale.shape[0] > 1 else 0,
        1 if scale.shape[1] > 1 else 0,
        largest=LARGEST[dtype],
        counts=saturated is not None,
        mantissa=3 if dtype == torch.float8_e4m3fn else 2,
        least_exponent=-6 if dtype == torch.float8_e4m3fn else -14,
        interpreted=INTERPRETED,
        block=triton.next_power_of_2(E),
        tile=TILE,
        num_warps=WARPS,
    )
    return out


def group_columns(x_RI: Tensor, ends_E: Tensor, ends_of_padded_E: Tensor, *, columns: int) -> Tensor:
    """See reference_groups.py."""
    I = x_RI.shape[1]  # noqa: E741
    out = x_RI.new_empty(I, columns)
    if out.numel() == 0 or x_RI.is_meta:
        return out
    E = ends_E.shape[0]
    group_columns_kernel[(triton.cdiv(columns, TILE), triton.cdiv(I, TILE))](
        x_RI.contiguous().view(torch.uint8),
        ends_E,
        ends_of_padded_E,
        out.view(torch.uint8),
        I,
        columns,
        E,
        block=triton.next_power_of_2(E),
        tile=TILE,
        num_warps=WARPS,
    )
    return out
