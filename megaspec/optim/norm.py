"""The gradient norm of the whole model, each parameter counted once in every layout."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.layout import Layout


def local_norms(gradients: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> Tensor:
    """The norm of what each gradient counts on this rank, in the order of `gradients`, [n].

    Rectangles that several ranks hold count on the first one only. Padding is zero and adds nothing.
    """
    counted, owner = [], []
    for i, (name, gradient) in enumerate(gradients.items()):
        pieces = layouts[name].pieces
        if all(p.replica == 0 for p in pieces):
            counted.append(gradient)
            owner.append(i)
        else:
            primary = [gradient[p.local_slices] for p in pieces if p.replica == 0]
            counted += primary
            owner += [i] * len(primary)
    first = next(iter(gradients.values()))
    squares = torch.zeros(len(gradients), dtype=torch.float64, device=first.device)
    if counted:
        norms = torch.stack(torch._foreach_norm(counted)).to(torch.float64)
        # from page-locked memory, so that the host does not wait for the GPU
        where = torch.tensor(owner, pin_memory=first.is_cuda).to(first.device, non_blocking=True)
        squares.index_add_(0, where, norms.square())
    return squares.sqrt()


def global_norm(norms: Tensor, *, world_size: int) -> Tensor:
    """The norm over all parameters and ranks, a float64 scalar. `norms`: see `local_norms`."""
    square = norms.square().sum()
    if world_size > 1:
        dist.all_reduce(square)
    return square.sqrt()
