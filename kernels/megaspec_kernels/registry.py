"""The functions behind the names in catalog.py."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megaspec_kernels.adamw.reference import adamw_ as adamw_reference
from megaspec_kernels.adamw.triton import adamw_ as adamw_triton
from megaspec_kernels.attention import cudnn as attention_cudnn
from megaspec_kernels.attention import flash_attn as attention_flash_attn
from megaspec_kernels.attention import flex as attention_flex
from megaspec_kernels.attention import reference as attention_reference
from megaspec_kernels.attention import reference_block as attention_reference_block
from megaspec_kernels.attention import sdpa as attention_sdpa
from megaspec_kernels.attention import sdpa_block as attention_sdpa_block
from megaspec_kernels.attention import te as attention_te
from megaspec_kernels.attention_merge import reference as attention_merge_reference
from megaspec_kernels.attention_merge import triton as attention_merge_triton
from megaspec_kernels.cross_entropy.chunked import linear_cross_entropy as cross_entropy_chunked
from megaspec_kernels.cross_entropy.reference import linear_cross_entropy as cross_entropy_reference
from megaspec_kernels.cross_entropy.triton import linear_cross_entropy as cross_entropy_triton
from megaspec_kernels.fp8_cast import formats as fp8_cast_formats
from megaspec_kernels.fp8_cast import reference as fp8_cast_reference
from megaspec_kernels.fp8_cast import reference_groups as fp8_cast_reference_groups
from megaspec_kernels.fp8_cast import triton as fp8_cast_triton
from megaspec_kernels.fp8_cast import triton_groups as fp8_cast_triton_groups
from megaspec_kernels.fp8_cast.formats import Quantised
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.gated import reference as gated_reference
from megaspec_kernels.gated import triton as gated_triton
from megaspec_kernels.gated import triton_weighted as gated_weighted
from megaspec_kernels.grouped.add import add_, add_plainly_
from megaspec_kernels.grouped.reference import grouped_product as grouped_reference
from megaspec_kernels.grouped.torch import grouped_product as grouped_torch
from megaspec_kernels.linear import mxfp8 as linear_mxfp8
from megaspec_kernels.linear import nvfp4 as linear_nvfp4
from megaspec_kernels.linear import reference as linear_reference
from megaspec_kernels.linear import te as linear_te
from megaspec_kernels.linear import te_mxfp8 as linear_te_mxfp8
from megaspec_kernels.linear import te_nvfp4 as linear_te_nvfp4
from megaspec_kernels.linear import torch as linear_torch
from megaspec_kernels.linear.factors import Cast
from megaspec_kernels.norm import reference as norm_reference
from megaspec_kernels.norm import te as norm_te
from megaspec_kernels.norm import triton as norm_triton
from megaspec_kernels.norm.form import Normed
from megaspec_kernels.rope import reference as rope_reference
from megaspec_kernels.rope import triton as rope_triton
from megaspec_kernels.rope.form import Turned
from megaspec_kernels.scaled_grouped import reference as scaled_grouped_reference
from megaspec_kernels.scaled_grouped import torch as scaled_grouped_torch
from megaspec_kernels.scaled_product.cublaslt import scaled_product as scaled_product_cublaslt
from megaspec_kernels.scaled_product.reference import scaled_product as scaled_product_reference
from megaspec_kernels.scaled_product.torch import scaled_product as scaled_product_torch
from megaspec_kernels.spec import KernelsSpec
from megaspec_kernels.unpermute.reference import unpermute as unpermute_reference
from megaspec_kernels.unpermute.triton import unpermute as unpermute_triton


@dataclass(frozen=True)
class AttentionKernel:
    """Attention over whole sequences, and over a block: some queries against some keys, for sequences that lie on
    several ranks. See attention/reference.py and attention/reference_block.py."""

    attend: Callable[..., Any]
    """(q_BTNH, k_BTKH, v_BTKH, *, documents, window, scoring, sinks, drop) -> [B, T, N, H]"""
    block_forward: Callable[..., Any]
    """(q_BTNH, k_BSKH, v_BSKH, *, causal, mask, documents, window, scoring, drop) -> [B, T, N, H] and [B, N, T]"""
    block_backward: Callable[..., Any]
    """(grad_BTNH, q_BTNH, k_BSKH, v_BSKH, out_BTNH, lse_BNT, *, causal, mask, documents, window, scoring, drop) ->
    gradients of q, k and v"""


@dataclass(frozen=True)
class AttentionMergeKernel:
    """How blocks are put together in place, see attention_merge/reference.py."""

    merge: Callable[..., None]
    """(out_BTNH, lse_BNT, new_BTNH, new_lse_BNT)"""
    add: Callable[..., None]
    """(total_BTNH, new_BTNH)"""


@dataclass(frozen=True)
class MxFp8Kernel:
    """Casts to MXFP8 and products of such matrices, see linear/mxfp8.py."""

    cast: Callable[..., Cast]
    """(x_MK, dtype, *, rows, columns) -> the layouts that are asked for"""
    product: Callable[..., torch.Tensor]
    """(layout, a, b, *, dtype, fast, into, overwrite) -> [.., ..]"""


@dataclass(frozen=True)
class NvFp4Kernel:
    """Casts to NVFP4 and products of such matrices, see linear/nvfp4.py."""

    cast: Callable[..., Cast]
    """(x_MK, role, *, rounding, columns, agreement) -> rows, and columns where they are asked for"""
    product: Callable[..., torch.Tensor]
    """(a, b, *, dtype, into, overwrite) -> [lines of b, lines of a]"""


@dataclass(frozen=True)
class LinearKernel:
    """The products of a linear layer, see linear/reference.py."""

    forward: Callable[..., torch.Tensor]
    """(x, weight_OI, bias_O) -> [..., O]"""
    input_gradient: Callable[..., torch.Tensor]
    """(grad_out, weight_OI) -> [..., I]"""
    weight_gradient: Callable[..., torch.Tensor]
    """(grad_out, x) -> [O, I]"""
    add_weight_gradient: Callable[..., None]
    """(into_OI, grad_out, x, *, overwrite), in place"""
    mxfp8: MxFp8Kernel
    """The same products with precision.recipe=mxfp8."""
    nvfp4: NvFp4Kernel
    """And with precision.recipe=nvfp4."""


@dataclass(frozen=True)
class NormProducer:
    """The steps of a norm that writes fp8 by a scale that is known, see norm/triton.py. `code`: NormForm.code."""

    implementation: str
    """Its name, by which operations of compiled code find it."""
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(x, term, weight, bias, code) -> x + scale · term, normed, statistics"""
    forward_in_fp8: Callable[..., Any]
    """(x, term, weight, bias, code, *, known, columns) -> the same, normed in fp8, in both layouts or in rows alone"""
    gradients: Callable[..., Any]
    """(grad, grad_stream, x, weight, statistics, code, *, has_term, needs) -> gradients by name"""


@dataclass(frozen=True)
class GatedProducer:
    """The steps of a gate that writes fp8 by a scale that is known, see gated/triton.py. `code`: GatedForm.code."""

    implementation: str
    """Its name, by which operations of compiled code find it."""
    forward: Callable[..., torch.Tensor]
    """(gate_up, code) -> [..., F]"""
    forward_in_fp8: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(gate_up, code, *, known, tile) -> [M, F], [F, M], scale; `tile`: another one than a run takes"""
    backward: Callable[..., torch.Tensor]
    """(grad, gate_up, code) -> [..., 2 F]"""
    backward_in_fp8: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(grad, gate_up, code, *, known, tile) -> [M, 2 F], [2 F, M], scale"""


@dataclass(frozen=True)
class WeightedGatedKernel:
    """The same times a weight of each row, as experts compute it, see gated/triton_weighted.py."""

    forward: Callable[..., torch.Tensor]
    """([R, 2 F], [R], *, form) -> [R, F]"""
    gradients: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """([R, F], [R, 2 F], [R], *, form) -> [R, 2 F], [R]"""
    forward_in_fp8: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """([R, 2 F], [R], groups, *, form, known) -> [R, F], [F, P], scale"""
    gradients_in_fp8: Callable[..., tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]
    """([R, F], [R, 2 F], [R], groups, *, form, known) -> [R, 2 F], [2 F, P], scale, and [R]"""


@dataclass(frozen=True)
class GatedKernel:
    """What gated feed-forward layers compute between their products, see gated/reference.py."""

    gated: Callable[..., torch.Tensor]
    """(gate_up, *, form) -> [..., F]"""
    producer: GatedProducer | None = None
    """Of implementations that can write it, and its gradient, in fp8."""
    weighted: WeightedGatedKernel | None = None
    """What experts take in place of plain operations; none: these."""


@dataclass(frozen=True)
class RopeProducer:
    """The steps of a rotation that writes the gradient of the product in fp8 by a scale that is known, see
    rope/triton.py."""

    implementation: str
    """Its name, by which operations of compiled code find it."""
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(qkv_BTC, cos, sin, queries, keys, size) -> [B, T, N, H] and [B, T, K, H]"""
    backward: Callable[..., torch.Tensor]
    """(grad_q, grad_k, grad_v, cos, sin) -> [B, T, C]"""
    backward_in_fp8: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(grad_q, grad_k, grad_v, cos, sin, *, known) -> [M, C], [C, M], scale"""


@dataclass(frozen=True)
class RopeKernel:
    """Queries and keys turned by their positions, of the product of all three, see rope/reference.py."""

    rope: Callable[..., Turned]
    """(qkv_BTC, cos, sin, *, heads) -> queries, keys and values"""
    producer: RopeProducer | None = None
    """Of implementations that can write the product's gradient in fp8."""


@dataclass(frozen=True)
class NormKernel:
    """A norm of rows, alone and with the residual stream around it, see norm/reference.py."""

    norm: Callable[..., torch.Tensor]
    """(x, weight, bias, *, form) -> normed"""
    norm_of_stream: Callable[..., Normed]
    """(x, weight, bias, *, form) -> x, normed"""
    norm_of_sum: Callable[..., Normed]
    """(x, term, weight, bias, *, form) -> x + scale · term, normed"""
    producer: NormProducer | None = None
    """Of implementations that can write what they norm in fp8."""


@dataclass(frozen=True)
class Fp8CastKernel:
    """How a matrix becomes fp8, see fp8_cast/reference.py."""

    amax: Callable[..., torch.Tensor]
    """(x_MK, *, block) -> [m, k]"""
    scale_of: Callable[..., torch.Tensor]
    """(amax_mk, dtype) -> [m, k]"""
    scale: Callable[..., torch.Tensor]
    """(x_MK, *, block, dtype) -> [m, k]: both of these, in fewer passes"""
    cast: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]
    """(x_MK, scale_mk, *, block, dtype, rows, columns, seen, saturated, scale_copy) -> [M, K] and [K, M]"""
    amax_of_lines: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(x_MK) -> [M, 1] and [1, K]"""
    quantise_lines: Callable[..., Quantised]
    """(x_MK, *, dtype, amax) -> both layouts and their scales; `amax`: of amax_of_lines, else those of x"""
    quantise_short_lines: Callable[..., Quantised]
    """(x_MK, *, dtype) -> both layouts and their scales"""
    columns: Callable[..., torch.Tensor]
    """(x_MK in fp8) -> [K, M]"""
    groups: Callable[..., Groups]
    """(ends_E, rows) -> where the rows of groups lie; see fp8_cast/reference_groups.py, also for the next two"""
    group_amax: Callable[..., torch.Tensor]
    """(x_RI, ends_E, *, by_column) -> [E, 1] or [E, I]"""
    group_cast: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None]]
    """(x, scale, groups, *, dtype, rows, columns, index_R, seen, saturated, scale_copy) -> [R, I] and [I, P]"""


@dataclass(frozen=True)
class GroupedKernel:
    """Products of rows with the matrices of their groups, see grouped/reference.py."""

    product: Callable[..., torch.Tensor]
    """(a_RI, b_EIO, ends_E, *, whole) -> [R, O] and (a_OR, b_RI, ends_E) -> [E, O, I]"""
    add: Callable[..., None]
    """(into, x, *, overwrite): the sum of matrices' gradients, in place"""


@dataclass(frozen=True)
class ScaledGroupedKernel:
    """Products of fp8 rows with the fp8 matrices of their groups, see scaled_grouped/reference.py."""

    product: Callable[..., torch.Tensor]
    """(a_RK, b_ENK, a_scale, b_scale, ends_E, *, dtype, whole, fast) -> [R, N]"""
    weight_product: Callable[..., torch.Tensor]
    """(a_OP, b_IP, a_scale, b_scale, ends_E, *, dtype) -> [E, O, I]"""
    add: Callable[..., None]
    """(into, x, *, overwrite): the sum of matrices' gradients, in place"""


CrossEntropyKernel = Callable[..., Any]
"""(x_MD, weight_VD, labels_M, weights_M, shard, *, bias_V, form) -> scalar; the last two only of heads that have
them, see cross_entropy/reference.py"""
UnpermuteKernel = Callable[..., Any]
"""(y_RD, place_Mk, kept_Mk) -> [M, D]"""
ScaledProductKernel = Callable[..., torch.Tensor]
"""(a_MK, b_NK, a_scale, b_scale, *, a_block, b_block, dtype, fast, into, overwrite) -> [M, N]"""
AdamWKernel = Callable[..., None]
"""(weights, masters, first, second, gradients, decays, keys, step), in place; `torch` is an optimizer of its own."""


def _linear(file: ModuleType, mxfp8: ModuleType, nvfp4: ModuleType) -> LinearKernel:
    return LinearKernel(
        file.forward,
        file.input_gradient,
        file.weight_gradient,
        file.add_weight_gradient,
        MxFp8Kernel(mxfp8.cast, mxfp8.product),
        NvFp4Kernel(nvfp4.cast, nvfp4.product),
    )


def _of_flash_attention(version: attention_flash_attn.FlashAttention) -> AttentionKernel:
    return AttentionKernel(version.attention, version.block_forward, version.block_backward)


REGISTRY: dict[str, dict[str, Any]] = {
    "attention": {
        "sdpa": AttentionKernel(
            attention_sdpa.attention, attention_sdpa_block.block_forward, attention_sdpa_block.block_backward
        ),
        "flex": AttentionKernel(attention_flex.attention, attention_flex.block_forward, attention_flex.block_backward),
        "cudnn": AttentionKernel(
            attention_cudnn.attention, attention_cudnn.block_forward, attention_cudnn.block_backward
        ),
        "flash_attn": _of_flash_attention(attention_flash_attn.FLASH_ATTN_4),
        "flash_attn_3": _of_flash_attention(attention_flash_attn.FLASH_ATTN_3),
        "flash_attn_2": _of_flash_attention(attention_flash_attn.FLASH_ATTN_2),
        "te": AttentionKernel(
            attention_te.attention, attention_sdpa_block.block_forward, attention_sdpa_block.block_backward
        ),
        "reference": AttentionKernel(
            attention_reference.attention,
            attention_reference_block.block_forward,
            attention_reference_block.block_backward,
        ),
    },
    "attention_merge": {
        "triton": AttentionMergeKernel(attention_merge_triton.merge, attention_merge_triton.add),
        "reference": AttentionMergeKernel(attention_merge_reference.merge, attention_merge_reference.add),
    },
    "cross_entropy": {
        "triton": cross_entropy_triton,
        "chunked": cross_entropy_chunked,
        "reference": cross_entropy_reference,
    },
    "linear": {
        "torch": _linear(linear_torch, linear_mxfp8, linear_nvfp4),
        "te": _linear(linear_te, linear_te_mxfp8, linear_te_nvfp4),
        "reference": _linear(linear_reference, linear_mxfp8, linear_nvfp4),
    },
    "grouped": {
        "torch": GroupedKernel(grouped_torch, add_),
        "reference": GroupedKernel(grouped_reference, add_plainly_),
    },
    "unpermute": {"triton": unpermute_triton, "reference": unpermute_reference},
    "norm": {
        "reference": NormKernel(norm_reference.norm, norm_reference.norm_of_stream, norm_reference.norm_of_sum),
        "triton": NormKernel(
            norm_triton.norm,
            norm_triton.norm_of_stream,
            norm_triton.norm_of_sum,
            NormProducer("triton", norm_triton.norm_forward, norm_triton.norm_forward_in_fp8, norm_triton.gradients),
        ),
        "te": NormKernel(norm_te.norm, norm_te.norm_of_stream, norm_te.norm_of_sum),
    },
    "gated": {
        "reference": GatedKernel(gated_reference.gated),
        "triton": GatedKernel(
            gated_triton.gated,
            GatedProducer(
                "triton",
                gated_triton.gated_forward,
                gated_triton.gated_forward_in_fp8,
                gated_triton.gated_backward,
                gated_triton.gated_backward_in_fp8,
            ),
            WeightedGatedKernel(
                gated_weighted.forward,
                gated_weighted.gradients,
                gated_weighted.forward_in_fp8,
                gated_weighted.gradients_in_fp8,
            ),
        ),
    },
    "rope": {
        "reference": RopeKernel(rope_reference.rope),
        "triton": RopeKernel(
            rope_triton.rope,
            RopeProducer(
                "triton", rope_triton.rope_forward, rope_triton.rope_backward, rope_triton.rope_backward_in_fp8
            ),
        ),
    },
    "fp8_cast": {
        "triton": Fp8CastKernel(
            fp8_cast_triton.amax,
            fp8_cast_triton.scale_of,
            fp8_cast_triton.scale,
            fp8_cast_triton.cast,
            amax_of_lines=fp8_cast_triton.amax_of_lines,
            quantise_lines=fp8_cast_triton.quantise_lines,
            quantise_short_lines=fp8_cast_triton.quantise_short_lines,
            columns=fp8_cast_triton.columns,
            groups=fp8_cast_triton_groups.groups,
            group_amax=fp8_cast_triton_groups.group_amax,
            group_cast=fp8_cast_triton_groups.group_cast,
        ),
        "reference": Fp8CastKernel(
            fp8_cast_reference.amax,
            fp8_cast_formats.scale_of,
            fp8_cast_reference.scale,
            fp8_cast_reference.cast,
            amax_of_lines=fp8_cast_reference.amax_of_lines,
            quantise_lines=fp8_cast_reference.quantise_lines,
            quantise_short_lines=fp8_cast_reference.quantise_short_lines,
            columns=fp8_cast_reference.columns,
            groups=fp8_cast_reference_groups.groups,
            group_amax=fp8_cast_reference_groups.group_amax,
            group_cast=fp8_cast_reference_groups.group_cast,
        ),
    },
    "scaled_product": {
        "cublaslt": scaled_product_cublaslt,
        "torch": scaled_product_torch,
        "reference": scaled_product_reference,
    },
    "scaled_grouped": {
        "torch": ScaledGroupedKernel(scaled_grouped_torch.product, scaled_grouped_torch.weight_product, add_),
        "reference": ScaledGroupedKernel(
            scaled_grouped_reference.product, scaled_grouped_reference.weight_product, add_plainly_
        ),
    },
    "adamw": {"torch": torch.optim.AdamW, "triton": adamw_triton, "reference": adamw_reference},
}


@dataclass(frozen=True)
class Kernels:
    """The functions that a spec names: what models are built with, and what strategies put into their slots."""

    attention: AttentionKernel
    attention_merge: AttentionMergeKernel
    cross_entropy: CrossEntropyKernel
    linear: LinearKernel
    grouped: GroupedKernel
    unpermute: UnpermuteKernel
    norm: NormKernel
    gated: GatedKernel
    rope: RopeKernel
    fp8_cast: Fp8CastKernel
    scaled_product: ScaledProductKernel
    scaled_grouped: ScaledGroupedKernel


def kernels_of(spec: KernelsSpec) -> Kernels:
    """Looks the names up. Of adamw the optimizer does, for the device that each of its parts lies on."""
    return Kernels(
        attention=REGISTRY["attention"][spec.attention],
        attention_merge=REGISTRY["attention_merge"][spec.attention_merge],
        cross_entropy=REGISTRY["cross_entropy"][spec.cross_entropy],
        linear=REGISTRY["linear"][spec.linear],
        grouped=REGISTRY["grouped"][spec.grouped],
        unpermute=REGISTRY["unpermute"][spec.unpermute],
        norm=REGISTRY["norm"][spec.norm],
        gated=REGISTRY["gated"][spec.gated],
        rope=REGISTRY["rope"][spec.rope],
        fp8_cast=REGISTRY["fp8_cast"][spec.fp8_cast],
        scaled_product=REGISTRY["scaled_product"][spec.scaled_product],
        scaled_grouped=REGISTRY["scaled_grouped"][spec.scaled_grouped],
    )
