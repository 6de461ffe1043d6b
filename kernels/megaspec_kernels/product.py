"""Sums of matrix products, and of rows."""

import torch
from torch import Tensor


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, overwrite: bool = False) -> None:
    """total = [total +] a b, [O, M] [M, I]; `overwrite` leaves the old total out.

    A total that is wider than the factors is summed in its own dtype, on GPUs inside the matrix product.
    """
    if total.is_meta:
        # no numbers; and torch 2.11 takes out_dtype for a factor there
        return
    wider = total.dtype != a.dtype
    if wider and total.device.type != "cpu":
        if overwrite:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif wider:
        product = a @ b
        if overwrite:
            total.copy_(product)
        else:
            total.add_(product)
    elif overwrite:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def add_rows_(total: Tensor, places: Tensor, rows: Tensor, *, overwrite: bool = False) -> None:
    """total[places[i]] += rows[i], [V, D], int64 [...], [..., D], in the order of i where places are equal; `overwrite`
    makes of all others zero.

    Summed in the total's dtype, and the same to the bit each time.
    """
    if overwrite:
        total.zero_()
    places = places.flatten()
    rows = rows.flatten(0, -2).to(total.dtype)
    if total.device.type == "cpu":
        # one after the other, where index_put_ has threads that add to one place in any order
        total.index_add_(0, places, rows)
    else:
        # Sorted by place, where index_add_ has atomic additions. What index_put_ itself calls: that has the host look
        # whether places are inside, and wait for the GPU; the lookup of the forward pass has seen that they are.
        torch.ops.aten._index_put_impl_(total, [places], rows, accumulate=True, unsafe=True)
