"""Products of tokens with the matrices of their experts."""

# E experts, R rows, I inputs, O outputs

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, copy_of, random, training_dtype
from megaspec_kernels.catalog import Use
from megaspec_kernels.gate import Results
from megaspec_kernels.grouped.add import add_
from megaspec_kernels.registry import REGISTRY, GroupedKernel


def _results(kernel: GroupedKernel, x_RI: Tensor, weight_EIO: Tensor, grad_RO: Tensor, ends_E: Tensor) -> Results:
    """The product and its two gradients, as a layer of experts calls it."""
    return {
        "out": kernel.product(x_RI, weight_EIO, ends_E),
        "x": kernel.product(grad_RO, weight_EIO.transpose(1, 2), ends_E),
        "weight": kernel.product(x_RI.t(), grad_RO, ends_E),
    }


def _ends(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Experts without rows, experts with one."""
    dtype = training_dtype(device)
    kernel = REGISTRY["grouped"][name]
    plain = REGISTRY["grouped"]["reference"]
    for sizes, n_in, n_out in (((3,), 8, 16), ((5, 0, 1, 57), 24, 48), ((0, 0, 130, 7), 64, 32)):
        rows = sum(sizes)
        tensors = [
            random(rows, n_in, seed=1, device=device),
            random(len(sizes), n_in, n_out, seed=2, device=device),
            random(rows, n_out, seed=3, device=device),
        ]
        mine = [x.to(dtype) for x in tensors]
        ends_E = _ends(sizes, device)
        yield Held(
            f"rows {sizes}, {n_in} to {n_out}",
            _results(kernel, *mine, ends_E),
            _results(plain, *mine, ends_E),
            _results(plain, *tensors, ends_E),
        )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Three products: forward, and the gradients of tokens and weights."""
    E, rows, n_in, n_out = (32, 1024, 2048, 1536) if device.type == "cuda" else (4, 64, 128, 96)
    dtype = training_dtype(device)
    kernel = REGISTRY["grouped"][name]
    ends_E = _ends((rows,) * E, device)
    x_RI = torch.randn(E * rows, n_in, device=device).to(dtype)
    grad_RO = torch.randn(E * rows, n_out, device=device).to(dtype)
    weight_EIO = torch.randn(E, n_in, n_out, device=device).to(dtype)

    def call() -> None:
        _results(kernel, x_RI, weight_EIO, grad_RO, ends_E)

    yield Work(f"{E} x {rows} rows, {n_in} to {n_out}", call, 3 * 2 * E * rows * n_in * n_out, "flops")
    yield from _sums(device)


def _sums(device: torch.device) -> Iterator[Work]:
    """The gradient of a layer of experts like gpt-oss-20b's, added to a sum in fp32, and in place of one."""
    shape = (32 * 5760, 2880) if device.type == "cuda" else (96, 64)
    grad = torch.randn(shape, device=device).to(torch.bfloat16)
    total = torch.zeros(shape, device=device)
    for what, overwrite, per_element in (("added to", False, 10), ("in place of", True, 6)):
        call = partial(add_, total, grad, overwrite=overwrite)
        amount = per_element * grad.numel()
        yield Work(
            f"a gradient {what} its sum, {shape[0]} x {shape[1]}", call, amount, "bytes", copy_of(amount, device)
        )


BENCH = Bench(held, works, uses=lambda name: Use(precision="bf16", widths=(2048, 1536)))
