"""Quantising to fp8 in one kernel for the largest elements and one for the cast, which reads once and writes both
layouts."""

# M rows, K columns of a matrix; m, k blocks along them

import torch
from torch import Tensor

from megaspec_kernels.fp8_cast import formats
from megaspec_kernels.fp8_cast.formats import LARGEST, Block, scale_shape, sizes_of

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Rows and columns of a tile: blocks of 128 are whole tiles.
TILE = 128
WARPS = 8

if triton is not None:
    # The interpreter's conversion drops the carry of a mantissa that rounds up to the next power of two, and NaN
    # (Triton 3.7), so there the kernel makes the bytes itself.
    INTERPRETED = triton.knobs.runtime.interpret

    @triton.jit
    def fp8_bytes(y, mantissa: tl.constexpr, least_exponent: tl.constexpr):
        """fp32 within the range of the format -> uint8, to nearest, ties to even."""
        bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        drop: tl.constexpr = 23 - mantissa
        nearest = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop
        # the exponent of the format's smallest normal number is written as 1
        normal = nearest - ((126 + least_exponent) << mantissa)
        # below it steps are equal: added to 1.5 · 2^23 of them, a number is rounded to a whole number of steps
        per_step: tl.constexpr = 2.0 ** (mantissa - least_exponent)
        many: tl.constexpr = 12582912.0
        subnormal = ((tl.abs(y) * per_step + many) - many).to(tl.int32)
        magnitude = tl.where(tl.abs(y) < 2.0**least_exponent, subnormal, normal)
        magnitude = tl.where(y == y, magnitude, 0x7F)
        sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(y == y, magnitude | sign, 0x7F).to(tl.uint8)

    @triton.jit
    def amax_kernel(x_ptr, out_ptr, M, K, by_row: tl.constexpr, by_column: tl.constexpr, tile: tl.constexpr):
        m = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
        k = tl.program_id(1) * tile + tl.arange(0, tile)
        mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
        # without the sign bits of floats are ordered as they are, infinity above all numbers and NaN above it
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if by_row:
            tl.store(out_ptr + m * tl.num_programs(1) + tl.program_id(1), tl.max(bits, axis=1), mask=m < M)
        elif by_column:
            tl.store(out_ptr + tl.program_id(0).to(tl.int64) * K + k, tl.max(bits, axis=0), mask=k < K)
        else:
            place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            tl.store(out_ptr + place, tl.max(tl.max(bits, axis=1), axis=0))

    @triton.jit
    def cast_kernel(
        x_ptr,
        scale_ptr,
        row_ptr,
        column_ptr,
        saturated_ptr,
        M,
        K,
        block_rows,
        block_columns,
        scale_columns,
        largest: tl.constexpr,
        has_rows: tl.constexpr,
        has_columns: tl.constexpr,
        counts: tl.constexpr,
        mantissa: tl.constexpr,
        least_exponent: tl.constexpr,
        interpreted: tl.constexpr,
        tile: tl.constexpr,
    ):
        m = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
        k = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
        mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
        place = (m // block_rows)[:, None] * scale_columns + (k // block_columns)[None, :]
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
            q = fp8_bytes(y, mantissa, least_exponent)
        elif mantissa == 3:
            q = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            q = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        if has_rows:
            tl.store(row_ptr + m[:, None] * K + k[None, :], q, mask=mask)
        if has_columns:
            # to transposed addresses: tl.trans has corrupted fp8 tiles
            tl.store(column_ptr + k[None, :] * M + m[:, None], q, mask=mask)


def amax(x_MK: Tensor, *, block: Block) -> Tensor:
    """See reference.py."""
    M, K = x_MK.shape
    rows, columns = sizes_of(block, x_MK.shape)
    m, k = scale_shape(block, x_MK.shape)
    if x_MK.numel() == 0 or x_MK.is_meta:
        return x_MK.new_zeros(m, k, dtype=torch.float32)
    assert rows in (1, TILE, M), f"blocks of {block}, tiles of {TILE}"
    assert columns in (1, TILE, K), f"blocks of {block}, tiles of {TILE}"
    by_row = rows == 1
    by_column = columns == 1 and not by_row
    tiles = (triton.cdiv(M, TILE), triton.cdiv(K, TILE))
    shape = tiles
    if by_row:
        shape = (M, tiles[1])
    elif by_column:
        shape = (tiles[0], K)
    bits = torch.empty(shape, dtype=torch.int32, device=x_MK.device)
    amax_kernel[tiles](x_MK.contiguous(), bits, M, K, by_row, by_column, TILE, num_warps=WARPS)
    # what is left of each block: a tile of it was one number, or a line of numbers
    if m == 1 and shape[0] > 1:
        bits = bits.amax(0, keepdim=True)
    if k == 1 and shape[1] > 1:
        bits = bits.amax(1, keepdim=True)
    assert bits.shape == (m, k), f"{tuple(bits.shape)} for blocks of {block} in {tuple(x_MK.shape)}"
    return bits.view(torch.float32)


def cast(
    x_MK: Tensor,
    scale_mk: Tensor,
    *,
    block: Block,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = False,
    seen: Tensor | None = None,
    saturated: Tensor | None = None,
    scale_copy: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """See reference.py."""
    assert x_MK.dtype != torch.float64, "the kernel computes in fp32"
    assert scale_mk.dtype == torch.float32, f"scales in {scale_mk.dtype}"
    M, K = x_MK.shape
    by_rows = x_MK.new_empty(M, K, dtype=dtype) if rows else None
    by_columns = x_MK.new_empty(K, M, dtype=dtype) if columns else None
    if x_MK.numel() == 0 or x_MK.is_meta or not (rows or columns):
        return by_rows, by_columns
    block_rows, block_columns = sizes_of(block, x_MK.shape)
    x_MK = x_MK.contiguous()
    cast_kernel[(triton.cdiv(M, TILE), triton.cdiv(K, TILE))](
        x_MK,
        scale_mk.contiguous(),
        # what is not asked for is not written: any address of bytes serves
        (by_rows if rows else by_columns).view(torch.uint8),
        (by_columns if columns else by_rows).view(torch.uint8),
        x_MK if saturated is None else saturated,
        M,
        K,
        block_rows,
        block_columns,
        scale_mk.shape[1],
        largest=LARGEST[dtype],
        has_rows=rows,
        has_columns=columns,
        counts=saturated is not None,
        mantissa=3 if dtype == torch.float8_e4m3fn else 2,
        least_exponent=-6 if dtype == torch.float8_e4m3fn else -14,
        interpreted=INTERPRETED,
        tile=TILE,
        num_warps=WARPS,
    )
    return by_rows, by_columns


def scale_of(amax_mk: Tensor, dtype: torch.dtype) -> Tensor:
    return formats.scale_of(amax_mk, dtype)


def scale(x_MK: Tensor, *, block: Block, dtype: torch.dtype) -> Tensor:
    return formats.scale_of(amax(x_MK, block=block), dtype)
