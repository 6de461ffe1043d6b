"""Causal attention through torch's flex_attention (Dong et al. 2024): a Triton kernel made for a mask and a score.

It leaves out the blocks of the mask that nobody sees, which is what windows and packed documents gain by, and it caps
scores. It tells the log-sum-exp, which is all that a sink needs. Its backward pass adds in one order. Layers that see
all of the past and cap nothing go through sdpa.py, whose kernels are faster at that: 3.5 ms against 5.5 forward and
backward of 8,192 tokens, 32 heads on 8 of 128 (one H200, bf16). But not where gradients are added in one order: sdpa
takes FlashAttention-2 then, 9.7 ms, and flex computes them itself. Blocks go through sdpa_block.py; those that nobody
sees are left out by whoever has them. With capped scores they are the equation, of which nothing is kept.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megaspec_kernels.attention import one_order, reference_block, sdpa, sdpa_block
from megaspec_kernels.attention.documents import Documents
from megaspec_kernels.attention.flex_blocks import BLOCK, blocks_of
from megaspec_kernels.attention.scoring import PLAIN, Scoring


@cache
def _compiled(*, by_documents: bool) -> Callable[..., Any]:
    """flex_attention for those who aren't compiled themselves: without the compiler torch computes all scores."""
    # A graph for shapes that vary fails with a mask of documents on torch 2.11 (pytorch/pytorch#183677). Those are of
    # training, whose shapes are few: a graph for each.
    dynamic = False if by_documents else None
    # fullgraph, since torch would do that silently, too, once it has compiled as often as recompile_limit allows
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


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
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py. On a CPU torch has the forward pass
    alone, as the equation.
    """
    assert drop is None, "flex has no attention dropout; the resolver picks reference"
    T, N = q_BTNH.shape[1:3]
    hides_nothing = documents is None and window is None and scoring.cap is None
    if hides_nothing and not one_order.is_asked_for():
        return sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=scoring, sinks=sinks)
    # each by itself, so that no view keeps the product that all three were made by; by tokens, as the projections
    # around take them: what flex returns lies as its queries do
    q_BTNH = q_BTNH.contiguous()
    k_BTKH = k_BTKH.contiguous()
    v_BTKH = v_BTKH.contiguous()
    if q_BTNH.is_meta:
        # flex_attention refuses tensors without memory; a plain causal pass has the same results and keeps the same
        out_BTNH = sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=replace(scoring, cap=None))
        if sinks is None:
            return out_BTNH
        lse_BTN = q_BTNH.sum(dim=-1, dtype=torch.promote_types(q_BTNH.dtype, torch.float32))
        return _with_sinks(out_BTNH.transpose(1, 2), lse_BTN.transpose(1, 2), sinks).transpose(1, 2)
    attend = flex_attention
    if q_BTNH.device.type != "cpu" and not torch.compiler.is_compiling():
        attend = _compiled(by_documents=documents is not None)
    out, aux = attend(
        q_BTNH.transpose(1, 2),
        k_BTKH.transpose(1, 2),
        v_BTKH.transpose(1, 2),
        score_mod=_capped(scoring.cap),
        block_mask=block_mask(T, documents=documents, window=window, device=q_BTNH.device),
        scale=scoring.scale_of(q_BTNH.shape[-1]),
        enable_gqa=k_BTKH.shape[2] != N,
        return_aux=AuxRequest(lse=sinks is not None),
        # A row of less than 128 tokens would go to the kernel for decoding, which finds no tiles for some such rows
        # (67 tokens, two heads to a key: torch 2.11) and has no place in training.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    if sinks is not None:
        out = _with_sinks(out, aux.lse, sinks)
    return out.transpose(1, 2)


def _with_sinks(out_BNTH: Tensor, lse_BNT: Tensor, sinks_N: Tensor) -> Tensor:
    """The output with the share of the softmax that the sinks leave, see sinks.py; the log-sum-exp carries a gradient.
    flex keeps what it returned, the product behind it this."""
    left_BNT = torch.sigmoid(lse_BNT - sinks_N.to(lse_BNT.dtype)[:, None])
    return (out_BNTH.to(left_BNT.dtype) * left_BNT[..., None]).to(out_BNTH.dtype)


def block_forward(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, scoring: Scoring = PLAIN, **options: Any
) -> tuple[Tensor, Tensor]:
    """-> [B, T, N, H], [B, N, T]; see reference_block.py."""
    block = sdpa_block if scoring.cap is None else reference_block
    return block.block_forward(q_BTNH, k_BSKH, v_BSKH, scoring=scoring, **options)


def block_backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    *,
    scoring: Scoring = PLAIN,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> what the block adds to the gradients of q, k and v; see reference_block.py."""
    block = sdpa_block if scoring.cap is None else reference_block
    return block.block_backward(grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, scoring=scoring, **options)


def _capped(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score


def block_mask(T: int, *, documents: Documents | None, window: int | None, device: torch.device) -> BlockMask:
    """What a query sees, by blocks of tokens: not at all, in part, or whole; see flex_blocks.py."""
    place = torch.arange(T, device=device, dtype=torch.int32)
    starts_BT = torch.zeros(1, T, device=device, dtype=torch.int32)
    if documents is not None:
        number = documents.number
        is_start = torch.ones_like(number, dtype=torch.bool)
        is_start[:, 1:] = number[:, 1:] != number[:, :-1]
        starts_BT = torch.where(is_start, place, 0).cummax(dim=1).values
    if window is not None:
        starts_BT = torch.maximum(starts_BT, place - (window - 1))

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b if documents is not None and documents.number.shape[0] > 1 else 0
        return (k <= q) & (k >= starts_BT[row, q])

    return BlockMask(
        (T, T),
        **blocks_of(starts_BT)._asdict(),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )
