"""Attention as its equation: softmax(c tanh(q kᵀ s / c) + mask) v, with a sink in the softmax's denominator."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
from torch import Tensor

from megaspec_kernels.attention.documents import BlockDocuments, Documents
from megaspec_kernels.attention.scoring import PLAIN, Scoring


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents: Documents | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H].

    `documents`: attention stays inside them. `window`: a query sees so many keys, itself the last. `sinks`, [N]: a
    logit for each head beside its scores, whose weight goes nowhere. `drop` maps the weights [B, N, T, T] to weights.
    The softmax is taken in at least fp32.
    """
    B, T, N, H = q_BTNH.shape
    groups = N // k_BTKH.shape[2]  # query heads of a key and value head
    k_BTNH = k_BTKH.repeat_interleave(groups, dim=2)
    v_BTNH = v_BTKH.repeat_interleave(groups, dim=2)
    scores = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * scoring.scale_of(H)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scoring.cap is not None:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    scores = scores.masked_fill(~seen(T, documents=documents, window=window, device=q_BTNH.device), float("-inf"))
    if sinks is not None:
        # one more column, of which no value comes
        column = sinks.to(scores.dtype)[:, None, None].expand(B, N, T, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., :T].to(v_BTKH.dtype)
    if drop is not None:
        weights = drop(weights)
    return torch.einsum("bnts,bsnh->btnh", weights, v_BTNH)


def seen(T: int, *, documents: Documents | None, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query sees: bool [T, T], or [B, 1, T, T] with documents."""
    past = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    if window is not None:
        past = past.triu(1 - window)
    if documents is None:
        return past
    return past & BlockDocuments(documents, documents).mask()
