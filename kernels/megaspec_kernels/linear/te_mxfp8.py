"""Casts to MXFP8 and products of such matrices through Transformer Engine, as tensors: what its own classes hold.

What they are stands in mxfp8.py, whose functions these are. Scales are not yet in the order that cuBLASLt reads them
in; general_gemm puts them there.

Note "Padding". Its casts take rows and columns that are multiples of 32, and so does this; zeros are put behind tokens
that fill no block, and what comes of them is cut off. Scales lie in matrices whose sides it rounds up to multiples of
128 along what is not summed over and of 4 along what is. Here they are as many as there are blocks, so that layers can
cut and gather them; what is behind is put there again, as zeros.
"""

# M rows, K columns of a matrix; m, k blocks along them

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspec_kernels.linear import mxfp8
from megaspec_kernels.linear.factors import Cast, Factor, Layout
from megaspec_kernels.linear.mxfp8 import BLOCK, in_units
from megaspec_kernels.te_package import TransformerEngine, transformer_engine

# What sides of a matrix of scales are multiples of.
_ACROSS = 128
_ALONG = 4


def cast(x_MK: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True) -> Cast:
    """See mxfp8.py."""
    if x_MK.is_meta:
        return mxfp8.cast(x_MK, dtype, rows=rows, columns=columns)
    te = transformer_engine()
    M, K = x_MK.shape
    quantizer = te.pytorch.MXFP8Quantizer(te.dtype(dtype), rowwise=rows, columnwise=columns)
    # its plain class of tensors, without autograd
    quantizer.internal = True
    found = quantizer(in_units(x_MK))
    assert not found._with_gemm_swizzled_scales, "scales in the order of cuBLASLt"
    in_rows = None
    in_columns = None
    if rows:
        scale = found._rowwise_scale_inv[:M, : K // BLOCK].contiguous()
        in_rows = Factor(found._rowwise_data[:M].view(dtype), scale)
    if columns:
        scale = found._columnwise_scale_inv[: -(-M // BLOCK), :K].contiguous()
        in_columns = Factor(found._columnwise_data[:M].view(dtype), scale)
    return Cast(in_rows, in_columns)


def product(
    layout: Layout,
    a: Factor,
    b: Factor,
    *,
    dtype: torch.dtype,
    fast: bool = False,
    into: Tensor | None = None,
    overwrite: bool = True,
) -> Tensor:
    """See mxfp8.py. The product itself adds; of weight gradients alone."""
    if b.values.is_meta:
        return mxfp8.product(layout, a, b, dtype=dtype, fast=fast, into=into, overwrite=overwrite)
    te = transformer_engine()
    assert into is None or layout == "NT", f"a sum of {layout}"
    assert into is None or into.is_contiguous(), f"a sum of weight gradients with strides {into.stride()}"
    tokens = b.values.shape[0]
    out, *_ = te.general_gemm(
        _stored(te, a, in_rows=layout[0] == "T"),
        _stored(te, b, in_rows=layout[1] == "N"),
        out_dtype=dtype,
        layout=layout,
        out=into,
        accumulate=not overwrite,
        use_split_accumulator=not fast,
        grad=layout != "TN",
    )
    return out if layout == "NT" else out[:tokens]


def _stored(te: TransformerEngine, factor: Factor, *, in_rows: bool) -> object:
    """In its class for what products take, in one layout, with whole blocks."""
    # its fp8 numbers are bytes, of which 0 is the number 0 in both formats
    values = in_units(factor.values.view(torch.uint8))
    scale = padded_scales(factor.scale, in_rows=in_rows)
    return te.pytorch.MXFP8TensorStorage(
        rowwise_data=values if in_rows else None,
        rowwise_scale_inv=scale if in_rows else None,
        columnwise_data=None if in_rows else values,
        columnwise_scale_inv=None if in_rows else scale,
        fp8_dtype=te.dtype(factor.values.dtype),
        quantizer=None,
        with_gemm_swizzled_scales=False,
        fake_dtype=torch.bfloat16,
    )


def padded_scales(scale: Tensor, *, in_rows: bool) -> Tensor:
    """With zeros behind what is no multiple, in one piece."""
    rows, columns = (_ACROSS, _ALONG) if in_rows else (_ALONG, _ACROSS)
    behind = (0, -scale.shape[1] % columns, 0, -scale.shape[0] % rows)
    if any(behind):
        scale = F.pad(scale, behind)
    return scale.contiguous()
