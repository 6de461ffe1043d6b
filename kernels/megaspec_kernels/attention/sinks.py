"""Attention sinks (gpt-oss, 2025) around blocks of attention: a learned logit a head in the softmax's denominator.

Of attention without a sink, whose output is o and whose log-sum-exp is l, the sink z makes l' = log(exp l + exp z) and
o' = exp(l - l') o, which is o · sigmoid(l - z). A block's backward pass takes the output and log-sum-exp of the whole
row (reference_block.py); told o' and l', it gives the gradients with the sink: the weights exp(scores - l') are those
that are left beside it, and δ = Σ grad · o'. Nobody needs a gradient of l. The sink's own weight is exp(z - l') and its
value is zero, so its gradient is -Σ exp(z - l') δ.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size

import torch
from torch import Tensor


def with_sinks(out_BTNH: Tensor, lse_BNT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of whole rows, without and then with the sinks, in their formats."""
    lse_with_BNT = torch.logaddexp(lse_BNT, sinks_N.to(lse_BNT.dtype)[:, None])
    left_BNT = (lse_BNT - lse_with_BNT).exp()
    out = out_BTNH.to(lse_BNT.dtype) * left_BNT.transpose(1, 2)[..., None]
    if out.dtype != out_BTNH.dtype:
        # asked, since `to` a format that is there already hands on the same tensor, and where that is kept for the
        # backward pass the compiler of torch 2.11 gives wrong gradients without a word
        out = out.to(out_BTNH.dtype)
    return out, lse_with_BNT


def sinks_gradient(grad_BTNH: Tensor, out_BTNH: Tensor, lse_BNT: Tensor, sinks_N: Tensor) -> Tensor:
    """[N]. `out`, `lse`: of whole rows, with the sinks."""
    wide = lse_BNT.dtype
    delta_BNT = (grad_BTNH.to(wide) * out_BTNH.to(wide)).sum(dim=-1).transpose(1, 2)
    weight_BNT = (sinks_N.to(wide)[:, None] - lse_BNT).exp()
    return -(weight_BNT * delta_BNT).sum(dim=(0, 2)).to(sinks_N.dtype)
