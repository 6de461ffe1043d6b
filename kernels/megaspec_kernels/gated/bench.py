"""Gated activations."""

# M rows, F features

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import (
    Bench,
    Held,
    Work,
    compiled_on_gpu,
    copy_of,
    on_device,
    random,
    replayed,
    training_dtype,
)
from megaspec_kernels.fp8_cast.bench import known_one, unbalanced_ends
from megaspec_kernels.gate import results
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.gated.tiles import TILES
from megaspec_kernels.registry import REGISTRY, GatedProducer, WeightedGatedKernel

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
    weighted = REGISTRY["gated"][name].weighted
    if weighted is not None:
        yield from _of_experts(weighted, device)


def _in_fp8(producer: GatedProducer, grad: Tensor, gate_up: Tensor) -> Iterator[Work]:
    """What is written is a byte in each layout."""
    M, F = grad.shape
    known = known_one(torch.float8_e4m3fn, grad.device)
    code = GatedForm("silu").code
    for what, form in _tiles().items():
        forward = partial(producer.forward_in_fp8, gate_up, code, known=known, **form)
        amount = M * F * (2 * grad.itemsize + 2)
        title = f"silu in fp8, forward, {M} x {F}{what}"
        yield Work(title, on_device(forward), amount, "bytes", copy_of(amount, grad.device))
        of_gradients = known._replace(dtype=torch.float8_e5m2)
        backward = partial(producer.backward_in_fp8, grad, gate_up, code, known=of_gradients, **form)
        amount = M * F * (3 * grad.itemsize + 4)
        title = f"silu in fp8, backward, {M} x {F}{what}"
        yield Work(title, on_device(backward), amount, "bytes", copy_of(amount, grad.device))


def _tiles() -> dict[str, dict[str, object]]:
    """What a run takes, and the others."""
    forms: dict[str, dict[str, object]] = {"": {}}
    for name, tile in TILES.items():
        forms[f", tile {name}"] = {"tile": tile}
    return forms


def _of_experts(kernel: WeightedGatedKernel, device: torch.device) -> Iterator[Work]:
    """32 unequal groups of rows, as a layer like gpt-oss-20b's takes 8 k tokens; in fp8 with other tiles, too."""
    E, R, F = (32, 32768, 2880) if device.type == "cuda" else (8, 64, 48)
    dtype = training_dtype(device)
    gate_up = torch.randn(R, 2 * F, device=device).to(dtype)
    grad = torch.randn(R, F, device=device).to(dtype)
    weights = torch.rand(R, device=device)
    size = R * F
    where = f"weighted, {E} unequal groups of {R} x {F}"
    plain = {"gate_up_RF": gate_up, "weights_R": weights, "form": GatedForm("silu")}
    forward = partial(kernel.forward, **plain)
    yield Work(f"silu, forward, {where}", forward, 3 * size * grad.itemsize, "bytes")
    backward = partial(kernel.gradients, grad, **plain)
    yield Work(f"silu, backward, {where}", backward, 5 * size * grad.itemsize, "bytes")
    if device.type != "cuda":
        return
    groups = REGISTRY["fp8_cast"]["triton"].groups(unbalanced_ends(E, R, device), R)
    known = known_one(torch.float8_e4m3fn, device)
    for what, form in _tiles().items():
        forward = partial(kernel.forward_in_fp8, groups=groups, known=known, **plain, **form)
        amount = size * (2 * grad.itemsize + 2)
        title = f"silu in fp8, forward, {where}{what}"
        yield Work(title, on_device(forward), amount, "bytes", copy_of(amount, device))
        backward = partial(kernel.gradients_in_fp8, grad, groups=groups, known=known, **plain, **form)
        amount = size * (3 * grad.itemsize + 4)
        title = f"silu in fp8, backward, {where}{what}"
        yield Work(title, on_device(backward), amount, "bytes", copy_of(amount, device))


BENCH = Bench(held, works)
