"""Whole sequences as one causal block, for kernels that have blocks alone: of packed documents, windows and sinks."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megaspec_kernels.attention.documents import BlockDocuments, Documents
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.attention.sinks import sinks_gradient, with_sinks


class _OneBlock(torch.autograd.Function):
    """The block's two passes. What documents are made of comes in pieces, since the compiler traces tensors."""

    @staticmethod
    def forward(ctx, q, k, v, sinks_N, number, starts, bounds, forward, backward, window, scoring):
        options = _options(number, starts, bounds, window, scoring)
        out, lse = forward(q, k, v, **options)
        if sinks_N is not None:
            out, lse = with_sinks(out, lse, sinks_N)
        ctx.save_for_backward(q, k, v, sinks_N, number, starts, out, lse)
        ctx.bounds = bounds
        ctx.backward_of_block = backward
        ctx.window = window
        ctx.scoring = scoring
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks_N, number, starts, out, lse = ctx.saved_tensors
        options = _options(number, starts, ctx.bounds, ctx.window, ctx.scoring)
        d_q, d_k, d_v = ctx.backward_of_block(grad, q, k, v, out, lse, **options)
        d_sinks = None
        if sinks_N is not None:
            d_sinks = sinks_gradient(grad, out, lse, sinks_N)
        rest = (None,) * 7
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, *rest


def _options(
    number: Tensor | None, starts: Tensor | None, bounds: tuple[int, int], window: int | None, scoring: Scoring
) -> dict[str, Any]:
    documents = None
    if number is not None:
        of_tokens = Documents(number, starts, *bounds)
        documents = BlockDocuments(of_tokens, of_tokens)
    return {"causal": True, "documents": documents, "window": window, "scoring": scoring}


def attention_as_one_block(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    documents: Documents | None,
    window: int | None,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of whole sequences through a kernel's blocks, see AttentionKernel -> [B, T, N, H]."""
    number = None
    starts = None
    bounds = (0, 0)
    if documents is not None:
        number = documents.number
        starts = documents.starts
        bounds = (documents.most, documents.longest)
    return _OneBlock.apply(q_BTNH, k_BTKH, v_BTKH, sinks, number, starts, bounds, forward, backward, window, scoring)
