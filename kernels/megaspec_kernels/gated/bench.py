"""Gated activations."""

# M rows, F features

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, compiled_on_gpu, on_device, random, replayed, training_dtype
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.gate import results
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import REGISTRY, GatedProducer

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
        producer = REGISTRY["gated"][name].producer
        if producer is not None and device.type == "cuda":
            yield from _in_fp8(producer, grad, gate_up.detach())


def _in_fp8(producer: GatedProducer, grad: Tensor, gate_up: Tensor) -> Iterator[Work]:
    """What is written is a byte in each layout."""
    M, F = grad.shape
    known = Known(
        torch.ones(1, device=grad.device),
        torch.zeros(1, device=grad.device),
        torch.zeros(1, dtype=torch.int64, device=grad.device),
        torch.float8_e4m3fn,
    )
    code = GatedForm("silu").code
    forward = partial(producer.forward_in_fp8, gate_up, code, known=known)
    yield Work(f"silu in fp8, forward, {M} x {F}", on_device(forward), M * F * (2 * grad.itemsize + 2), "bytes")
    backward = partial(producer.backward_in_fp8, grad, gate_up, code, known=known._replace(dtype=torch.float8_e5m2))
    yield Work(f"silu in fp8, backward, {M} x {F}", on_device(backward), M * F * (3 * grad.itemsize + 4), "bytes")


BENCH = Bench(held, works)
