"""Products of fp8 matrices."""

# M rows, N columns of the result, K numbers that each is a sum over

from collections.abc import Iterator

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.catalog import Use
from megaspec_kernels.fp8_cast.formats import Block, scale_of
from megaspec_kernels.registry import REGISTRY

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Blocks of the two factors, and the format of the first: forward and backward.
FACTORS: dict[str, tuple[Block, Block, torch.dtype]] = {
    "tensors": ((None, None), (None, None), E4M3),
    "tensors, e5m2": ((None, None), (None, None), E5M2),
    "rows": ((1, None), (1, None), E4M3),
    "1x128 and 128x128": ((1, 128), (128, 128), E4M3),
    "1x128 and 1x128": ((1, 128), (1, 128), E4M3),
}


def _factor(x: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernel = REGISTRY["fp8_cast"]["reference"]
    scale = scale_of(kernel.amax(x, block=block), dtype)
    return kernel.cast(x, scale, block=block, dtype=dtype)[0], scale


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Every pair of scales, into the model's format and into that of main gradients."""
    kernel = REGISTRY["scaled_product"][name]
    plain = REGISTRY["scaled_product"]["reference"]
    for M, N, K in ((16, 32, 128), (80, 256, 384)):
        for what, (a_block, b_block, format_a) in FACTORS.items():
            a, a_scale = _factor(random(M, K, seed=1, device=device).float(), a_block, format_a)
            b, b_scale = _factor(random(N, K, seed=2, device=device).float(), b_block, E4M3)
            blocks = {"a_block": a_block, "b_block": b_block}
            for dtype in dict.fromkeys((training_dtype(device), torch.float32)):
                yield Held(
                    f"{M} x {N} x {K}, scales of {what}, {dtype}",
                    {"out": kernel(a, b, a_scale, b_scale, **blocks, dtype=dtype)},
                    {"out": plain(a, b, a_scale, b_scale, **blocks, dtype=dtype)},
                    {"out": plain(a, b, a_scale.double(), b_scale.double(), **blocks, dtype=torch.float64)},
                )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A forward product of a large model."""
    M, N, K = (8192, 28672, 4096) if device.type == "cuda" else (128, 256, 256)
    kernel = REGISTRY["scaled_product"][name]
    dtype = training_dtype(device)
    for what, (a_block, b_block, format_a) in FACTORS.items():
        a, a_scale = _factor(torch.randn(M, K, device=device), a_block, format_a)
        b, b_scale = _factor(torch.randn(N, K, device=device), b_block, E4M3)

        def call(
            a: Tensor = a,
            b: Tensor = b,
            scales: tuple[Tensor, Tensor] = (a_scale, b_scale),
            blocks: tuple[Block, Block] = (a_block, b_block),
        ) -> Tensor:
            return kernel(a, b, *scales, a_block=blocks[0], b_block=blocks[1], dtype=dtype, fast=True)

        yield Work(f"{M} x {N} x {K}, scales of {what}", call, 2 * M * N * K, "flops")


BENCH = Bench(held, works, uses=lambda name: Use(precision="bf16"))
