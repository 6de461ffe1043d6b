"""One launch over many tensors of any sizes: the kernel loads their addresses from a table, and each of its programs
goes through a part of one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks such kernels there
    triton = None

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
"""What `typed` calls formats."""

if triton is not None:

    @triton.jit
    def typed(address, name: tl.constexpr, is_aligned: tl.constexpr):
        """The pointer that an int64 is. fp8 is read as bytes, low halves of master weights as int16.

        Four elements are said to be aligned, not 16 bytes: then a thread takes four of each tensor, 16 bytes of those
        in fp32. With eight of a bf16 weight all else would go to other threads through shared memory.
        """
        if name == "fp32":
            p = address.to(tl.pointer_type(tl.float32))
            if is_aligned:
                p = tl.multiple_of(p, 16)
        elif name == "bf16":
            p = address.to(tl.pointer_type(tl.bfloat16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        elif name == "fp16":
            p = address.to(tl.pointer_type(tl.float16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        elif name == "int16":
            p = address.to(tl.pointer_type(tl.int16))
            if is_aligned:
                p = tl.multiple_of(p, 8)
        else:
            p = address.to(tl.pointer_type(tl.uint8))
            if is_aligned:
                p = tl.multiple_of(p, 4)
        return p


@dataclass(frozen=True)
class Programs:
    """Of each program of a launch its tensor, int32, and first element, int64. Those of a tensor are one after the
    other."""

    which: Tensor
    start: Tensor
    is_aligned: bool
    """Sizes and addresses of their tensors are multiples of 16: a thread loads four elements at a time."""


# one for each optimizer of a rank, of which an update under the forward pass has one for each unit
@lru_cache(maxsize=512)
def programs_of(
    sizes: tuple[int, ...], aligned: tuple[bool, ...], chunk: int, device: torch.device
) -> tuple[list[Programs], Tensor]:
    """A launch for aligned tensors and one for others, as far as there are any; and every tensor's size, int64."""
    launches = []
    for is_aligned in (True, False):
        which = []
        start = []
        for tensor, size in enumerate(sizes):
            if aligned[tensor] is is_aligned:
                first = np.arange(0, size, chunk, dtype=np.int64)
                start.append(first)
                which.append(np.full(len(first), tensor, dtype=np.int32))
        # a tensor of no elements has no program
        if sum(map(len, which)):
            columns = (torch.from_numpy(np.concatenate(column)).to(device) for column in (which, start))
            launches.append(Programs(*columns, is_aligned))
    return launches, torch.tensor(sizes, dtype=torch.int64).to(device)


def lies_aligned(address: int, size: int) -> bool:
    """Of a tensor of so many elements: see Programs."""
    return address % 16 == 0 and size % 16 == 0


def sent(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """From page-locked memory, so that the host does not wait for the GPU."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
