"""Causal attention through Transformer Engine's functions for cuDNN: whole sequences, documents, windows, sinks.

cuDNN keeps its plans between calls here, also for documents, and has a backward pass of whole sequences that adds in
one order. Sinks go around it by sinks.py, from the log-sum-exp that it tells. What cuDNN does not take is an error of
Transformer Engine's, and when a run is built one of ours (see is_refused).

Note "Documents". With lengths the tensors are packed, [B · T, heads, size], and all documents of all rows lie one
behind the other; some may have no token. The log-sum-exp is packed then, too: [B · T, N, 1] instead of [B, N, T, 1].
Their gradients are added in any order: to add them in one, cuDNN 9.19 asks for 128 GiB for 3 rows of 2,024 tokens with
8 heads (measured on an H100, with heads of 64 and of 128), where it takes 0.14 GiB otherwise. The catalog refuses it.
"""

# B sequences, T tokens, N query heads, K key and value heads, H head size; P = B · T packed

from collections.abc import Callable

import torch
from torch import Tensor

from megaspec_kernels.attention import one_order, sdpa
from megaspec_kernels.attention.documents import BlockDocuments, Documents, documents_of, whole_rows
from megaspec_kernels.attention.one_block import attention_as_one_block
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.operation import fake_of, operation
from megaspec_kernels.te_package import transformer_engine


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
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py.

    RuntimeError: cuDNN does not take it.
    """
    assert drop is None, "te has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "te caps no scores; the resolver picks another"
    # it takes what lies by itself; copied here, so that the copies are kept, and not what they are views of
    q_BTNH = q_BTNH.contiguous()
    k_BTKH = k_BTKH.contiguous()
    v_BTKH = v_BTKH.contiguous()
    if q_BTNH.is_meta or q_BTNH.shape[1] == 1:
        # without numbers a plain causal pass has the same results and keeps the same; and cuDNN takes no single key
        return sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=scoring, sinks=sinks)
    return attention_as_one_block(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        forward=_forward,
        backward=_backward,
        documents=documents,
        window=window,
        scoring=scoring,
        sinks=sinks,
    )


def is_refused(
    *,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    tokens: int,
    documents: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why cuDNN does not take such attention on this GPU in training, in its words; None when it does. It is tried."""
    q = torch.zeros(1, tokens, n_heads, d_head, dtype=dtype, device=device, requires_grad=True)
    k, v = torch.zeros(2, 1, tokens, n_kv_heads, d_head, dtype=dtype, device=device).unbind()
    found = None
    if documents:
        found = documents_of(torch.zeros(1, tokens, dtype=torch.int32)).map(lambda x: x.to(device))
    try:
        torch.autograd.grad(attention(q, k, v, documents=found).sum(), q)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _forward(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    causal: bool,
    documents: BlockDocuments | None,
    window: int | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """-> [B, T, N, H], [B, N, T]; see reference_block.py."""
    B, T, N, H = q_BTNH.shape
    assert causal, "te attends to whole sequences"
    scale = scoring.scale_of(H)
    before = _before(window)
    q, k, v = (x.contiguous() for x in (q_BTNH, k_BTKH, v_BTKH))
    if documents is None:
        starts = whole_rows(B, T, device=q.device).starts
        out, lse_BNT1 = _te_attention_forward(q, k, v, starts, T, False, before, scale)
        return out, lse_BNT1.view(B, N, T)
    of_rows = documents.queries.for_rows(B)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse_PN1 = _te_attention_forward(q, k, v, of_rows.starts, of_rows.longest, True, before, scale)
    return out.unflatten(0, (B, T)), lse_PN1.view(B, T, N).transpose(1, 2)


def _backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    *,
    causal: bool,
    documents: BlockDocuments | None,
    window: int | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k and v; see reference_block.py."""
    B, T, N, H = q_BTNH.shape
    scale = scoring.scale_of(H)
    before = _before(window)
    grad, q, k, v, out = (x.contiguous() for x in (grad_BTNH, q_BTNH, k_BTKH, v_BTKH, out_BTNH))
    in_order = one_order.is_asked_for()
    if documents is None:
        starts = whole_rows(B, T, device=q.device).starts
        lse_BNT1 = lse_BNT.contiguous()[..., None]
        return _te_attention_backward(grad, q, k, v, out, lse_BNT1, starts, T, False, before, scale, in_order)
    assert not in_order, "te adds the gradients of documents in no order; the resolver refuses it"
    of_rows = documents.queries.for_rows(B)
    grad, q, k, v, out = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    lse_PN1 = lse_BNT.transpose(1, 2).contiguous().view(B * T, N, 1)
    d_q, d_k, d_v = _te_attention_backward(
        grad, q, k, v, out, lse_PN1, of_rows.starts, of_rows.longest, True, before, scale, False
    )
    return d_q.unflatten(0, (B, T)), d_k.unflatten(0, (B, T)), d_v.unflatten(0, (B, T))


def _before(window: int | None) -> int:
    """Keys before itself that a query sees; -1: all."""
    if window is None:
        return -1
    return window - 1


def _layout(packed: bool) -> dict[str, str]:
    """What lies how, and which mask goes with it. Of packed sequences the mask has to know of lengths."""
    one = "thd" if packed else "bshd"
    mask = "padding_causal" if packed else "causal"
    return {"qkv_layout": f"{one}_{one}_{one}", "o_format": one, "attn_mask_type": mask}


# Operations of their own, which torch.compile leaves whole.
@operation("megaspec::te_attention_forward")
def _te_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, packed: bool, before: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`starts`: int32, where each sequence begins, and the end of the last."""
    te = transformer_engine().attention
    lengths = starts if packed else None
    out, (lse, *_) = te.fused_attn_fwd(
        True,
        longest,
        longest,
        starts,
        starts,
        q,
        k,
        v,
        q.dtype,
        te.FusedAttnBackend.F16_arbitrary_seqlen,
        cu_seqlens_q_padded=lengths,
        cu_seqlens_kv_padded=lengths,
        attn_scale=scale,
        window_size=(before, 0),
        **_layout(packed),
    )
    return out, lse


@fake_of(_te_attention_forward)
def _(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, packed: bool, before: int, scale: float
) -> tuple[Tensor, Tensor]:
    if packed:
        P, N, _ = q.shape
        return q.new_empty(q.shape), q.new_empty(P, N, 1, dtype=torch.float32)
    B, T, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, N, T, 1, dtype=torch.float32)


@operation("megaspec::te_attention_backward")
def _te_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    packed: bool,
    before: int,
    scale: float,
    in_order: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    te = transformer_engine().attention
    lengths = starts if packed else None
    layout = _layout(packed)
    # of the generator of dropout, which there is none of
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    d_q, d_k, d_v, *_ = te.fused_attn_bwd(
        longest,
        longest,
        starts,
        starts,
        q,
        k,
        v,
        out,
        grad,
        q.dtype,
        [lse, state],
        te.FusedAttnBackend.F16_arbitrary_seqlen,
        cu_seqlens_q_padded=lengths,
        cu_seqlens_kv_padded=lengths,
        attn_scale=scale,
        do_format=layout["o_format"],
        dqkv_layout=layout["qkv_layout"],
        window_size=(before, 0),
        deterministic=in_order,
        **layout,
    )
    return d_q, d_k, d_v


@fake_of(_te_attention_backward)
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    longest: int,
    packed: bool,
    before: int,
    scale: float,
    in_order: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
