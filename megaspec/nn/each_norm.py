"""Norms of gradients, which data parallelism takes as they are summed and the optimizer's norm of all is made of."""

from collections.abc import Mapping

import torch
from torch import Tensor

# Numbers from which on a gradient fills a GPU, so that it has a kernel of its own: those for lists run 320 blocks at a
# time, one such launch behind the other, and reach half of memory's rate (measured in a step of 8B on an H200: 1.9 of
# 4.2 TB/s).
_FILLS_A_GPU = 1 << 22


def each_norm(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each, a scalar in its dtype: the same whichever others are asked for beside it."""
    large: dict[str, Tensor] = {}
    small: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if gradient.numel() < _FILLS_A_GPU:
            small[name] = gradient
        else:
            large[name] = torch.linalg.vector_norm(gradient)
    if not small:
        return large
    return large | dict(zip(small, torch._foreach_norm(list(small.values())), strict=True))
