"""Causal attention through torch's scaled_dot_product_attention, cuDNN first on CUDA."""

# B sequences, T tokens, N query heads, K key and value heads, H head size

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaspec_kernels.attention import sdpa_block
from megaspec_kernels.attention.documents import Documents
from megaspec_kernels.attention.one_block import attention_as_one_block
from megaspec_kernels.attention.reference import seen
from megaspec_kernels.attention.scoring import PLAIN, Scoring

# The first that takes the inputs. cuDNN, the fastest on Hopper, takes bf16 and fp16, groups included, and has no
# deterministic backward pass; memory-efficient attention takes fp32, and no grouped heads, so as_kernels_want repeats
# keys and values there. MATH would take everything and keep the scores, T² for each head. It is not in the list: what
# no fused kernel takes fails instead, when a run is built (see served_by and expected).
_FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
# No fused kernel computes in fp64, which is for comparing.
_FP64 = (SDPBackend.MATH,)


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

    RuntimeError: on CUDA no fused kernel takes it.
    """
    assert drop is None, "sdpa has no attention dropout; the resolver picks reference"
    assert scoring.cap is None, "sdpa caps no scores; the resolver picks another"
    is_cpu = q_BTNH.device.type == "cpu"
    if q_BTNH.shape[1] == 1 or q_BTNH.is_meta:
        # one token sees itself alone, with documents as without; without numbers, what is hidden leaves out nothing
        documents = None
        window = None
    # what hides keys, or takes a sink, goes as one block; a window alone has a fused kernel on CPUs
    if sinks is not None or documents is not None or (window is not None and not is_cpu):
        return attention_as_one_block(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            forward=sdpa_block.block_forward,
            backward=sdpa_block.block_backward,
            documents=documents,
            window=window,
            scoring=scoring,
            sinks=sinks,
        )
    q = q_BTNH.transpose(1, 2)
    k = k_BTKH.transpose(1, 2)
    v = v_BTKH.transpose(1, 2)
    if is_cpu:
        mask = None
        if window is not None:
            mask = seen(q.shape[2], documents=None, window=window, device=q.device)
        return _sdpa(q, k, v, mask, scoring.scale).transpose(1, 2)
    with sdpa_kernel(list(backends(q.dtype)), set_priority=True):
        return _sdpa(*as_kernels_want(q, k, v), None, scoring.scale).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def backends(dtype: torch.dtype) -> tuple[SDPBackend, ...]:
    """What may compute in a format on CUDA."""
    if dtype == torch.float64:
        return _FP64
    return _FUSED


def as_kernels_want(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, T, H], [B, K, T, H] twice -> the same with the elements of a head side by side, and with keys and values
    once for each query head in fp32, for which only the kernel serves that takes no grouped heads."""
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and q.dtype == torch.float32:
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    return _dense(q), _dense(k), _dense(v)


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def served_by(
    *, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """The kernel that takes such attention on this GPU in training: cudnn, flash or efficient, or None. Asked of torch,
    without attending, as `attention` sets it up.

    Of attention that hides nothing and has no sinks; what goes as a block has sdpa_block.choose. In fp64 it is plain
    products. torch.use_deterministic_algorithms counts: cuDNN is left out then.
    """
    asked = _asked(n_heads, n_kv_heads, d_head, tokens, dtype, device)
    with sdpa_kernel(list(_FUSED), set_priority=True):
        for name in _NAMES:
            if _takes(name, asked):
                return name
    return None


def is_refused(
    *, n_heads: int, n_kv_heads: int, d_head: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether no kernel takes such attention, see served_by; in fp64 none is wanted."""
    if dtype == torch.float64:
        return False
    taken = served_by(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, tokens=tokens, dtype=dtype, device=device)
    return taken is None


def expected(*, d_head: int, tokens: int, dtype: torch.dtype, sm: int, deterministic: bool) -> str | None:
    """The kernel that a plan's times are of, where they are of one: anything else that torch takes is another run.

    cuDNN on Hopper and later, in bf16 and fp16; it has no deterministic backward pass, FlashAttention-2 has one.
    """
    is_usual = dtype in (torch.bfloat16, torch.float16) and tokens > 1 and d_head % 8 == 0
    if not is_usual:
        return None
    if deterministic:
        return "flash" if d_head <= 256 and sm >= 80 else None
    return "cudnn" if d_head <= 128 and sm >= 90 else None


# In the order in which `attention` has them tried.
_NAMES = ("cudnn", "flash", "efficient")


def _takes(name: str, asked: torch.backends.cuda.SDPAParams) -> bool:
    return getattr(torch.backends.cuda, f"can_use_{name}_attention")(asked)


def _asked(
    n_heads: int, n_kv_heads: int, d_head: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> torch.backends.cuda.SDPAParams:
    def heads(count: int) -> Tensor:
        one = torch.empty(1, 1, 1, d_head, dtype=dtype, device=device, requires_grad=True)
        return one.expand(1, count, tokens, d_head)

    q, k, v = as_kernels_want(heads(n_heads), heads(n_kv_heads), heads(n_kv_heads))
    return torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
