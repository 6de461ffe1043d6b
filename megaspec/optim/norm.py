"""The gradient norm of the whole model, each parameter counted once in every layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspec.core import counted
from megaspec.core.layout import Layout
from megaspec.nn.each_norm import each_norm


@dataclass(frozen=True)
class LocalNorms:
    """What one rank knows of the norm. float64."""

    each: Tensor
    """[n]: the norm of each gradient that this rank holds, in their order, copies of other ranks' included."""
    square: Tensor
    """Scalar: the sum of squares of what is counted here, so that the sum over all ranks counts everything once."""


@dataclass(frozen=True)
class GlobalNorm:
    """What all ranks know together. float64, and the same to the bit on all of them."""

    norm: Tensor
    """Scalar."""
    beside: Tensor
    """[k]: what was summed beside it."""


def local_norms(
    gradients: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    *,
    known: Mapping[str, Tensor] | None = None,
    device: torch.device | None = None,
) -> LocalNorms:
    """Rectangles that several ranks hold count on the first one only. Padding is zero and adds nothing.

    `known`: norms of some of the gradients as `each_norm` makes them, which are not read again. `device`: where a rank
    without parameters has its nothing.
    """
    if not gradients:
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        return LocalNorms(nothing, nothing.sum())
    found = dict(known or {})
    found |= each_norm({name: gradient for name, gradient in gradients.items() if name not in found})
    each = torch.stack([found[name] for name in gradients]).to(torch.float64)
    # A gradient of which this rank counts everything takes part by its norm in `each`, which is there already. Of the
    # others the rectangles that count here are `parts`, with norms of their own.
    counted: list[float] = []
    parts: list[Tensor] = []
    for name, gradient in gradients.items():
        first = [piece for piece in layouts[name].pieces if piece.replica == 0]
        is_whole = len(first) == len(layouts[name].pieces)
        counted.append(float(is_whole))
        if not is_whole:
            parts += [gradient[piece.local_slices] for piece in first]
    if all(counted):
        return LocalNorms(each, each.square().sum())
    # from page-locked memory, so that the host does not wait for the GPU
    weights = torch.tensor(counted, dtype=torch.float64, pin_memory=each.is_cuda).to(each.device, non_blocking=True)
    # where, since 0 · inf is not 0
    square = torch.where(weights > 0, each.square(), 0).sum()
    if parts:
        square = square + torch.stack(torch._foreach_norm(parts)).to(torch.float64).square().sum()
    return LocalNorms(each, square)


def global_norm(square: Tensor, *, world_size: int, beside: Sequence[Tensor] = ()) -> GlobalNorm:
    """The norm over all parameters and ranks. `square`: see LocalNorms. `beside`: scalars whose sums over all ranks are
    wanted, too, and travel with it in one all-reduce."""
    sums = torch.stack([square, *(one.to(square.dtype) for one in beside)])
    if world_size > 1:
        counted.all_reduce(sums)
    return GlobalNorm(sums[0].sqrt(), sums[1:])
