"""Grouped matrix products through torch's grouped_mm: on Hopper one CUTLASS kernel that reads the groups itself."""

# E groups, R rows, I inputs, O outputs

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(a: Tensor, b: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
    """[R, I], [E, I, O] -> [R, O] or [O, R], [R, I] -> [E, O, I], bf16 summed in fp32; see reference.py.

    The host reads nothing. I and O are multiples of 8 (steps of 16 bytes), R is any number.
    """
    over_rows = b.dim() == 2
    if a.numel() == 0:
        # grouped_mm refuses a product over no rows at all
        return a.new_zeros(ends_E.shape[0], a.shape[0], b.shape[1]) if over_rows else a.new_zeros(0, b.shape[2])
    out = F.grouped_mm(_aligned(a), _aligned(b), offs=ends_E)
    if over_rows and not _zeroes_empty_groups(out.device):
        empty = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], 0)
    if not over_rows and not whole:
        # rows of no group are never written
        past = torch.arange(out.shape[0], device=out.device) >= ends_E[-1]
        return out.masked_fill_(past[:, None], 0)
    return out


def _aligned(x: Tensor) -> Tensor:
    """The same values, dense along rows or columns and with steps of 16 bytes along the other dimension."""
    (rows, columns), (down, right) = x.shape[-2:], x.stride()[-2:]
    step = down if right == 1 and down >= columns else right if down == 1 and right >= rows else 1
    return x if step * x.itemsize % 16 == 0 else x.contiguous()


def _zeroes_empty_groups(device: torch.device) -> bool:
    """Blackwell leaves what it likes in the place of an empty group (pytorch 172439), Hopper and the CPU zeros."""
    return device.type in ("cpu", "meta") or torch.cuda.get_device_capability(device) < (10, 0)
