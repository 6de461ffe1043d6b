"""Blocks of attention through the operators under torch's scaled_dot_product_attention, which give the log-sum-exp.

cuDNN on Hopper and later, FlashAttention-2 otherwise and for documents and windows (varlen.py), memory-efficient
attention for masks and fp32, equations for what none of them takes. All speak of the same natural log-sum-exp, so that
forward and backward may go different ways.
"""

# B sequences, T queries, S keys, N query heads, K key and value heads, H head size

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megaspec_kernels.attention import one_order, reference_block, varlen
from megaspec_kernels.attention.documents import BlockDocuments, whole_rows
from megaspec_kernels.attention.reference_block import Drop
from megaspec_kernels.attention.scoring import PLAIN, Scoring

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)

Way = Literal["cudnn", "flash", "efficient", "equations", "flash by document", "equations by document"]


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
    """-> [B, T, N, H], [B, N, T]; see reference_block.py."""
    assert drop is None, "sdpa has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "sdpa caps no scores; the resolver picks another"
    q_BTNH = _dense(q_BTNH)
    k_BSKH = _dense(k_BSKH)
    v_BSKH = _dense(v_BSKH)
    way = choose(q_BTNH, k_BSKH, masked=mask is not None, documents=documents is not None, window=window is not None)
    if way in _BY_DOCUMENT:
        documents = _of_each_token(documents, q_BTNH)
        return varlen.forward(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            way=_BY_DOCUMENT[way],
            documents=documents,
            causal=causal,
            window=window,
            scale=scoring.scale,
        )
    if way == "equations":
        return reference_block.block_forward(
            q_BTNH, k_BSKH, v_BSKH, causal=causal, mask=mask, documents=documents, window=window, scoring=scoring
        )
    if way == "efficient":
        mask = _as_mask(mask, documents, window, q_BTNH)
        return _efficient_forward(q_BTNH, k_BSKH, v_BSKH, causal, mask, scoring.scale)
    if way == "cudnn":
        return _cudnn_forward(q_BTNH, k_BSKH, v_BSKH, causal, scoring.scale)
    return _flash_forward(q_BTNH, k_BSKH, v_BSKH, causal, scoring.scale)


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
    """-> what the block adds to the gradients of q, k and v; see reference_block.py."""
    assert drop is None, "sdpa has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "sdpa caps no scores; the resolver picks another"
    way = choose(q_BTNH, k_BSKH, masked=mask is not None, documents=documents is not None, window=window is not None)
    tensors = (*(_dense(x) for x in (grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH)), lse_BNT)
    if way in _BY_DOCUMENT:
        documents = _of_each_token(documents, q_BTNH)
        return varlen.backward(
            *tensors, way=_BY_DOCUMENT[way], documents=documents, causal=causal, window=window, scale=scoring.scale
        )
    if way == "equations":
        return reference_block.block_backward(
            *tensors, causal=causal, mask=mask, documents=documents, window=window, scoring=scoring
        )
    if way == "efficient":
        return _efficient_backward(*tensors, causal, _as_mask(mask, documents, window, q_BTNH), scoring.scale)
    if way == "cudnn":
        return _cudnn_backward(*tensors, causal, scoring.scale)
    return _flash_backward(*tensors, causal, scoring.scale)


# Ways that leave out what documents and windows hide, by what varlen.py calls them.
_BY_DOCUMENT: dict[Way, varlen.Way] = {"flash by document": "flash", "equations by document": "each"}


def choose(q_BTNH: Tensor, k_BSKH: Tensor, *, masked: bool, documents: bool = False, window: bool = False) -> Way:
    """The operator that takes a block. `masked`: with a mask, which documents and windows may come beside."""
    H = q_BTNH.shape[-1]
    dtype = q_BTNH.dtype
    if q_BTNH.device.type == "cpu":
        # where the host may read how long documents are
        return "equations by document" if documents and not masked else "equations"
    if dtype == torch.float64 or not _is_aligned(H, dtype):
        return "equations"
    # the GPU's generation: 8 Ampere, 9 Hopper; tensors without numbers go the way of Hopper
    major = 9
    if not q_BTNH.is_meta:
        major, _ = torch.cuda.get_device_capability(q_BTNH.device)
    if masked or dtype not in _HALF or major < 8 or H > 256:
        return "efficient"
    if documents or window:
        return "flash by document"
    # cuDNN has no deterministic backward pass, and takes no single key
    if major >= 9 and H <= 128 and k_BSKH.shape[1] > 1 and not one_order.is_asked_for():
        return "cudnn"
    return "flash"


def is_refused(*, d_head: int, dtype: torch.dtype) -> bool:
    """Whether on a GPU only equations take such heads, which keep the scores of a block; in fp64 that is meant."""
    return dtype != torch.float64 and not _is_aligned(d_head, dtype)


def _is_aligned(d_head: int, dtype: torch.dtype) -> bool:
    """The operators load 16 bytes at a time."""
    return d_head * dtype.itemsize % 16 == 0


def _of_each_token(documents: BlockDocuments | None, q_BTNH: Tensor) -> BlockDocuments:
    """Of every row; a window alone lies in rows of one document."""
    B, T = q_BTNH.shape[:2]
    if documents is not None:
        return BlockDocuments(documents.queries.for_rows(B), documents.keys.for_rows(B))
    rows = whole_rows(B, T, device=q_BTNH.device)
    return BlockDocuments(rows, rows)


def _as_mask(
    mask: Tensor | None, documents: BlockDocuments | None, window: int | None, q_BTNH: Tensor
) -> Tensor | None:
    """bool [B or 1, 1, T, S]: all that hides keys, for an operator that takes a mask alone; None where nothing does."""
    found = []
    if mask is not None:
        found.append(mask)
    if documents is not None:
        found.append(documents.mask())
    if window is not None:
        T = q_BTNH.shape[1]
        found.append(torch.ones(1, 1, T, T, dtype=torch.bool, device=q_BTNH.device).triu(1 - window))
    if not found:
        return None
    total = found[0]
    for one in found[1:]:
        total = total & one
    return total


def _cudnn_forward(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q_BTNH, k_BSKH, v_BSKH)
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.view(lse.shape[:3])


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BNT: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # torch keeps cuDNN's plans by the strides of q, k and v alone: the other two always come in the same layout
    grad = grad.contiguous()
    out = out.contiguous()
    lse = lse_BNT.contiguous()
    if _cudnn_lse_dims() == 4:
        lse = lse[..., None]
    grad, q, k, v, out = _heads_first(grad, q, k, v, out)
    # of dropout, which there is none of
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = _aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )
    return _heads_behind(*grads)


@torch.compiler.assume_constant_result
def _cudnn_lse_dims() -> int:
    """Dimensions of cuDNN's log-sum-exp, [B, N, T] or [B, N, T, 1]: it depends on the version of torch."""
    return _measured_cudnn_lse_dims()


@cache
def _measured_cudnn_lse_dims() -> int:
    x = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="meta")
    return _aten._scaled_dot_product_cudnn_attention.default(x, x, x, None, True)[1].dim()


def _flash_forward(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q_BTNH, k_BSKH, v_BSKH)
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BNT: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = _heads_first(grad, q, k, v, out)
    # of the generator of dropout, which there is none of
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = _aten._scaled_dot_product_flash_attention_backward.default(
        grad,
        q,
        k,
        v,
        out,
        lse_BNT.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        state,
        state[0],
        scale=scale,
    )
    return _heads_behind(*grads)


def _efficient_forward(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    T = q_BTNH.shape[1]
    groups = q_BTNH.shape[2] // k_BSKH.shape[2]  # query heads of a key and value head
    q, k, v = _heads_first(q_BTNH, _repeated(k_BSKH, groups), _repeated(v_BSKH, groups))
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention.default(
        q, k, v, _bias(q, k, mask), True, 0.0, causal, scale=scale
    )
    out_BTNH = out.transpose(1, 2)
    lse_BNT = lse[..., :T]  # padded to a multiple of 32
    if mask is None:
        return out_BTNH, lse_BNT
    # what the operator gives for a query that sees nothing differs among its kernels
    if causal:
        mask = mask.tril()
    seen_B1T = mask.any(dim=-1)
    out_BTNH = torch.where(seen_B1T.transpose(1, 2)[..., None], out_BTNH, 0.0)
    return out_BTNH, torch.where(seen_B1T, lse_BNT, float("-inf"))


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out: Tensor,
    lse_BNT: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    T = q.shape[1]
    K = k_BSKH.shape[2]
    groups = q.shape[2] // K  # query heads of a key and value head
    # infinite where a query sees nothing and in the padding to 32 that the operator reads: exp(score - lse) is zero
    lse = lse_BNT.masked_fill(lse_BNT == float("-inf"), float("inf"))
    lse = torch.nn.functional.pad(lse, (0, -T % 32), value=float("inf"))
    # the operator takes the rows of `out` to lie N · H apart, whatever its strides say
    grad, q, k, v, out = _heads_first(grad, q, _repeated(k_BSKH, groups), _repeated(v_BSKH, groups), out.contiguous())
    # of dropout, which there is none of
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    needed = [True, True, True, False]
    d_q, d_k, d_v, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, _bias(q, k, mask), out, lse, seed, seed, 0.0, needed, causal, scale=scale
    )
    d_q, d_k, d_v = _heads_behind(d_q, d_k, d_v)
    return d_q, _summed(d_k, K), _summed(d_v, K)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, T, N, H] -> [B, N, T, H] of each, as the operators take them."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _heads_behind(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, N, T, H] -> [B, T, N, H] of each, as everybody else takes them."""
    return tuple(x.transpose(1, 2) for x in tensors)


def _dense(x: Tensor) -> Tensor:
    """The operators want the elements of a head side by side."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _repeated(x_BSKH: Tensor, groups: int) -> Tensor:
    """Keys or values once for each query head: [B, S, K, H] -> [B, S, K · groups, H]."""
    if groups == 1:
        return x_BSKH
    return x_BSKH.repeat_interleave(groups, dim=2)


def _summed(x_BSNH: Tensor, K: int) -> Tensor:
    """Gradients of what `_repeated` repeated: [B, S, N, H] -> [B, S, K, H]."""
    return x_BSNH.unflatten(2, (K, -1)).sum(dim=3)


def _bias(q_BNTH: Tensor, k_BNSH: Tensor, mask: Tensor | None) -> Tensor | None:
    """0 and -inf [B, N, T, S], in rows of a multiple of 16 elements as the operator wants them."""
    if mask is None:
        return None
    B, N, T, _ = q_BNTH.shape
    S = k_BNSH.shape[2]
    bias = torch.zeros(B, 1, T, S + -S % 16, dtype=q_BNTH.dtype, device=q_BNTH.device)[..., :S]
    return bias.masked_fill_(~mask, float("-inf")).expand(B, N, T, S)
