"""Norms of gradients, which data parallelism takes as they are summed and the optimizer's norm of all is made of."""

from collections.abc import Mapping

from torch import Tensor

from megaspec_kernels.registry import GradNormKernel


def each_norm(gradients: Mapping[str, Tensor], *, kernel: GradNormKernel) -> dict[str, Tensor]:
    """The norm of each, a scalar in its dtype: the same whichever others are asked for beside it."""
    return dict(zip(gradients, kernel(list(gradients.values())), strict=True))
