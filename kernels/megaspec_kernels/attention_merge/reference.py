"""Attention over blocks of keys put together in place, as an equation; its maths: attention/reference_block.py."""

# B sequences, T queries or keys, N heads, H head size

import torch
from torch import Tensor


def merge(out_BTNH: Tensor, lse_BNT: Tensor, new_BTNH: Tensor, new_lse_BNT: Tensor) -> None:
    """Takes a block into rows in place: out = out + w (new - out), w = exp(new_lse - total), lse = total with
    total = log(exp lse + exp new_lse).

    `out` [B, T, N, H], `lse` and `new_lse` [B, N, T] in one dtype, at least fp32; `new` [B, T, N, H] in the dtype of q.
    Every query has seen a key before, so its `lse` is finite; `new_lse` may be -inf.
    """
    weight_BNT = torch.sigmoid(new_lse_BNT - lse_BNT)
    out_BTNH.lerp_(new_BTNH.to(out_BTNH.dtype), weight_BNT.transpose(1, 2)[..., None])
    torch.logaddexp(lse_BNT, new_lse_BNT, out=lse_BNT)


def add(total_BTNH: Tensor, new_BTNH: Tensor) -> None:
    """Adds a block's gradients to their sum in place, [B, T, N, H] both; `total` in at least fp32."""
    total_BTNH += new_BTNH
