"""Casts to fp8 and products of fp8 matrices through Transformer Engine, as tensors: what its own classes hold.

Note "What a matrix is". Values are fp8 [M, K] in rows, and [K, M] in columns: Hopper's tensor cores take both factors
along the numbers that are summed over. A scale is what values are multiplied by, and lies as Transformer Engine has it:
[1] of a whole tensor; of blocks of 128 [K / 128, M] in rows and [M / 128, K] in columns; of 128x128 blocks
[M / 128, K / 128] in rows and its transpose in columns, whose last dimension is rounded up to a multiple of 4.

Note "Whole units". Products sum over 16 numbers at a time, and with scales of blocks make 8 rows at a time; what is
less it refuses ("Caller must pad", common/gemm/cublaslt_gemm.cu). Widths of a model are multiples by a rule; of a text
that is being written any number of tokens comes, so zeros are put behind them, and what comes of them is cut off. Casts
take any number.
"""

# M rows, K columns of a matrix; O, I those of a weight

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.fp8_cast.formats import LARGEST
from megaspec_kernels.linear.factors import Cast, Factor, Layout
from megaspec_kernels.te_package import TransformerEngine, transformer_engine

Scales = Literal["tensor", "lines", "squares"]
"""What shares a scale: all, 128 numbers along which a product sums, 128x128."""

# What a number of tokens is brought to; a multiple of all that is asked for.
UNIT = 16


def amax(x_MK: Tensor) -> Tensor:
    """The largest absolute value, fp32 [1]."""
    found = torch.empty(1, dtype=torch.float32, device=x_MK.device)
    transformer_engine().functions.compute_amax(x_MK, found)
    return found


def factor_of(amax: Tensor, dtype: torch.dtype, *, margin: int = 0) -> Tensor:
    """What numbers up to `amax` are multiplied by, as Transformer Engine's delayed scaling has it: the format's largest
    over amax, over 2^margin. 1 where amax is zero, infinite or NaN."""
    factor = LARGEST[dtype] / amax / 2.0**margin
    factor = torch.where(torch.isfinite(amax) & (amax > 0), factor, 1.0)
    return factor.clamp(max=torch.finfo(torch.float32).max)


def cast_current(x_MK: Tensor, dtype: torch.dtype, *, columns: bool) -> Cast:
    """By the tensor's own largest element."""
    te = transformer_engine()
    quantizer = te.pytorch.Float8CurrentScalingQuantizer(te.dtype(dtype), x_MK.device, rowwise=True, columnwise=columns)
    return _of_tensor(quantizer, x_MK, dtype)


def cast_scaled(x_MK: Tensor, dtype: torch.dtype, *, factor: Tensor, seen: Tensor, columns: bool) -> Cast:
    """By a factor that is known before, fp32 [1]. The largest element is put into `seen`, fp32 [1], where it is larger
    than what is there."""
    te = transformer_engine()
    quantizer = te.pytorch.Float8Quantizer(factor, seen, te.dtype(dtype), rowwise=True, columnwise=columns)
    return _of_tensor(quantizer, x_MK, dtype)


def cast_blocks(x_MK: Tensor, dtype: torch.dtype, *, scales: Scales, columns: bool) -> Cast:
    """By the largest element of each block. Scales are powers of two, as in Transformer Engine's recipe."""
    te = transformer_engine()
    quantizer = te.pytorch.Float8BlockQuantizer(
        te.dtype(dtype),
        rowwise=True,
        columnwise=columns,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2 if scales == "squares" else 1,
    )
    quantizer.internal = True
    found = quantizer(x_MK)
    rows = Factor(found._rowwise_data.view(dtype), found._rowwise_scale_inv)
    if not columns:
        return Cast(rows, None)
    return Cast(rows, Factor(found._columnwise_data.view(dtype), found._columnwise_scale_inv))


def _of_tensor(quantizer: object, x_MK: Tensor, dtype: torch.dtype) -> Cast:
    # its plain class of tensors, without autograd
    quantizer.internal = True
    found = quantizer(x_MK)
    rows = Factor(found._data.view(dtype), found._scale_inv)
    if found._transpose is None:
        return Cast(rows, None)
    return Cast(rows, Factor(found._transpose.view(dtype), found._scale_inv))


def product(
    layout: Layout,
    a: Factor,
    b: Factor,
    *,
    a_scales: Scales,
    b_scales: Scales,
    dtype: torch.dtype,
    fast: bool = False,
    into: Tensor | None = None,
    overwrite: bool = True,
) -> Tensor:
    """A product as te.py's note "Layouts" names it, [.., ..] in `dtype`; in `into` where that is given, added to what
    is there unless `overwrite`. A is in rows for TN, else in columns; B in columns for NT, else in rows. `fast`: fewer
    bits in the sums, which products of blocks never have."""
    te = transformer_engine()
    assert into is None or into.is_contiguous(), f"a sum of weight gradients with strides {into.stride()}"
    tokens = b.values.shape[1] if layout == "NT" else b.values.shape[0]
    if tokens % UNIT:
        b = _in_units(b, b_scales, in_rows=layout != "NT")
        if layout == "NT":
            a = _in_units(a, a_scales, in_rows=False)
    out, *_ = te.general_gemm(
        _stored(te, a, a_scales, in_rows=layout[0] == "T"),
        _stored(te, b, b_scales, in_rows=layout[1] == "N"),
        out_dtype=dtype,
        layout=layout,
        out=into,
        accumulate=not overwrite,
        use_split_accumulator=not fast,
        grad=layout != "TN",
    )
    return out if layout == "NT" else out[:tokens]


def _in_units(factor: Factor, scales: Scales, *, in_rows: bool) -> Factor:
    """With zeros behind its tokens, see the note "Whole units"; `in_rows`, or in columns."""
    values = factor.values
    dim = 0 if in_rows else 1
    shape = list(values.shape)
    shape[dim] = -(-shape[dim] // UNIT) * UNIT
    # as bytes, of which 0 is the number 0 in both formats
    whole = values.new_zeros(shape, dtype=torch.uint8)
    whole.narrow(dim, 0, values.shape[dim]).copy_(values.view(torch.uint8))
    scale = factor.scale
    if scales == "lines" and in_rows:
        # a scale for each token, whatever it is; lines along tokens are as many as before
        scale = F.pad(scale, (0, shape[0] - scale.shape[1]))
    return Factor(whole.view(values.dtype), scale)


def _stored(te: TransformerEngine, factor: Factor, scales: Scales, *, in_rows: bool) -> object:
    """In its class for what products take, in one layout."""
    form = te.dtype(factor.values.dtype)
    # its fp8 numbers are bytes
    values = factor.values.view(torch.uint8)
    if scales == "tensor":
        return te.pytorch.Float8TensorStorage(
            data=values if in_rows else None,
            data_transpose=None if in_rows else values,
            fp8_scale_inv=factor.scale,
            fp8_dtype=form,
            fake_dtype=torch.bfloat16,
            quantizer=None,
        )
    return te.pytorch.Float8BlockwiseQTensorStorage(
        rowwise_data=values if in_rows else None,
        rowwise_scale_inv=factor.scale if in_rows else None,
        columnwise_data=None if in_rows else values,
        columnwise_scale_inv=None if in_rows else factor.scale,
        fp8_dtype=form,
        quantizer=None,
        is_2D_scaled=scales == "squares",
        fake_dtype=torch.bfloat16,
    )
