"""Norms of many gradients in one pass: each element is read once, by one launch over all of them.

Note "One order". A program adds the squares of a part of one tensor in fp32: each of its lanes a few, then lanes
pairwise. A second launch adds the parts of each tensor in fp64. No sum depends on which program is through first, nor
on which other tensors are asked for.

Squares are in fp32, as in torch's kernel: they overflow above 1.8e19 and vanish below 1e-23. Sums of parts, which
torch's kernel adds in fp32 too, don't.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megaspec_kernels.multi_tensor import NAMES, Programs, lies_aligned, programs_of, sent

try:
    import triton
    import triton.language as tl

    from megaspec_kernels.multi_tensor import typed
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

# Elements that a program asks for at once: 32 a thread, so that memory has enough to do.
BLOCK = 8192
# Elements that one program goes through: it waits for its tensor's address before it can ask for any.
CHUNK = 4 * BLOCK
WARPS = 8
# Parts of a tensor that are loaded at once.
PARTS = 2048
# Layouts and addresses that stay on the device: one for each bucket of gradients.
KEPT = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Where parts of a launch begin is a multiple of this, so that kernels are compiled once.
_LINE = 32

if triton is not None:

    @triton.jit
    def grad_norm_squares_kernel(
        addresses_ptr,
        which_ptr,
        start_ptr,
        size_ptr,
        parts_ptr,
        name: tl.constexpr,
        is_aligned: tl.constexpr,
        chunk: tl.constexpr,
        b_n: tl.constexpr,
    ):
        tensor = tl.load(which_ptr + tl.program_id(0))
        first = tl.multiple_of(tl.load(start_ptr + tl.program_id(0)), 16)
        size = tl.load(size_ptr + tensor)
        g_ptr = typed(tl.load(addresses_ptr + tensor), name, is_aligned)
        if is_aligned:
            size = tl.multiple_of(size, 16)
        squares = tl.zeros([b_n], dtype=tl.float32)
        for begin in range(0, chunk, b_n):
            at = first + begin + tl.arange(0, b_n)
            g = tl.load(g_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            squares += g * g
        tl.store(parts_ptr + tl.program_id(0), tl.sum(squares, 0))

    @triton.jit
    def grad_norm_sums_kernel(parts_ptr, first_ptr, count_ptr, out_ptr, b_p: tl.constexpr):
        tensor = tl.program_id(0)
        first = tl.load(first_ptr + tensor)
        count = tl.load(count_ptr + tensor)
        total = tl.zeros([b_p], dtype=tl.float64)
        for begin in range(0, count, b_p):
            p = begin + tl.arange(0, b_p)
            total += tl.load(parts_ptr + first + p, mask=p < count, other=0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(total, 0))
        tl.store(out_ptr + tensor, norm.to(tl.float32).to(out_ptr.dtype.element_ty))


class _Layout(NamedTuple):
    """How tensors of some sizes are gone through."""

    launches: list[Programs]
    begins: list[int]
    """Of each launch: where its parts begin among all."""
    sizes: Tensor
    """[n] int64."""
    first: Tensor
    """[n] int64: each tensor's first part."""
    count: Tensor
    """[n] int64: its parts."""
    parts: int
    """Of all launches, with what lies between them."""


class _Launch(NamedTuple):
    """What one launch is given beside the sizes. On the device."""

    programs: Programs
    parts: Tensor
    """Where its programs leave their sums."""


class _Plan(NamedTuple):
    """Everything that is there before the gradients of a list are. On the device."""

    layout: _Layout
    addresses: Tensor
    """[n] int64."""
    parts: Tensor
    """Sums of parts, of all launches; calls of one stream come one after the other."""
    launches: list[_Launch]


# Keys of both tables name the stream: what is there stays with those that may still read it.
@lru_cache(maxsize=KEPT)
def _layout(
    sizes: tuple[int, ...], aligned: tuple[bool, ...], chunk: int, device: torch.device, stream: int
) -> _Layout:
    launches, on_device = programs_of(sizes, aligned, chunk, device)
    counts = -(-np.array(sizes, dtype=np.int64) // chunk)
    first = np.zeros_like(counts)
    begins = []
    end = 0
    for one in launches:
        mine = np.array(aligned) == one.is_aligned
        begins.append(end)
        first[mine] = end + np.cumsum(counts[mine]) - counts[mine]
        end += -(-len(one.which) // _LINE) * _LINE
    columns = (torch.from_numpy(column).to(device) for column in (first, counts))
    return _Layout(launches, begins, on_device, *columns, end)


@lru_cache(maxsize=KEPT)
def _plan(addresses: tuple[int, ...], sizes: tuple[int, ...], chunk: int, device: torch.device, stream: int) -> _Plan:
    """Gradients lie where they lay in the step before: the next one finds it here."""
    aligned = tuple(map(lies_aligned, addresses, sizes))
    layout = _layout(sizes, aligned, chunk, device, stream)
    parts = torch.empty(layout.parts, dtype=torch.float32, device=device)
    launches = []
    for programs, begin in zip(layout.launches, layout.begins, strict=True):
        launches.append(_Launch(programs, parts[begin:]))
    return _Plan(layout, sent(addresses, torch.int64, device), parts, launches)


def grad_norm(gradients: Sequence[Tensor]) -> list[Tensor]:
    """See reference.py; gradients of one dtype of at most 32 bits, of which those that are not contiguous are copied.

    The host waits for nothing, but once for a new list of sizes.
    """
    if not gradients:
        return []
    device = gradients[0].device
    dtype = gradients[0].dtype
    assert dtype in DTYPES, f"gradients in {dtype}, the kernel adds in fp32"
    # copies are held until both kernels have been given to the stream
    whole = []
    sizes = []
    addresses = []
    for gradient in gradients:
        assert gradient.dtype == dtype, f"gradients in {dtype} and in {gradient.dtype}"
        one = gradient.contiguous()
        whole.append(one)
        sizes.append(one.numel())
        addresses.append(one.data_ptr())
    stream = 0
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    plan = _plan(tuple(addresses), tuple(sizes), CHUNK, device, stream)
    layout = plan.layout
    for programs, parts in plan.launches:
        grad_norm_squares_kernel[(len(programs.which),)](
            plan.addresses,
            programs.which,
            programs.start,
            layout.sizes,
            parts,
            NAMES[dtype],
            programs.is_aligned,
            CHUNK,
            BLOCK,
            num_warps=WARPS,
        )
    norms = torch.empty(len(whole), dtype=dtype, device=device)
    grad_norm_sums_kernel[(len(whole),)](plan.parts, layout.first, layout.count, norms, PARTS, num_warps=WARPS)
    return list(norms.unbind())
