"""Causal attention as its equation: softmax(q kᵀ / √H + mask) v."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H].

    `documents`, int32 [B, T]: attention stays inside a document. `drop` maps the weights [B, N, T, T] to weights.
    The softmax is taken in at least fp32.
    """
    T = q_BTNH.shape[1]
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]  # query heads of a key and value head
    k_BTNH = k_BTKH.repeat_interleave(groups, dim=2)
    v_BTNH = v_BTKH.repeat_interleave(groups, dim=2)
    scores = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * q_BTNH.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    allowed = torch.ones(T, T, dtype=torch.bool, device=q_BTNH.device).tril()
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1).to(v_BTKH.dtype)
    if drop is not None:
        weights = drop(weights)
    return torch.einsum("bnts,bsnh->btnh", weights, v_BTNH)
