"""The functions behind the names in catalog.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megaspec_kernels.attention.reference import attention as attention_reference
from megaspec_kernels.attention.sdpa import attention as attention_sdpa
from megaspec_kernels.cross_entropy.chunked import linear_cross_entropy as cross_entropy_chunked
from megaspec_kernels.cross_entropy.reference import linear_cross_entropy as cross_entropy_reference
from megaspec_kernels.cross_entropy.triton import linear_cross_entropy as cross_entropy_triton
from megaspec_kernels.grouped.reference import grouped_product as grouped_reference
from megaspec_kernels.grouped.torch import grouped_product as grouped_torch
from megaspec_kernels.spec import KernelsSpec

AttentionKernel = Callable[..., Any]
"""(q_BTNH, k_BTKH, v_BTKH, *, documents, drop) -> [B, T, N, H]"""
CrossEntropyKernel = Callable[..., Any]
"""(x_MD, weight_VD, labels_M, weights_M, shard) -> scalar"""
GroupedKernel = Callable[..., Any]
"""(a_RI, b_EIO, ends_E, *, whole) -> [R, O] and (a_OR, b_RI, ends_E) -> [E, O, I]"""

REGISTRY: dict[str, dict[str, Callable[..., Any]]] = {
    "attention": {"sdpa": attention_sdpa, "reference": attention_reference},
    "cross_entropy": {
        "triton": cross_entropy_triton,
        "chunked": cross_entropy_chunked,
        "reference": cross_entropy_reference,
    },
    "grouped": {"torch": grouped_torch, "reference": grouped_reference},
}


@dataclass(frozen=True)
class Kernels:
    """The functions that a spec names: what models are built with."""

    attention: AttentionKernel
    cross_entropy: CrossEntropyKernel
    grouped: GroupedKernel


def kernels_of(spec: KernelsSpec) -> Kernels:
    """Looks the names up."""
    return Kernels(
        REGISTRY["attention"][spec.attention],
        REGISTRY["cross_entropy"][spec.cross_entropy],
        REGISTRY["grouped"][spec.grouped],
    )
