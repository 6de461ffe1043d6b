"""Blocks of attention put together in place: each number of a block is read once, and no wide copy of it is made."""

# B sequences, T queries or keys, N heads, H head size

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.grid import next_power_of_2

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Numbers of a program.
BLOCK = 2048
WARPS = 4

if triton is not None:

    @triton.jit
    def _rows_of(rows, T, N, b_r: tl.constexpr):
        """-> the numbers of a program's rows, their b, t and n, and which there are."""
        row = tl.program_id(0).to(tl.int64) * b_r + tl.arange(0, b_r)
        return row // (T * N), row // N % T, row % N, row < rows

    @triton.jit
    def merge_kernel(
        out_ptr, lse_ptr, new_ptr, new_lse_ptr, rows, T, N, H,
        out_b, out_t, out_n, lse_b, lse_n, lse_t, new_b, new_t, new_n, new_lse_b, new_lse_n, new_lse_t,
        b_r: tl.constexpr, b_h: tl.constexpr,
    ):  # fmt: skip
        b, t, n, there = _rows_of(rows, T, N, b_r)
        lse = tl.load(lse_ptr + b * lse_b + n * lse_n + t * lse_t, mask=there, other=0.0)
        new_lse = tl.load(new_lse_ptr + b * new_lse_b + n * new_lse_n + t * new_lse_t, mask=there, other=0.0)
        weight = 1.0 / (1.0 + tl.exp(lse - new_lse.to(lse.dtype)))
        h = tl.arange(0, b_h)
        mask = there[:, None] & (h < H)[None, :]
        out_at = out_ptr + (b * out_b + t * out_t + n * out_n)[:, None] + h[None, :]
        new_at = new_ptr + (b * new_b + t * new_t + n * new_n)[:, None] + h[None, :]
        out = tl.load(out_at, mask=mask, other=0.0)
        new = tl.load(new_at, mask=mask, other=0.0).to(out.dtype)
        tl.store(out_at, out + weight[:, None] * (new - out), mask=mask)

    @triton.jit
    def add_kernel(
        total_ptr, new_ptr, rows, T, N, H, total_b, total_t, total_n, new_b, new_t, new_n,
        b_r: tl.constexpr, b_h: tl.constexpr,
    ):  # fmt: skip
        b, t, n, there = _rows_of(rows, T, N, b_r)
        h = tl.arange(0, b_h)
        mask = there[:, None] & (h < H)[None, :]
        total_at = total_ptr + (b * total_b + t * total_t + n * total_n)[:, None] + h[None, :]
        new_at = new_ptr + (b * new_b + t * new_t + n * new_n)[:, None] + h[None, :]
        total = tl.load(total_at, mask=mask, other=0.0)
        tl.store(total_at, total + tl.load(new_at, mask=mask, other=0.0).to(total.dtype), mask=mask)


def merge(out_BTNH: Tensor, lse_BNT: Tensor, new_BTNH: Tensor, new_lse_BNT: Tensor) -> None:
    """See reference.py. The numbers of a head of `out` lie side by side; no part of `new` may lie in `out`."""
    assert out_BTNH.dtype == lse_BNT.dtype, f"output in {out_BTNH.dtype}, its log-sum-exp in {lse_BNT.dtype}"
    new_BTNH = _dense(new_BTNH)
    rows, sizes, b_r, b_h = _divided(out_BTNH, new_BTNH)
    if rows:
        merge_kernel[(ceil_div(rows, b_r),)](
            out_BTNH, lse_BNT, new_BTNH, new_lse_BNT, rows, *sizes,
            *out_BTNH.stride()[:3], *lse_BNT.stride(), *new_BTNH.stride()[:3], *new_lse_BNT.stride(),
            b_r, b_h, num_warps=WARPS,
        )  # fmt: skip
        # not in the kernel, whose warps read a row's log-sum-exp each for itself: one would find what another wrote
        torch.logaddexp(lse_BNT, new_lse_BNT, out=lse_BNT)


def add(total_BTNH: Tensor, new_BTNH: Tensor) -> None:
    """See reference.py. The numbers of a head of `total` lie side by side; no part of `new` may lie in `total`."""
    new_BTNH = _dense(new_BTNH)
    rows, sizes, b_r, b_h = _divided(total_BTNH, new_BTNH)
    if rows:
        add_kernel[(ceil_div(rows, b_r),)](
            total_BTNH, new_BTNH, rows, *sizes, *total_BTNH.stride()[:3], *new_BTNH.stride()[:3],
            b_r, b_h, num_warps=WARPS,
        )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _divided(total_BTNH: Tensor, new_BTNH: Tensor) -> tuple[int, tuple[int, int, int], int, int]:
    """-> rows, (T, N, H), and of a program rows and numbers of each."""
    B, T, N, H = total_BTNH.shape
    assert new_BTNH.shape == total_BTNH.shape, f"{tuple(new_BTNH.shape)} into {tuple(total_BTNH.shape)}"
    apart = total_BTNH.stride(-1), new_BTNH.stride(-1)
    assert apart == (1, 1), f"the numbers of a head lie {apart} apart"
    b_h = next_power_of_2(H)
    return B * T * N, (T, N, H), max(1, BLOCK // b_h), b_h
