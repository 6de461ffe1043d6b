"""Norms, alone and with the residual stream around them."""

# M rows, D features

from collections.abc import Callable, Iterator
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
from megaspec_kernels.fp8_cast.bench import known_one
from megaspec_kernels.gate import Results, results
from megaspec_kernels.norm.form import NormForm
from megaspec_kernels.registry import REGISTRY, NormKernel, NormProducer

RMS = NormForm("rms", "scale", 1e-5)
FORMS = (RMS, NormForm("rms", "one_plus", 1e-6), NormForm("layer", "scale", 1e-5))


def _whole(kernel: NormKernel, form: NormForm, inputs: dict[str, Tensor], grad: Tensor) -> Results:
    """Stream and normed side by side, of the sum of two."""
    bias = {"bias": inputs["bias"]} if form.kind == "layer" else {}

    def both(x: Tensor, term: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        total, y = kernel.norm_of_sum(x, term, weight, bias, form=form)
        stream, z = kernel.norm_of_stream(total, weight, bias, form=form)
        return torch.cat((stream, y, z, kernel.norm(x, weight, bias, form=form)), dim=-1)

    names = ("x", "term", "weight")
    return results(both, {name: inputs[name] for name in names} | bias, grad)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Each form, rows that fill no tile, and a single one."""
    kernel = REGISTRY["norm"][name]
    plain = REGISTRY["norm"]["reference"]
    dtype = training_dtype(device)
    for M, D in ((1, 1), (63, 1000), (7, 4096)):
        wide = {
            "x": random(M, D, seed=1, device=device),
            "term": random(M, D, seed=2, device=device),
            "weight": random(D, seed=3, device=device),
            "bias": random(D, seed=4, device=device),
        }
        grad = random(M, 4 * D, seed=5, device=device)
        mine = {key: x.to(dtype) for key, x in wide.items()}
        for form in FORMS:
            yield Held(
                f"{form.kind} {form.gain}, {M} x {D}",
                _whole(kernel, form, mine, grad.to(dtype)),
                _whole(plain, form, mine, grad.to(dtype)),
                _whole(plain, form, wide, grad),
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A micro batch of 8B and one of 1B. Of the sum and its norm four numbers an element: both terms, the sum, what is
    normed; backward the sum, both gradients, their sum. Plain operations are timed as they are compiled."""
    sizes = ((8192, 4096), (16384, 2048)) if device.type == "cuda" else ((64, 512),)
    dtype = training_dtype(device)
    kernel = REGISTRY["norm"][name]

    def of_sum(x: Tensor, term: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.norm_of_sum(x, term, weight, None, form=RMS)

    def alone(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.norm_of_stream(x, weight, None, form=RMS)

    if name == "reference":
        of_sum = compiled_on_gpu(of_sum, device)
        alone = compiled_on_gpu(alone, device)
    for M, D in sizes:

        def made(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype)

        x, term, weight = (made(*shape).requires_grad_() for shape in ((M, D), (M, D), (D,)))
        grads = (made(M, D), made(M, D))
        cases: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Tensor, ...], int]] = {
            "sum and norm": (of_sum, (x, term, weight), 4),
            "norm": (alone, (x, weight), 2),
        }
        for what, (run, inputs, numbers) in cases.items():
            forward, backward = replayed(run, inputs, grads)
            size = M * D * x.itemsize
            yield Work(f"{what}, forward, {M} x {D}", forward, numbers * size, "bytes")
            yield Work(f"{what}, backward, {M} x {D}", backward, 4 * size, "bytes")
        if kernel.producer is not None and device.type == "cuda":
            for columns in (True, False):
                yield _in_fp8(kernel.producer, x.detach(), term.detach(), weight.detach(), columns=columns)


def _in_fp8(producer: NormProducer, x: Tensor, term: Tensor, weight: Tensor, *, columns: bool) -> Work:
    """Both terms are read, their sum is written, and what is normed in both layouts or in rows alone."""
    M, D = x.shape
    known = known_one(torch.float8_e4m3fn, x.device)
    call = partial(producer.forward_in_fp8, x, term, weight, None, RMS.code, known=known, columns=columns)
    layouts = 2 if columns else 1
    what = "fp8" if columns else "rows of fp8"
    amount = M * D * (3 * x.itemsize + layouts)
    return Work(f"sum and norm in {what}, {M} x {D}", on_device(call), amount, "bytes", copy_of(amount, x.device))


BENCH = Bench(held, works)
