"""Causal attention through torch's scaled_dot_product_attention, cuDNN first on CUDA."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaspec_kernels.attention import sdpa_block
from megaspec_kernels.attention.reference import seen
from megaspec_kernels.attention.scoring import PLAIN, Scoring
from megaspec_kernels.attention.sinks import attention_with_sinks

# The first that takes the inputs. cuDNN, the fastest on Hopper, takes bf16 and fp16, masks and groups included, and has
# no deterministic backward pass; FlashAttention takes no mask; memory-efficient attention takes masks and fp32, and no
# grouped heads, so as_kernels_want repeats keys and values where it alone serves. MATH would take everything and keep
# the scores, T² for each head. It is not in the list: what no fused kernel takes fails instead (see is_refused).
_FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
# No fused kernel computes in fp64, which is for comparing.
_FP64 = (SDPBackend.MATH,)


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[B, T, N, H], [B, T, K, H], [B, T, K, H] -> [B, T, N, H]; see reference.py.

    RuntimeError: on CUDA no fused kernel takes it.
    """
    assert drop is None, "sdpa has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "sdpa caps no scores; the resolver picks another"
    T = q_BTNH.shape[1]
    mask = None
    # one token sees itself alone, with documents as without
    if T > 1 and not (documents is None and window is None):
        mask = seen(T, documents=documents, window=window, device=q_BTNH.device)
    if sinks is not None:
        if mask is not None and mask.dim() == 2:
            mask = mask[None, None]
        return attention_with_sinks(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            sinks,
            forward=sdpa_block.block_forward,
            backward=sdpa_block.block_backward,
            mask=mask,
            scoring=scoring,
        )
    q = q_BTNH.transpose(1, 2)
    k = k_BTKH.transpose(1, 2)
    v = v_BTKH.transpose(1, 2)
    if q.device.type == "cpu":
        return _sdpa(q, k, v, mask, scoring.scale).transpose(1, 2)
    with sdpa_kernel(list(backends(q.dtype)), set_priority=True):
        return _sdpa(*as_kernels_want(q, k, v, masked=mask is not None), mask, scoring.scale).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def backends(dtype: torch.dtype) -> tuple[SDPBackend, ...]:
    """What may compute in a format on CUDA."""
    if dtype == torch.float64:
        return _FP64
    return _FUSED


def as_kernels_want(q: Tensor, k: Tensor, v: Tensor, *, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, T, H], [B, K, T, H] twice -> the same with the elements of a head side by side, and with keys and values
    once for each query head where only the kernel serves that takes no grouped heads: in fp32, and for a mask when sums
    are kept in one order."""
    is_grouped = q.shape[1] != k.shape[1]
    ungrouped_alone = q.dtype == torch.float32 or (masked and torch.are_deterministic_algorithms_enabled())
    if is_grouped and ungrouped_alone and q.dtype != torch.float64:
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    return _dense(q), _dense(k), _dense(v)


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def is_refused(
    *, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, masked: bool, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether no kernel takes such attention on this GPU in training, asked of torch without attending.

    `masked`: with documents or a window. torch.use_deterministic_algorithms counts: cuDNN is left out then.
    """
    if dtype == torch.float64:
        return False

    def heads(count: int) -> Tensor:
        one = torch.empty(1, 1, 1, d_head, dtype=dtype, device=device, requires_grad=True)
        return one.expand(1, count, tokens, d_head)

    has_mask = masked and tokens > 1
    q, k, v = as_kernels_want(heads(n_heads), heads(n_kv_heads), heads(n_kv_heads), masked=has_mask)
    mask = None
    if has_mask:
        # one row, repeated: torch refuses a mask whose columns don't lie side by side
        mask = torch.empty(1, 1, 1, tokens, dtype=torch.bool, device=device).expand(1, 1, tokens, tokens)
    asked = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, mask is None, q.shape[1] != k.shape[1])
    takes = (
        torch.backends.cuda.can_use_cudnn_attention(asked),
        torch.backends.cuda.can_use_flash_attention(asked),
        torch.backends.cuda.can_use_efficient_attention(asked),
    )
    return not any(takes)
