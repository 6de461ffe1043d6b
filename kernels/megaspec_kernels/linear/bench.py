"""The three products of a linear layer, and the sum of its weight gradients."""

# M tokens, I inputs, O outputs

from collections.abc import Iterator

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.catalog import Use
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY, LinearKernel


def _results(kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, total: Tensor) -> Results:
    """As a layer calls it; the second of two weight gradients is added to the first, which overwrites what is there."""
    into = total.clone()
    kernel.add_weight_gradient(into, grad, x, overwrite=True)
    kernel.add_weight_gradient(into, grad, x, overwrite=False)
    return {
        "out": kernel.forward(x, weight, None),
        "with bias": kernel.forward(x, weight, bias),
        "x": kernel.input_gradient(grad, weight),
        "weight": kernel.weight_gradient(grad, x),
        "sum": into,
    }


def held(name: str, device: torch.device) -> Iterator[Held]:
    """One token, odd numbers of them, inputs that lie apart."""
    kernel = REGISTRY["linear"][name]
    plain = REGISTRY["linear"]["reference"]
    dtype = training_dtype(device)
    wide = torch.promote_types(dtype, torch.float32)
    for shape, n_in, n_out in (((1, 1), 64, 32), ((2, 63), 64, 96), ((1, 130), 128, 64)):
        x = random(*shape, 2 * n_in, seed=1, device=device)[..., ::2]
        weight = random(n_out, n_in, seed=2, device=device)
        bias = random(n_out, seed=3, device=device)
        grad = random(n_out, *shape, seed=4, device=device).movedim(0, -1)
        total = torch.full((n_out, n_in), float("nan"), device=device)
        mine = [one.to(dtype) for one in (x, weight, bias, grad)]
        yield Held(
            f"{shape[0]} x {shape[1]} tokens, {n_in} to {n_out}",
            _results(kernel, *mine, total.to(wide)),
            _results(plain, *mine, total.to(wide)),
            _results(plain, x, weight, bias, grad, total.double()),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Each of the three products of a large layer, the weight gradient added to a sum in fp32."""
    M, n_in, n_out = (8192, 4096, 6144) if device.type == "cuda" else (128, 96, 160)
    kernel = REGISTRY["linear"][name]
    dtype = training_dtype(device)
    x = torch.randn(M, n_in, device=device).to(dtype)
    weight = torch.randn(n_out, n_in, device=device).to(dtype)
    grad = torch.randn(M, n_out, device=device).to(dtype)
    total = torch.zeros(n_out, n_in, device=device, dtype=torch.promote_types(dtype, torch.float32))
    calls = {
        "forward": lambda: kernel.forward(x, weight, None),
        "input gradient": lambda: kernel.input_gradient(grad, weight),
        "weight gradient": lambda: kernel.add_weight_gradient(total, grad, x, overwrite=False),
    }
    for what, call in calls.items():
        yield Work(f"{what}, {M} tokens, {n_in} to {n_out}", call, 2 * M * n_in * n_out, "flops")


BENCH = Bench(held, works, uses=lambda name: Use(precision="bf16"))
