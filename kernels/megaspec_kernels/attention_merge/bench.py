"""Blocks of attention put together: merge in the forward pass, add in the backward pass."""

# B sequences, T tokens, N heads, H head size

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY, AttentionMergeKernel


def _results(kernel: AttentionMergeKernel, tensors: list[Tensor], *, wide: torch.dtype, dtype: torch.dtype) -> Results:
    out, lse, new, new_lse = tensors
    out, lse, new, new_lse = out.to(wide, copy=True), lse.to(wide, copy=True), new.to(dtype), new_lse.to(wide)
    total = out.clone()
    kernel.merge(out, lse, new, new_lse)
    kernel.add(total, new)
    return {"out": out, "lse": lse, "total": total}


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Odd shapes, and a query that sees nothing of the new block."""
    kernel, plain = REGISTRY["attention_merge"][name], REGISTRY["attention_merge"]["reference"]
    dtype, fp64 = training_dtype(device), torch.float64
    for B, T, N, H in ((1, 1, 1, 1), (2, 7, 3, 64), (3, 5, 2, 80), (1, 63, 4, 128)):
        out, new = (random(B, T, N, H, seed=i, device=device) for i in (1, 2))
        lse, new_lse = (20 * random(B, N, T, seed=i, device=device) for i in (3, 4))
        new_lse[0, 0, T // 2] = -torch.inf
        new[0, T // 2, 0] = 0
        tensors = [out, lse, new, new_lse]
        yield Held(
            f"{B} x {T} x {N} x {H}",
            _results(kernel, tensors, wide=torch.float32, dtype=dtype),
            _results(plain, tensors, wide=torch.float32, dtype=dtype),
            _results(plain, tensors, wide=fp64, dtype=fp64),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """One block of one layer: sums in fp32, the block in the model's format."""
    kernel, dtype = REGISTRY["attention_merge"][name], training_dtype(device)
    B, T, N, H = (1, 16384, 32, 128) if device.type == "cuda" else (1, 512, 4, 64)
    out, lse = torch.zeros(B, T, N, H, device=device), torch.zeros(B, N, T, device=device)
    new, new_lse = torch.ones(B, T, N, H, device=device, dtype=dtype), torch.zeros_like(lse)
    moved = out.numel() * (4 + 4 + new.itemsize)
    yield Work(
        f"merge, {T} x {N} x {H}", partial(kernel.merge, out, lse, new, new_lse), moved + 12 * lse.numel(), "bytes"
    )
    yield Work(f"add, {T} x {N} x {H}", partial(kernel.add, out, new), moved, "bytes")


BENCH = Bench(held, works)
