"""Norms of gradients, one by one."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, on_device, random
from megaspec_kernels.registry import REGISTRY

# Sizes that hurt: one element, an odd row, less and more than a program takes, and what threads load by four.
SHAPES = ((1,), (16,), (3, 5), (63, 33), (64, 48), (8193,), (5, 20_001), (96, 1024))


def _stacked(norms: Sequence[Tensor]) -> dict[str, Tensor]:
    """The results one by one: the largest must not hide the others."""
    return {f"norm {i}": norm for i, norm in enumerate(norms)}


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Tensors of odd sizes beside such as threads load by four, in one call; one that is not contiguous."""
    kernel = REGISTRY["grad_norm"][name]
    plain = REGISTRY["grad_norm"]["reference"]
    values = [random(*shape, seed=i, device=device) for i, shape in enumerate(SHAPES)]
    values.append(random(40, 70, seed=len(SHAPES), device=device).t())
    truth = [value.square().sum().sqrt() for value in values]
    for dtype in (torch.float32, torch.bfloat16):
        mine = [value.to(dtype) for value in values]
        yield Held(str(dtype), _stacked(kernel(mine)), _stacked(plain(mine)), _stacked(truth))


def works(name: str, device: torch.device) -> Iterator[Work]:
    """The gradients of a step in fp32, and those of a bucket; each is read once."""
    count, side = (16, 4096) if device.type == "cuda" else (2, 256)
    kernel = REGISTRY["grad_norm"][name]
    for matrices, vectors in ((count, 0), (count // 8, 4)):
        values = [0.01 * torch.randn(side, side, device=device) for _ in range(matrices)]
        values += [0.01 * torch.randn(side, device=device) for _ in range(vectors)]
        elements = sum(value.numel() for value in values)
        call = partial(kernel, values)
        if device.type == "cuda":
            # a bucket's norms are taken beside the backward pass, which the host is ahead of
            call = on_device(call)
        yield Work(f"{elements / 1e6:,.1f} M in {len(values)} tensors", call, 4 * elements, "bytes")


BENCH = Bench(held, works)
