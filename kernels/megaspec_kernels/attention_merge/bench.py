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
    """`wide`: the format of sums, `dtype`: of the new block."""
    out, lse, new, new_lse = tensors
    # copies of what is changed in place
    out = out.to(wide, copy=True)
    lse = lse.to(wide, copy=True)
    total = out.clone()
    new = new.to(dtype)
    new_lse = new_lse.to(wide)
    kernel.merge(out, lse, new, new_lse)
    kernel.add(total, new)
    return {"out": out, "lse": lse, "total": total}


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Odd shapes, and a query that sees nothing of the new block."""
    kernel = REGISTRY["attention_merge"][name]
    plain = REGISTRY["attention_merge"]["reference"]
    dtype = training_dtype(device)
    for B, T, N, H in ((1, 1, 1, 1), (2, 7, 3, 64), (3, 5, 2, 80), (1, 63, 4, 128)):
        out = random(B, T, N, H, seed=1, device=device)
        new = random(B, T, N, H, seed=2, device=device)
        lse = 20 * random(B, N, T, seed=3, device=device)
        new_lse = 20 * random(B, N, T, seed=4, device=device)
        new_lse[0, 0, T // 2] = -torch.inf
        new[0, T // 2, 0] = 0
        tensors = [out, lse, new, new_lse]
        yield Held(
            f"{B} x {T} x {N} x {H}",
            _results(kernel, tensors, wide=torch.float32, dtype=dtype),
            _results(plain, tensors, wide=torch.float32, dtype=dtype),
            _results(plain, tensors, wide=torch.float64, dtype=torch.float64),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """One block of one layer: sums in fp32, the block in the model's format."""
    kernel = REGISTRY["attention_merge"][name]
    dtype = training_dtype(device)
    B, T, N, H = (1, 16384, 32, 128) if device.type == "cuda" else (1, 512, 4, 64)
    out = torch.zeros(B, T, N, H, device=device)
    lse = torch.zeros(B, N, T, device=device)
    new = torch.ones(B, T, N, H, device=device, dtype=dtype)
    new_lse = torch.zeros_like(lse)
    # the sum is read and written, the block read; of log-sum-exps both are read and one is written
    moved = out.numel() * (4 + 4 + new.itemsize)
    moved_lse = lse.numel() * (4 + 4 + 4)
    merge = partial(kernel.merge, out, lse, new, new_lse)
    yield Work(f"merge, {T} x {N} x {H}", merge, moved + moved_lse, "bytes")
    yield Work(f"add, {T} x {N} x {H}", partial(kernel.add, out, new), moved, "bytes")


BENCH = Bench(held, works)
