"""A block of attention as its equation: some queries against some keys, to be merged with other blocks.

With lse = log Σ exp(scores) over the keys of a block, blocks A and B make up lse = log(exp lse_A + exp lse_B) and
out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B. The gradients of a block need the lse and the output of the whole
row only: with W = exp(scores - lse) and δ = Σ grad_out · out, dv = Wᵀ grad_out, dscores = W (grad_out vᵀ - δ).
"""

# B sequences, T queries, S keys, N query heads, K key and value heads, G = N / K, H head size

from collections.abc import Callable

import torch
from torch import Tensor

from megaspec_kernels.attention.documents import BlockDocuments
from megaspec_kernels.attention.scoring import PLAIN, Scoring

Drop = Callable[[Tensor], Tensor]
"""Dropout of attention weights [B, N, T, S]: every element times its factor, 0 or 1 / (1 - p)."""


def block_forward(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    documents: BlockDocuments | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor]:
    """-> [B, T, N, H] in the dtype of q, and the log-sum-exp of the scores [B, N, T] in at least fp32.

    `causal`: T = S, query i sees the keys up to i. `mask`, bool [B, 1, T, S]: what is seen of that, and `documents`:
    keys of the query's own. `window`, of a causal block: a query sees so many keys, itself the last. A query that sees
    nothing gets zeros and -inf. `drop` does not change the log-sum-exp.
    """
    scores_BNTS = _masked(_scores(q_BTNH, k_BSKH, scoring), causal, mask, documents, window)
    lse_BNT = scores_BNTS.logsumexp(dim=-1)
    weights_BNTS = _weights(scores_BNTS, lse_BNT).to(v_BSKH.dtype)
    if drop is not None:
        weights_BNTS = drop(weights_BNTS)
    out_BTKGH = torch.einsum("bkgts,bskh->btkgh", _by_group(weights_BNTS, k_BSKH), v_BSKH)
    return out_BTKGH.flatten(2, 3), lse_BNT


def block_backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    documents: BlockDocuments | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> what the block adds to the gradients of q, k and v. `out`, `lse`: of the whole rows, all blocks merged."""
    scores_BNTS = _scores(q_BTNH, k_BSKH, scoring)
    weights_BNTS = _weights(_masked(scores_BNTS, causal, mask, documents, window), lse_BNT)
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.unflatten(2, (K, -1))
    grad_BTKGH = grad_BTNH.unflatten(2, (K, -1))
    kept_BNTS = weights_BNTS.to(v_BSKH.dtype)
    d_weights_BNTS = torch.einsum("btkgh,bskh->bkgts", grad_BTKGH, v_BSKH).flatten(1, 2)
    if drop is not None:
        kept_BNTS = drop(kept_BNTS)
        d_weights_BNTS = drop(d_weights_BNTS)
    d_v = torch.einsum("bkgts,btkgh->bskh", _by_group(kept_BNTS, k_BSKH), grad_BTKGH)
    wide = weights_BNTS.dtype
    # δ, then W (grad_out vᵀ − δ)
    delta_BNT = (grad_BTNH.to(wide) * out_BTNH.to(wide)).sum(dim=-1).transpose(1, 2)
    d_scores_BNTS = weights_BNTS * (d_weights_BNTS.to(wide) - delta_BNT[..., None])
    if scoring.cap is not None:
        # of c tanh(s / c): 1 - tanh²
        d_scores_BNTS = d_scores_BNTS * (1 - (scores_BNTS / scoring.cap).square())
    d_scores_BNTS = d_scores_BNTS.to(q_BTNH.dtype) * scoring.scale_of(q_BTNH.shape[-1])
    d_scores_BKGTS = _by_group(d_scores_BNTS, k_BSKH)
    d_q = torch.einsum("bkgts,bskh->btkgh", d_scores_BKGTS, k_BSKH).flatten(2, 3)
    d_k = torch.einsum("bkgts,btkgh->bskh", d_scores_BKGTS, q_BTKGH)
    return d_q, d_k, d_v


def _scores(q_BTNH: Tensor, k_BSKH: Tensor, scoring: Scoring) -> Tensor:
    """q kᵀ, scaled and capped."""
    q_BTKGH = q_BTNH.unflatten(2, (k_BSKH.shape[2], -1))
    products = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH).flatten(1, 2)
    scores = products * scoring.scale_of(q_BTNH.shape[-1])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scoring.cap is None:
        return scores
    return scoring.cap * torch.tanh(scores / scoring.cap)


def _masked(
    scores_BNTS: Tensor, causal: bool, mask: Tensor | None, documents: BlockDocuments | None, window: int | None
) -> Tensor:
    """-inf where a query does not see a key."""
    assert causal or window is None, "a window counts back from the query itself"
    if documents is not None:
        same = documents.mask()
        mask = same if mask is None else mask & same
    if causal:
        T, S = scores_BNTS.shape[-2:]
        assert T == S, f"a causal block is square, {T} queries meet {S} keys"
        past = torch.ones(T, S, dtype=torch.bool, device=scores_BNTS.device).tril()
        if window is not None:
            past = past.triu(1 - window)
        mask = past if mask is None else mask & past
    if mask is None:
        return scores_BNTS
    return scores_BNTS.masked_fill(~mask, float("-inf"))


def _weights(scores_BNTS: Tensor, lse_BNT: Tensor) -> Tensor:
    """exp(scores - lse); 0 where a query sees nothing, whose lse is -inf: -inf - -inf is no number."""
    finite_BNT = lse_BNT.masked_fill(lse_BNT == float("-inf"), 0.0)
    return (scores_BNTS - finite_BNT[..., None]).exp()


def _by_group(x_BNTS: Tensor, k_BSKH: Tensor) -> Tensor:
    """[B, N, T, S] -> [B, K, G, T, S]."""
    return x_BNTS.unflatten(1, (k_BSKH.shape[2], -1))
