"""Attention through the packages of FlashAttention: 4 (flash-attn-4), 3 (its folder hopper) and 2 (flash-attn).

Each is an implementation of its own, so that a Spec says which one runs. They take whole sequences, documents by where
they begin, windows and capped scores, and give the log-sum-exp, so that sinks and ranks with a part of a sequence go
around them (sinks.py, one_block.py). Where torch.use_deterministic_algorithms asks for it they add gradients in one
order. What has a mask goes through sdpa_block.py, or by the equation where scores are capped.

FlashAttention-4 compiles its kernels when they are first called, some 10 s each for forward and backward.
"""

# B sequences, T queries, S keys, N query heads, K key and value heads, H head size; P = B · T and R = B · S packed

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megaspec_kernels.attention import one_order, reference_block, sdpa, sdpa_block, varlen
from megaspec_kernels.attention.documents import BlockDocuments, Documents
from megaspec_kernels.attention.one_block import attention_as_one_block
from megaspec_kernels.attention.packages import require
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.operation import fake_of, operation

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Call:
    """What all versions are told beside tensors."""

    longest_q: int
    longest_k: int
    causal: bool
    window: int | None
    scale: float
    cap: float

    @property
    def before(self) -> int:
        """How many keys before itself a query sees, -1 for all."""
        return -1 if self.window is None else self.window - 1

    @property
    def behind(self) -> int:
        """How many keys behind itself, -1 for all that `causal` leaves."""
        return -1 if self.window is None else 0

    @property
    def is_causal(self) -> bool:
        """A window says it itself."""
        return self.causal and self.window is None


@dataclass(frozen=True)
class FlashAttention:
    """A version's blocks, as AttentionKernel takes them."""

    version: int

    def attention(
        self,
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
        """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py."""
        assert drop is None, "flash_attn has no attention dropout here; the resolver picks reference"
        if q_BTNH.is_meta:
            # without numbers: a plain causal pass has the same results and keeps the same
            return sdpa.attention(q_BTNH, k_BTKH, v_BTKH, scoring=replace(scoring, cap=None), sinks=sinks)
        return attention_as_one_block(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            forward=self.block_forward,
            backward=self.block_backward,
            documents=documents,
            window=window,
            scoring=scoring,
            sinks=sinks,
        )

    def block_forward(
        self,
        q_BTNH: Tensor,
        k_BSKH: Tensor,
        v_BSKH: Tensor,
        *,
        causal: bool,
        mask: Tensor | None = None,
        documents: BlockDocuments | None = None,
        window: int | None = None,
        scoring: Scoring = PLAIN,
        drop: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """-> [B, T, N, H], [B, N, T]; see reference_block.py."""
        assert drop is None, "flash_attn has no attention dropout here; the resolver picks reference"
        if not _takes(q_BTNH, mask):
            return _other(scoring).block_forward(
                q_BTNH, k_BSKH, v_BSKH, causal=causal, mask=mask, documents=documents, window=window, scoring=scoring
            )
        B, T, _, H = q_BTNH.shape
        options = (causal, window, scoring.scale_of(H), scoring.cap or 0.0, self.version)
        if documents is None:
            return _forward(q_BTNH, k_BSKH, v_BSKH, None, None, T, k_BSKH.shape[1], *options)
        documents = BlockDocuments(documents.queries.for_rows(B), documents.keys.for_rows(B))
        packed = varlen.packed(q_BTNH, k_BSKH, v_BSKH)
        out_PNH, lse_NP = _forward(*packed, *_bounds(documents), *options)
        return varlen.block_results(out_PNH, lse_NP, documents, rows=B, causal=causal)

    def block_backward(
        self,
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
        drop: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> what the block adds to the gradients of q, k and v; see reference_block.py."""
        assert drop is None, "flash_attn has no attention dropout here; the resolver picks reference"
        tensors = (grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH)
        if not _takes(q_BTNH, mask):
            return _other(scoring).block_backward(
                *tensors, lse_BNT, causal=causal, mask=mask, documents=documents, window=window, scoring=scoring
            )
        B, T, _, H = q_BTNH.shape
        options = (causal, window, scoring.scale_of(H), scoring.cap or 0.0, self.version)
        if documents is None:
            return _backward(*tensors, lse_BNT.contiguous(), None, None, T, k_BSKH.shape[1], *options)
        documents = BlockDocuments(documents.queries.for_rows(B), documents.keys.for_rows(B))
        lse_NP = lse_BNT.transpose(0, 1).flatten(1).contiguous()
        grads = _backward(*varlen.packed(*tensors), lse_NP, *_bounds(documents), *options)
        return varlen.block_gradients(grads, documents, rows=B, causal=causal)


def _takes(q_BTNH: Tensor, mask: Tensor | None) -> bool:
    """Whether the package takes a block; fp32 and fp64 are refused before a run."""
    return mask is None and q_BTNH.dtype in _HALF and q_BTNH.device.type != "cpu"


def _other(scoring: Scoring) -> Any:
    """What takes a block that the package does not."""
    return sdpa_block if scoring.cap is None else reference_block


def _bounds(documents: BlockDocuments) -> tuple[Tensor, Tensor, int, int]:
    # of one query a sequence version 2 makes another problem, whose results lie otherwise
    longest_q = max(2, documents.queries.longest)
    longest_k = max(2, documents.keys.longest)
    return documents.queries.starts, documents.keys.starts, longest_q, longest_k


def _forward_2(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    package = require("flash_attn.flash_attn_interface")
    rest = (0.0, call.scale, call.is_causal, call.before, call.behind, call.cap, None, False)
    if starts_q is None:
        out, lse, *_ = package._flash_attn_forward(q, k, v, *rest)
    else:
        bounds = (starts_q, starts_k, call.longest_q, call.longest_k)
        out, lse, *_ = package._flash_attn_varlen_forward(q, k, v, *bounds, *rest)
    return out, lse


def _backward_2(
    tensors: tuple[Tensor, ...], lse: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    package = require("flash_attn.flash_attn_interface")
    grads = tuple(torch.empty_like(x) for x in tensors[1:4])
    rest = (0.0, call.scale, call.is_causal, call.before, call.behind, call.cap, None, one_order.is_asked_for())
    if starts_q is None:
        package._flash_attn_backward(*tensors, lse, *grads, *rest)
    else:
        bounds = (starts_q, starts_k, call.longest_q, call.longest_k)
        package._flash_attn_varlen_backward(*tensors, lse, *grads, *bounds, *rest)
    return grads


def _forward_3(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    options = {}
    if starts_q is not None:
        options = {
            "cu_seqlens_q": starts_q,
            "cu_seqlens_k": starts_k,
            "max_seqlen_q": call.longest_q,
            "max_seqlen_k": call.longest_k,
        }
    out, lse, *_ = require("flash_attn_interface")._flash_attn_forward(
        q,
        k,
        v,
        softmax_scale=call.scale,
        causal=call.is_causal,
        window_size_left=call.before,
        window_size_right=call.behind,
        softcap=call.cap,
        **options,
    )
    return out, lse


def _backward_3(
    tensors: tuple[Tensor, ...], lse: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    options = {}
    if starts_q is not None:
        options = {
            "cu_seqlens_q": starts_q,
            "cu_seqlens_k": starts_k,
            "max_seqlen_q": call.longest_q,
            "max_seqlen_k": call.longest_k,
        }
    d_q, d_k, d_v = (torch.empty_like(x) for x in tensors[1:4])
    require("flash_attn_interface")._flash_attn_backward(
        *tensors,
        lse,
        dq=d_q,
        dk=d_k,
        dv=d_v,
        softmax_scale=call.scale,
        is_causal=call.is_causal,
        window_size_left=call.before,
        window_size_right=call.behind,
        softcap=call.cap,
        deterministic=one_order.is_asked_for(),
        **options,
    )
    return d_q, d_k, d_v


def _options_4(starts_q: Tensor | None, starts_k: Tensor | None, call: _Call) -> dict[str, Any]:
    options = {
        "softmax_scale": call.scale,
        "causal": call.is_causal,
        "softcap": call.cap,
        "window_size_left": None if call.window is None else call.before,
        "window_size_right": None if call.window is None else call.behind,
    }
    if starts_q is None:
        return options
    return options | {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "max_seqlen_q": call.longest_q,
        "max_seqlen_k": call.longest_k,
    }


def _forward_4(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor]:
    options = _options_4(starts_q, starts_k, call)
    out, lse, *_ = require("flash_attn.cute.interface")._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, lse


def _backward_4(
    tensors: tuple[Tensor, ...], lse: Tensor, starts_q: Tensor | None, starts_k: Tensor | None, call: _Call
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = tensors
    options = _options_4(starts_q, starts_k, call)
    package = require("flash_attn.cute.interface")
    d_q, d_k, d_v = package._flash_attn_bwd(q, k, v, out, grad, lse, deterministic=one_order.is_asked_for(), **options)
    return d_q, d_k, d_v


# By version.
_FORWARD = {2: _forward_2, 3: _forward_3, 4: _forward_4}
_BACKWARD = {2: _backward_2, 3: _backward_3, 4: _backward_4}


# Operations of their own: torch.compile can't look into them.
@operation("megaspec::flash_attn")
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    cap: float,
    version: int,
) -> tuple[Tensor, Tensor]:
    """[B, T, N, H] -> [B, T, N, H] and [B, N, T], or with documents [P, N, H] -> [P, N, H] and [N, P]."""
    assert causal or window is None, "a window counts back from the query itself"
    call = _Call(longest_q, longest_k, causal, window, scale, cap)
    q, k, v = (_dense(x) for x in (q, k, v))
    return _FORWARD[version](q, k, v, starts_q, starts_k, call)


@fake_of(_forward)
def _(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, window, scale, cap, version):
    lse = (q.shape[1], q.shape[0]) if starts_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(lse, dtype=torch.float32)


@operation("megaspec::flash_attn_backward")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: int | None,
    scale: float,
    cap: float,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(longest_q, longest_k, causal, window, scale, cap)
    tensors = tuple(x.contiguous() for x in (grad, q, k, v, out))
    return _BACKWARD[version](tensors, lse, starts_q, starts_k, call)


@fake_of(_backward)
def _(grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, causal, window, scale, cap, version):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


FLASH_ATTN_2 = FlashAttention(2)
FLASH_ATTN_3 = FlashAttention(3)
FLASH_ATTN_4 = FlashAttention(4)
