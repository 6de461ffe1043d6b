"""Gated activations."""

# M rows, F features

from collections.abc import Iterator
from functools import partial

import torch

from megaspec_kernels.bench import Bench, Held, Work, compiled_on_gpu, random, replayed, training_dtype
from megaspec_kernels.gate import results
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import REGISTRY

FORMS = (
    GatedForm("silu"),
    GatedForm("gelu"),
    GatedForm("gelu_tanh"),
    GatedForm("quick_gelu"),
    GatedForm("relu"),
    GatedForm("relu_squared"),
    GatedForm(limit=1.5, alpha=1.702),
)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Each form, and rows that fill no tile."""
    kernel = REGISTRY["gated"][name].gated
    plain = REGISTRY["gated"]["reference"].gated
    dtype = training_dtype(device)
    for M, F in ((1, 1), (7, 1000), (2, 4097)):
        gate_up = random(M, 2 * F, seed=1, device=device)
        grad = random(M, F, seed=2, device=device)
        for form in FORMS:
            yield Held(
                f"{form}, {M} x {F}",
                results(partial(kernel, form=form), {"gate_up": gate_up.to(dtype)}, grad),
                results(partial(plain, form=form), {"gate_up": gate_up.to(dtype)}, grad),
                results(partial(plain, form=form), {"gate_up": gate_up}, grad),
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A micro batch of 8B and one of 1B: gate and up are read, one number written; backward the gradient is read too,
    and two are written. Plain operations are timed as they are compiled."""
    sizes = ((8192, 14336), (16384, 8192)) if device.type == "cuda" else ((64, 512),)
    kernel = partial(REGISTRY["gated"][name].gated, form=GatedForm("silu"))
    if name == "reference":
        kernel = compiled_on_gpu(kernel, device)
    dtype = training_dtype(device)
    for M, F in sizes:
        gate_up = torch.randn(M, 2 * F, device=device).to(dtype).requires_grad_()
        grad = torch.randn(M, F, device=device).to(dtype)
        forward, backward = replayed(kernel, (gate_up,), (grad,))
        size = M * F * grad.itemsize
        yield Work(f"silu, forward, {M} x {F}", forward, 3 * size, "bytes")
        yield Work(f"silu, backward, {M} x {F}", backward, 5 * size, "bytes")


BENCH = Bench(held, works)
