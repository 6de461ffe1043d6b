"""The sum of each token's rows in one kernel, which reads each row once and keeps no copy of them."""

# M tokens, k choices of a token, R rows, D features

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div
from megaspec_kernels.grid import next_power_of_2

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Features that one program takes: the loads of all k rows are under way at once, 16 bytes a thread.
BLOCK = 2048
WARPS = 4

if triton is not None:

    @triton.jit
    def unpermute_kernel(
        y_ptr,
        place_ptr,
        kept_ptr,
        out_ptr,
        D,
        k: tl.constexpr,
        drops: tl.constexpr,
        wide: tl.constexpr,
        b_d: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * b_d + tl.arange(0, b_d)
        total = tl.zeros([b_d], dtype=wide)
        for j in tl.static_range(k):
            row = tl.load(place_ptr + token * k + j)
            mask = at < D
            if drops:
                mask = mask & (tl.load(kept_ptr + token * k + j) != 0)
            total += tl.load(y_ptr + row * D + at, mask=mask, other=0.0).to(wide)
        tl.store(out_ptr + token * D + at, total.to(out_ptr.dtype.element_ty), mask=at < D)


def unpermute(y_RD: Tensor, place_Mk: Tensor, kept_Mk: Tensor | None) -> Tensor:
    """See reference.py."""
    assert place_Mk.dtype == torch.int64, f"places in {place_Mk.dtype}"
    M, k = place_Mk.shape
    D = y_RD.shape[1]
    out = y_RD.new_empty(M, D)
    if out.numel() == 0 or out.is_meta:
        return out
    block = min(BLOCK, next_power_of_2(D))
    place_Mk = place_Mk.contiguous()
    # without dropped choices the kernel does not read it, and any address serves
    kept_bytes = place_Mk
    if kept_Mk is not None:
        kept_bytes = kept_Mk.contiguous().view(torch.uint8)
    unpermute_kernel[(M, ceil_div(D, block))](
        y_RD.contiguous(),
        place_Mk,
        kept_bytes,
        out,
        D,
        k,
        kept_Mk is not None,
        tl.float64 if y_RD.dtype == torch.float64 else tl.float32,
        block,
        num_warps=WARPS,
    )
    return out
