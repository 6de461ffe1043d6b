"""Casts to NVFP4 and products of such matrices through Transformer Engine, as tensors: what its own classes hold.

What they are stands in nvfp4.py, whose functions these are; how scales lie, in te_mxfp8.py, note "Padding". Here blocks
are of 16 numbers, and both layouts have their lines in rows. Its casts draw from torch's generator of the GPU.
"""

# M rows, K columns of a matrix; L lines along which a product sums

import torch
from torch import Tensor

from megaspec_kernels.linear import nvfp4
from megaspec_kernels.linear.factors import Cast, Factor
from megaspec_kernels.linear.mxfp8 import in_units
from megaspec_kernels.linear.nvfp4 import ALONE, BLOCK, Agreement, Role, Rounding, packed_scale, scales_of
from megaspec_kernels.linear.te_mxfp8 import padded_scales
from megaspec_kernels.te_package import TransformerEngine, transformer_engine


def cast(x_MK: Tensor, role: Role, *, rounding: Rounding, columns: bool = True, agreement: Agreement = ALONE) -> Cast:
    """See nvfp4.py."""
    if x_MK.is_meta:
        return nvfp4.cast(x_MK, role, rounding=rounding, columns=columns, agreement=agreement)
    te = transformer_engine()
    M, K = x_MK.shape
    # of columns alone
    rotates = columns and role != "weight"
    quantizer = te.pytorch.NVFP4Quantizer(
        te.pytorch.DType.kFloat4E2M1,
        rowwise=True,
        columnwise=columns,
        with_amax_reduction=agreement.group is not None,
        amax_reduction_group=agreement.group,
        with_rht=rotates,
        with_post_rht_amax=rotates,
        with_2d_quantization=role == "weight",
        stochastic_rounding=role == "gradient" and rounding == "stochastic",
    )
    # its plain class of tensors, without autograd
    quantizer.internal = True
    x_MK = in_units(x_MK)
    found = quantizer(x_MK)
    assert not found._with_gemm_swizzled_scales, "scales in the order of cuBLASLt"
    scale = found._rowwise_scale_inv[:M, : K // BLOCK]
    in_rows = Factor(found._rowwise_data[:M], packed_scale(scale, found._amax_rowwise))
    if not columns:
        return Cast(in_rows, None)
    scale = found._columnwise_scale_inv[:K, : x_MK.shape[0] // BLOCK]
    return Cast(in_rows, Factor(found._columnwise_data, packed_scale(scale, found._amax_columnwise)))


def product(
    a: Factor,
    b: Factor,
    *,
    dtype: torch.dtype,
    into: Tensor | None = None,
    overwrite: bool = True,
) -> Tensor:
    """See nvfp4.py. The product itself adds."""
    if b.values.is_meta:
        return nvfp4.product(a, b, dtype=dtype, into=into, overwrite=overwrite)
    te = transformer_engine()
    assert into is None or into.is_contiguous(), f"a sum of weight gradients with strides {into.stride()}"
    lines = b.values.shape[0]
    out, *_ = te.general_gemm(
        _stored(te, a),
        _stored(te, b),
        out_dtype=dtype,
        # lines of both lie in rows, whatever they were of
        layout="TN",
        out=into,
        accumulate=not overwrite,
        use_split_accumulator=True,
        grad=False,
    )
    return out if into is not None else out[:lines]


def _stored(te: TransformerEngine, factor: Factor) -> object:
    """In its class for what products take, with lines in whole units."""
    scales = scales_of(factor)
    return te.pytorch.NVFP4TensorStorage(
        rowwise_data=in_units(factor.values),
        rowwise_scale_inv=padded_scales(scales.of_blocks, in_rows=True),
        columnwise_data=None,
        columnwise_scale_inv=None,
        # a copy, which lies where it has to
        amax_rowwise=scales.amax.clone(),
        amax_columnwise=None,
        fp4_dtype=te.pytorch.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        fake_dtype=torch.bfloat16,
    )
