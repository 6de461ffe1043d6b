"""The chunked output head and loss with two fused kernels: one pass for the softmax sums, one that turns logits into
their gradient in place. Meta tensors get their shapes, as from any operation of torch."""

# C tokens of a piece, V columns of the logits on this rank

import torch
from torch import Tensor

from megaspec_kernels.cross_entropy.chunked import ChunkedCrossEntropy, without_needless_gradients
from megaspec_kernels.cross_entropy.reference import PLAIN_LOGITS, LogitForm, VocabShard, WeightSum

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPU: the resolver never picks this file's kernels there
    triton = None

BLOCK = 8192
WARPS = 16

if triton is not None:

    @triton.jit
    def shaped_logit(x, scale, cap, has_cap: tl.constexpr):
        x *= scale
        if has_cap:
            # tanh of |x| / cap, by the exponential that can't overflow
            small = tl.exp(-2 * tl.abs(x) / cap)
            bent = cap * (1 - small) / (1 + small)
            x = tl.where(x < 0, -bent, bent)
        return x

    @triton.jit
    def softmax_stats_kernel(
        logits_ptr,
        labels_ptr,
        peak_ptr,
        total_ptr,
        target_ptr,
        stride,
        first,
        valid,
        scale,
        cap,
        has_cap: tl.constexpr,
        b_v: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * stride
        peak = -float("inf")
        total = 0.0
        for start in range(0, valid, b_v):
            column = start + tl.arange(0, b_v)
            x = tl.load(logits_ptr + column, mask=column < valid, other=0.0).to(tl.float32)
            x = tl.where(column < valid, shaped_logit(x, scale, cap, has_cap), -float("inf"))
            higher = tl.maximum(peak, tl.max(x, 0))
            total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
            peak = higher
        label = tl.load(labels_ptr + row) - first
        here = (label >= 0) & (label < valid)
        # 0 is 0 in every form
        target = shaped_logit(tl.load(logits_ptr + label, mask=here, other=0.0).to(tl.float32), scale, cap, has_cap)
        tl.store(peak_ptr + row, peak)
        tl.store(total_ptr + row, total)
        tl.store(target_ptr + row, target)

    @triton.jit
    def softmax_gradient_kernel(
        logits_ptr,
        labels_ptr,
        top_ptr,
        total_ptr,
        weights_ptr,
        stride,
        first,
        valid,
        n_columns,
        scale,
        cap,
        has_cap: tl.constexpr,
        b_v: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * stride
        label = tl.load(labels_ptr + row) - first
        top = tl.load(top_ptr + row)
        weight = tl.load(weights_ptr + row)
        share = weight / tl.load(total_ptr + row)
        for start in range(0, n_columns, b_v):
            column = start + tl.arange(0, b_v)
            x = tl.load(logits_ptr + column, mask=column < valid, other=0.0).to(tl.float32)
            x = shaped_logit(x, scale, cap, has_cap)
            slope = scale
            if has_cap:
                slope = scale * (1 - (x / cap) * (x / cap))
            grad = (tl.exp(x - top) * share - tl.where(column == label, weight, 0.0)) * slope
            grad = tl.where(column < valid, grad, 0.0)
            tl.store(logits_ptr + column, grad.to(logits_ptr.dtype.element_ty), mask=column < n_columns)


def softmax_stats(
    logits_CV: Tensor, labels_C: Tensor, shard: VocabShard, form: LogitForm
) -> tuple[Tensor, Tensor, Tensor]:
    """See chunked.Stats; logits contiguous along V, sums in fp32."""
    rows = logits_CV.shape[0]
    if shard.valid == 0:
        zero = torch.zeros(rows, dtype=torch.float32, device=logits_CV.device)
        return torch.full_like(zero, torch.finfo(torch.float32).min), zero, zero
    peak, total, target = (torch.empty(rows, dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    if logits_CV.is_meta:
        return peak, total, target
    softmax_stats_kernel[(rows,)](
        logits_CV,
        labels_C,
        peak,
        total,
        target,
        logits_CV.stride(0),
        shard.first,
        shard.valid,
        form.scale,
        form.cap or 1.0,
        form.cap is not None,
        BLOCK,
        num_warps=WARPS,
    )
    return peak, total, target


def softmax_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    top_C: Tensor,
    total_C: Tensor,
    weights_C: Tensor,
    shard: VocabShard,
    form: LogitForm,
) -> Tensor:
    """See chunked.Gradient; overwrites and returns the logits."""
    rows, columns = logits_CV.shape
    if logits_CV.is_meta:
        return logits_CV
    softmax_gradient_kernel[(rows,)](
        logits_CV,
        labels_C,
        top_C,
        total_C,
        weights_C,
        logits_CV.stride(0),
        shard.first,
        shard.valid,
        columns,
        form.scale,
        form.cap or 1.0,
        form.cap is not None,
        BLOCK,
        num_warps=WARPS,
    )
    return logits_CV


def linear_cross_entropy(
    x_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    shard: VocabShard,
    *,
    bias_V: Tensor | None = None,
    form: LogitForm = PLAIN_LOGITS,
    weight_sum: WeightSum | None = None,
) -> Tensor:
    """See reference.py; fp32 sums, logits in the dtype of x (fp32, bf16 or fp16). `weight_sum`: as chunked's."""
    assert x_MD.dtype != torch.float64, "the fused kernels sum in fp32; fp64 takes chunked"
    return ChunkedCrossEntropy.apply(
        *without_needless_gradients(x_MD, weight_VD, bias_V),
        labels_M.contiguous(),
        weights_M.contiguous(),
        shard,
        form,
        weight_sum,
        softmax_stats,
        softmax_gradient,
    )
