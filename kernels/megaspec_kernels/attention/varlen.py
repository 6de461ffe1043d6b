"""Blocks of attention document by document, without a mask: what a document does not see is not computed.

flash: FlashAttention-2 (Dao 2023) as torch has it, for documents of different lengths in one call, on GPUs in bf16 and
fp16. It takes grouped heads and windows, and adds gradients in one order where torch.use_deterministic_algorithms asks
for it. each: one document after the other by the equation, on a CPU, where the host may read how long they are.

Note "cuDNN". Its kernels for documents are reached through aten._cudnn_attention_forward with cum_seq_q, too. Up to
torch 2.13 every such call makes its plan anew on the host, 42 ms (pytorch/pytorch#191576, which mends it), against a
few ms that a layer computes. So cudnn.py reaches them through NVIDIA's own package.
"""

# B sequences, T queries, S keys, N query heads, K key and value heads, H head size; P = B · T and R = B · S packed

from typing import Literal

import torch
from torch import Tensor

from megaspec_kernels.attention import reference_block
from megaspec_kernels.attention.documents import BlockDocuments
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.operation import fake_of, operation

_aten = torch.ops.aten

Way = Literal["flash", "each"]


def forward(
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    *,
    way: Way,
    documents: BlockDocuments,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """-> [B, T, N, H], [B, N, T]; see reference_block.py. Zeros and -inf where a query's document has no key here."""
    bounds = (documents.queries.starts, documents.keys.starts, documents.queries.longest, documents.keys.longest)
    run = _flash_forward if way == "flash" else _each_forward
    out_PNH, lse_NP = run(*packed(q_BTNH, k_BSKH, v_BSKH), *bounds, causal, window, scale)
    return block_results(out_PNH, lse_NP, documents, rows=q_BTNH.shape[0], causal=causal)


def block_results(
    out_PNH: Tensor, lse_NP: Tensor, documents: BlockDocuments, *, rows: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Of packed tokens -> [B, T, N, H], [B, N, T] of so many rows, with zeros and -inf where a query sees nothing."""
    out_BTNH = out_PNH.unflatten(0, (rows, -1))
    lse_BNT = lse_NP.unflatten(1, (rows, -1)).transpose(0, 1)
    if causal:
        # a query sees itself at least
        return out_BTNH, lse_BNT
    # what a kernel leaves for queries without keys differs
    seen_BT = _is_met(documents.queries.number, documents.keys.starts)
    out_BTNH = torch.where(seen_BT[..., None, None], out_BTNH, 0.0)
    return out_BTNH, torch.where(seen_BT[:, None], lse_BNT, float("-inf"))


def backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    *,
    way: Way,
    documents: BlockDocuments,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> what the block adds to the gradients of q, k and v; see reference_block.py."""
    lse_NP = lse_BNT.transpose(0, 1).flatten(1).contiguous()
    tensors = packed(grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH)
    bounds = (documents.queries.starts, documents.keys.starts, documents.queries.longest, documents.keys.longest)
    run = _flash_backward if way == "flash" else _each_backward
    grads = run(*tensors, lse_NP, *bounds, causal, window, scale)
    return block_gradients(grads, documents, rows=q_BTNH.shape[0], causal=causal)


def block_gradients(
    grads: tuple[Tensor, Tensor, Tensor], documents: BlockDocuments, *, rows: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed tokens -> of so many rows, with zeros where a document has no queries or no keys."""
    d_q, d_k, d_v = (x.unflatten(0, (rows, -1)) for x in grads)
    if causal:
        return d_q, d_k, d_v
    has_keys_BT = _is_met(documents.queries.number, documents.keys.starts)[..., None, None]
    has_queries_BS = _is_met(documents.keys.number, documents.queries.starts)[..., None, None]
    return (
        torch.where(has_keys_BT, d_q, 0.0),
        torch.where(has_queries_BS, d_k, 0.0),
        torch.where(has_queries_BS, d_v, 0.0),
    )


def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, T, N, H] -> [B · T, N, H] of each."""
    return tuple(x.flatten(0, 1) for x in tensors)


def _is_met(number_BT: Tensor, starts_of_others: Tensor) -> Tensor:
    """bool [B, T]: whether a token's document has tokens on the other side of the block."""
    B = number_BT.shape[0]
    counts_BD = starts_of_others.diff().view(B, -1)
    return counts_BD.gather(1, number_BT.to(torch.int64)) > 0


def _flash_bounds(causal: bool, window: int | None) -> tuple[bool, int, int]:
    """is_causal, and how many keys before and behind itself a query sees, -1 for all."""
    if window is not None:
        assert causal, "a window counts back from the query itself"
        return False, window - 1, 0
    return causal, -1, -1


def _flash_forward(
    q_PNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    is_causal, before, behind = _flash_bounds(causal, window)
    out, lse, *_ = _aten._flash_attention_forward.default(
        q_PNH,
        k_RKH,
        v_RKH,
        starts_q,
        starts_k,
        # of one query a sequence torch makes another problem, whose results lie otherwise
        max(2, longest_q),
        max(2, longest_k),
        0.0,
        is_causal,
        False,
        scale=scale,
        window_size_left=before,
        window_size_right=behind,
    )
    return out, lse


def _flash_backward(
    grad_PNH: Tensor,
    q_PNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    out_PNH: Tensor,
    lse_NP: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, before, behind = _flash_bounds(causal, window)
    # of the generator of dropout, which there is none of
    state = torch.zeros(2, dtype=torch.uint64, device=q_PNH.device)
    unused = torch.empty(0, device=q_PNH.device)
    return _aten._flash_attention_backward.default(
        grad_PNH,
        q_PNH,
        k_RKH,
        v_RKH,
        out_PNH,
        lse_NP,
        starts_q,
        starts_k,
        max(2, longest_q),
        max(2, longest_k),
        0.0,
        is_causal,
        state,
        unused,
        scale=scale,
        window_size_left=before,
        window_size_right=behind,
    )


# An operation of its own: it reads lengths, which torch.compile can't trace.
@operation("megaspec::attend_each_document")
def _each_forward(
    q_PNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_PNH.dtype, torch.float32)
    # documents without keys here keep these
    out_PNH = q_PNH.new_zeros(q_PNH.shape)
    lse_NP = q_PNH.new_full((q_PNH.shape[1], q_PNH.shape[0]), float("-inf"), dtype=wide)
    for queries, keys in _pieces(starts_q, starts_k, longest_q, longest_k):
        out, lse = reference_block.block_forward(
            q_PNH[None, queries],
            k_RKH[None, keys],
            v_RKH[None, keys],
            causal=causal,
            window=window,
            scoring=Scoring(scale),
        )
        out_PNH[queries] = out[0]
        lse_NP[:, queries] = lse[0]
    return out_PNH, lse_NP


@fake_of(_each_forward)
def _(q_PNH, k_RKH, v_RKH, starts_q, starts_k, longest_q, longest_k, causal, window, scale):
    wide = torch.promote_types(q_PNH.dtype, torch.float32)
    return q_PNH.new_empty(q_PNH.shape), q_PNH.new_empty((q_PNH.shape[1], q_PNH.shape[0]), dtype=wide)


@operation("megaspec::attend_each_document_backward")
def _each_backward(
    grad_PNH: Tensor,
    q_PNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    out_PNH: Tensor,
    lse_NP: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # documents that meet nothing here keep zeros
    d_q = q_PNH.new_zeros(q_PNH.shape)
    d_k = k_RKH.new_zeros(k_RKH.shape)
    d_v = v_RKH.new_zeros(v_RKH.shape)
    for queries, keys in _pieces(starts_q, starts_k, longest_q, longest_k):
        of_queries, of_keys, of_values = reference_block.block_backward(
            grad_PNH[None, queries],
            q_PNH[None, queries],
            k_RKH[None, keys],
            v_RKH[None, keys],
            out_PNH[None, queries],
            lse_NP[None, :, queries],
            causal=causal,
            window=window,
            scoring=Scoring(scale),
        )
        d_q[queries] = of_queries[0]
        d_k[keys] = of_keys[0]
        d_v[keys] = of_values[0]
    return d_q, d_k, d_v


@fake_of(_each_backward)
def _(grad_PNH, q_PNH, k_RKH, v_RKH, out_PNH, lse_NP, starts_q, starts_k, longest_q, longest_k, causal, window, scale):
    return q_PNH.new_empty(q_PNH.shape), k_RKH.new_empty(k_RKH.shape), v_RKH.new_empty(v_RKH.shape)


def _pieces(starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int) -> list[tuple[slice, slice]]:
    """Queries and keys of the documents that have both."""
    of_queries = starts_q.tolist()
    of_keys = starts_k.tolist()
    pieces = []
    for d in range(len(of_queries) - 1):
        queries = slice(of_queries[d], of_queries[d + 1])
        keys = slice(of_keys[d], of_keys[d + 1])
        n_queries = queries.stop - queries.start
        n_keys = keys.stop - keys.start
        # a GPU's kernel would leave out what is beyond the bounds, and say nothing
        assert n_queries <= longest_q, f"a document of {n_queries} queries, the bound says {longest_q}"
        assert n_keys <= longest_k, f"a document of {n_keys} keys, the bound says {longest_k}"
        if n_queries > 0 and n_keys > 0:
            pieces.append((queries, keys))
    return pieces
