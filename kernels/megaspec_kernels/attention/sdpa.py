"""Causal attention through torch's scaled_dot_product_attention, cuDNN first on CUDA."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN is the fastest on Hopper; the mask of packed documents and fp64 need one of the others.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py."""
    assert drop is None, "sdpa has no attention dropout; the resolver picks reference"
    q, k, v = q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    mask = None
    if documents is not None:
        T = q.shape[2]
        past = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        mask = past & (documents[:, None, :, None] == documents[:, None, None, :])
    if q.device.type == "cpu":
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    else:
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)
