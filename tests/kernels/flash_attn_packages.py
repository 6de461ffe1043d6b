"""What kernels/megaspec_kernels/attention/flash_attn.py asks of the packages of FlashAttention, on a CPU.

The private functions under their autograd, with the arguments that flash-attn 2.8, flash-attention's hopper folder
(2026-08) and flash-attn-4 4.0.0b36 name, done by the equation. What a package leaves of queries that see nothing, and
of gradients of tokens that nobody meets, is NaN here.
"""

import torch
from torch import Tensor

from megaspec_kernels.attention import reference_block
from megaspec_kernels.attention.scoring import Scoring


def _pieces(starts_q: Tensor | None, starts_k: Tensor | None, longest_q: int, longest_k: int, rows: int) -> list[tuple]:
    """Index of queries and of keys of each sequence: a row of a batch, or a document."""
    if starts_q is None:
        return [((row,), (row,)) for row in range(rows)]
    pieces = []
    for q, k in zip(starts_q.tolist(), starts_q.tolist()[1:], strict=False):
        assert k - q <= longest_q
    for d in range(len(starts_q) - 1):
        queries = slice(int(starts_q[d]), int(starts_q[d + 1]))
        keys = slice(int(starts_k[d]), int(starts_k[d + 1]))
        assert keys.stop - keys.start <= longest_k
        if queries.stop > queries.start and keys.stop > keys.start:
            pieces.append((queries, keys))
    return pieces


def _options(causal: bool, before: int | None, behind: int | None, scale: float, cap: float) -> dict:
    """A window of a causal pass is said by -1 or None and by what lies before a query."""
    window = None
    if before is not None and before >= 0:
        assert not causal
        assert behind == 0
        window = before + 1
    return {"causal": causal or window is not None, "window": window, "scoring": Scoring(scale, cap or None)}


def attend(q, k, v, starts_q, starts_k, longest_q, longest_k, **options) -> tuple[Tensor, Tensor]:
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out = torch.full_like(q, float("nan"))
    of_heads = (q.shape[1], q.shape[0]) if starts_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(of_heads, float("nan"), dtype=torch.float32)
    for queries, keys in _pieces(starts_q, starts_k, longest_q, longest_k, q.shape[0]):
        one_out, one_lse = reference_block.block_forward(
            q[queries][None], k[keys][None], v[keys][None], **_options(**options)
        )
        out[queries] = one_out[0]
        if starts_q is None:
            lse[queries] = one_lse[0]
        else:
            lse[:, queries] = one_lse[0]
    return out, lse


def gradients(grad, q, k, v, out, lse, d_q, d_k, d_v, starts_q, starts_k, longest_q, longest_k, **options) -> None:
    assert all(x.is_contiguous() for x in (grad, q, k, v, out, lse))
    for x in (d_q, d_k, d_v):
        x.fill_(float("nan"))
    for queries, keys in _pieces(starts_q, starts_k, longest_q, longest_k, q.shape[0]):
        of_piece = lse[queries] if starts_q is None else lse[:, queries]
        found = reference_block.block_backward(
            grad[queries][None],
            q[queries][None],
            k[keys][None],
            v[keys][None],
            out[queries][None],
            of_piece[None],
            **_options(**options),
        )
        for mine, where, one in zip((d_q, d_k, d_v), (queries, keys, keys), found, strict=True):
            mine[where] = one[0].to(mine.dtype)


class Second:
    """flash_attn.flash_attn_interface, positions and all."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return Second._flash_attn_varlen_forward(
            q, k, v, None, None, 0, 0, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
            alibi_slopes, return_softmax,
        )  # fmt: skip

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    ):  # fmt: skip
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert return_softmax is False
        out, lse = attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, before=window_size_left,
            behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip
        return out, lse, None, None

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        return Second._flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, 0, 0, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        )  # fmt: skip

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert deterministic is False
        gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            causal=causal, before=window_size_left, behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip


class Third:
    """flash_attn_interface of the folder hopper."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        out, lse = attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, before=window_size_left,
            behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip
        return out, lse, None, None

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
    ):  # fmt: skip
        gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            causal=is_causal, before=window_size_left, behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip


class Fourth:
    """flash_attn.cute.interface."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        out, lse = attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, before=window_size_left,
            behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip
        return out, lse, None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        gradients(
            dout, q, k, v, out, lse, *found, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
            before=window_size_left, behind=window_size_right, scale=softmax_scale, cap=softcap,
        )  # fmt: skip
        return found


PACKAGES = {
    "flash_attn.flash_attn_interface": Second,
    "flash_attn_interface": Third,
    "flash_attn.cute.interface": Fourth,
}
