"""Norms of gradients, which data parallelism takes as they are summed and the optimizer's norm of all is made of."""

from collections.abc import Mapping

import torch
from torch import Tensor


def each_norm(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each, a scalar in its dtype: the same whichever others are asked for beside it."""
    if not gradients:
        return {}
    return dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True))
