"""A matrix product for each group of rows, one after the other."""

# E groups, R rows, I inputs, O outputs

import torch
from torch import Tensor


def grouped_product(a: Tensor, b: Tensor, ends_E: Tensor, *, whole: bool = True) -> Tensor:
    """The product of each group of rows with its own factor; group e holds the rows from ends[e - 1] to ends[e].

    [R, I], [E, I, O] -> [R, O], rows of no group are zero;  [O, R], [R, I] -> [E, O, I], empty groups are zero.
    `ends_E`: int32 on the device, ascending. `whole`: every row belongs to a group. The host reads the ends.
    """
    ends = ends_E.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, first:last] @ b[first:last] for first, last in groups])
    products = [a[first:last] @ b[e] for e, (first, last) in enumerate(groups)]
    return torch.cat([*products, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
