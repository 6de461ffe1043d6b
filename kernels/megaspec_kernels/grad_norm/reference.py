"""Norms of gradients, tensor by tensor, by torch's own kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grad_norm(gradients: Sequence[Tensor]) -> list[Tensor]:
    """‖g‖₂ of each, a scalar in its dtype. Where a gradient has a NaN or an infinity, so is its own norm, no other's.

    Squares are of the dtype, at least fp32: of numbers above 1.8e19 they are infinite in fp32.
    """
    if not gradients:
        return []
    return list(torch._foreach_norm(list(gradients)))
