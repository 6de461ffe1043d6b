"""Zeros for the groups without rows, which a grouped product may leave as they were in memory."""

# E groups, O rows and I columns of each result

import torch
from torch import Tensor

from megaspec.core.divisors import ceil_div

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

BLOCK = 4096
# Programs of each group. One whose group has rows ends after two loads.
PROGRAMS = 64

if triton is not None:

    @triton.jit
    def zero_empty_kernel(out_ptr, ends_ptr, size, block: tl.constexpr):
        group = tl.program_id(0)
        end = tl.load(ends_ptr + group)
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
        if start == end:
            begin = group.to(tl.int64) * size
            for first in range(tl.program_id(1) * block, size, tl.num_programs(1) * block):
                at = first + tl.arange(0, block)
                tl.store(out_ptr + begin + at, tl.zeros([block], out_ptr.dtype.element_ty), mask=at < size)


def zero_empty_groups(out_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Writes zeros into out[e], in place, for each e with ends[e] == ends[e - 1]; ends[-1] counts as 0.

    [E, O, I] contiguous, int32 or int64 [E]. On a GPU nothing but empty groups is read or written, and the host waits
    for nothing.
    """
    assert out_EOI.is_contiguous()
    if out_EOI.numel() == 0:
        return out_EOI
    if out_EOI.device.type != "cuda":
        empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        return out_EOI.masked_fill_(empty_E[:, None, None], 0)
    return zero_with_triton(out_EOI, ends_E)


def zero_with_triton(out_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """See zero_empty_groups."""
    size = out_EOI[0].numel()
    grid = (len(out_EOI), min(PROGRAMS, ceil_div(size, BLOCK)))
    zero_empty_kernel[grid](out_EOI, ends_E, size, BLOCK)
    return out_EOI
