"""Sums of matrix products."""

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
