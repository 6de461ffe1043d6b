"""Attention sinks (gpt-oss, 2025) around blocks of attention: a learned logit a head in the softmax's denominator.

Of attention without a sink, whose output is o and whose log-sum-exp is l, the sink z makes l' = log(exp l + exp z) and
o' = exp(l - l') o, which is o · sigmoid(l - z). A block's backward pass takes the output and log-sum-exp of the whole
row (reference_block.py); told o' and l', it gives the gradients with the sink: the weights exp(scores - l') are those
that are left beside it, and δ = Σ grad · o'. Nobody needs a gradient of l. The sink's own weight is exp(z - l') and its
value is zero, so its gradient is -Σ exp(z - l') δ.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
from torch import Tensor

from megaspec_kernels.attention.scoring import Scoring


def with_sinks(out_BTNH: Tensor, lse_BNT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of whole rows, without and then with the sinks, in their formats."""
    lse_with_BNT = torch.logaddexp(lse_BNT, sinks_N.to(lse_BNT.dtype)[:, None])
    left_BNT = (lse_BNT - lse_with_BNT).exp()
    out = out_BTNH.to(lse_BNT.dtype) * left_BNT.transpose(1, 2)[..., None]
    return out.to(out_BTNH.dtype), lse_with_BNT


def sinks_gradient(grad_BTNH: Tensor, out_BTNH: Tensor, lse_BNT: Tensor, sinks_N: Tensor) -> Tensor:
    """[N]. `out`, `lse`: of whole rows, with the sinks."""
    wide = lse_BNT.dtype
    delta_BNT = (grad_BTNH.to(wide) * out_BTNH.to(wide)).sum(dim=-1).transpose(1, 2)
    weight_BNT = (sinks_N.to(wide)[:, None] - lse_BNT).exp()
    return -(weight_BNT * delta_BNT).sum(dim=(0, 2)).to(sinks_N.dtype)


class _SinkAttention(torch.autograd.Function):
    """Whole sequences as one block."""

    @staticmethod
    def forward(ctx, q_BTNH, k_BTKH, v_BTKH, sinks_N, forward, backward, mask, scoring):
        out_BTNH, lse_BNT = forward(q_BTNH, k_BTKH, v_BTKH, causal=True, mask=mask, scoring=scoring)
        out_BTNH, lse_BNT = with_sinks(out_BTNH, lse_BNT, sinks_N)
        ctx.save_for_backward(q_BTNH, k_BTKH, v_BTKH, sinks_N, out_BTNH, lse_BNT)
        ctx.backward_of_block = backward
        ctx.mask = mask
        ctx.scoring = scoring
        return out_BTNH

    @staticmethod
    def backward(ctx, grad_BTNH):
        q, k, v, sinks_N, out_BTNH, lse_BNT = ctx.saved_tensors
        grads = ctx.backward_of_block(
            grad_BTNH, q, k, v, out_BTNH, lse_BNT, causal=True, mask=ctx.mask, scoring=ctx.scoring
        )
        d_sinks = sinks_gradient(grad_BTNH, out_BTNH, lse_BNT, sinks_N)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), d_sinks, None, None, None, None


def attention_with_sinks(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    sinks_N: Tensor,
    *,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Causal attention of whole sequences through a kernel's blocks, see AttentionKernel. `mask`: what is seen of the
    past, bool [B or 1, 1, T, T]."""
    return _SinkAttention.apply(q_BTNH, k_BTKH, v_BTKH, sinks_N, forward, backward, mask, scoring)
