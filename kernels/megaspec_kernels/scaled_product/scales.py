"""Scales of the factors of a product, in the order in which cuBLASLt reads them, called by torch or by ourselves."""

# m, k blocks along the rows of a factor and along what is summed over

import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import Block

# Of squares as many as this lie behind each other, of which the last ones may be nobody's.
_SQUARES = 4


def has_short_lines(block: Block) -> bool:
    """Whether a part of the numbers that are summed over shares a scale."""
    return block[1] is not None


def as_read(scale_mk: Tensor, block: Block) -> Tensor:
    """[m, k] -> where the scales lie as they are read: of parts of rows [k, m], of squares [m, k] with k in whole
    fours, others as they are; contiguous."""
    if not has_short_lines(block):
        return scale_mk.contiguous()
    if block[0] == 1:
        # no copy of those that lie so already
        return scale_mk.t().contiguous()
    missing = -scale_mk.shape[1] % _SQUARES
    if missing:
        scale_mk = F.pad(scale_mk, (0, missing))
    return scale_mk.contiguous()
