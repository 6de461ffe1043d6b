"""Products of fp8 tokens with the fp8 matrices of their experts."""

# E experts, R rows, I inputs, O outputs

from collections.abc import Iterator

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.catalog import Use
from megaspec_kernels.fp8_cast.bench import unbalanced_ends
from megaspec_kernels.fp8_cast.formats import scale_of
from megaspec_kernels.fp8_cast.groups import Groups, scale_of_rows
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY, ScaledGroupedKernel

E4M3 = torch.float8_e4m3fn
# Whether a group shares a scale, or a row and in columns a feature of a group.
SCALES = {"groups": False, "rows": True}
# Experts, rows, inputs, outputs: a gpt-oss-20b layer and a Qwen3-30B layer, 16 k tokens.
SHAPES = ((32, 65536, 2880, 5760), (32, 65536, 2880, 2880), (128, 131072, 2048, 1536), (128, 131072, 768, 2048))
# The first of them with 8 k tokens, as routers choose: see fp8_cast/bench.py.
UNBALANCED = ((32, 32768, 2880, 5760), (32, 32768, 2880, 2880))


class Factors:
    """What the three products of a layer take."""

    def __init__(self, x_RI: Tensor, weight_EOI: Tensor, grad_RO: Tensor, ends_E: Tensor, *, by_rows: bool):
        cast = REGISTRY["fp8_cast"]["triton" if x_RI.device.type == "cuda" else "reference"]
        E, O, _ = weight_EOI.shape  # noqa: E741
        R = x_RI.shape[0]
        self.groups = cast.groups(ends_E, R)
        ends_of_weights = torch.arange(1, E + 1, device=ends_E.device, dtype=torch.int32) * O
        groups_of_weights = cast.groups(ends_of_weights, E * O)

        def by_group(x: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
            scale = scale_of(cast.group_amax(x, groups.ends, by_column=by_rows), E4M3)
            rows, columns = cast.group_cast(x, scale, groups, dtype=E4M3, columns=True)
            return rows, columns, scale

        def by_row(x: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
            if not by_rows:
                values, _, scale = by_group(x, groups)
                return values, scale_of_rows(scale, groups)
            scale = scale_of(cast.amax(x, block=(1, None)), E4M3)
            return cast.cast(x, scale, block=(1, None), dtype=E4M3)[0], scale

        self.x, self.x_scale = by_row(x_RI, self.groups)
        self.grad, self.grad_scale = by_row(grad_RO, self.groups)
        weight, scale = by_row(weight_EOI.flatten(0, 1), groups_of_weights)
        self.weight = weight.view(weight_EOI.shape)
        self.weight_scale = scale.expand(E * O, 1).reshape(E, O)
        lying, _, self.turned_scale = by_group(weight_EOI.flatten(0, 1), groups_of_weights)
        self.turned = cast.columns(lying).view(-1, E, O).permute(1, 0, 2)
        _, self.x_columns, self.x_columns_scale = by_group(x_RI, self.groups)
        _, self.grad_columns, self.grad_columns_scale = by_group(grad_RO, self.groups)


def _results(kernel: ScaledGroupedKernel, one: Factors, *, dtype: torch.dtype, wide: bool = False) -> Results:
    """Forward, and the gradients of tokens and weights, as a layer of experts calls them. `wide`: scales in fp64."""

    def scale(x: Tensor) -> Tensor:
        return x.to(torch.float64) if wide else x

    return {
        "out": kernel.product(
            one.x, one.weight, scale(one.x_scale), scale(one.weight_scale), one.groups.ends, dtype=dtype, fast=False
        ),
        "x": kernel.product(
            one.grad, one.turned, scale(one.grad_scale), scale(one.turned_scale), one.groups.ends, dtype=dtype
        ),
        "weight": kernel.weight_product(
            one.grad_columns,
            one.x_columns,
            scale(one.grad_columns_scale),
            scale(one.x_columns_scale),
            one.groups.padded,
            dtype=dtype,
        ),
    }


def _ends(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Experts without rows, experts with one."""
    dtype = training_dtype(device)
    kernel = REGISTRY["scaled_grouped"][name]
    plain = REGISTRY["scaled_grouped"]["reference"]
    for sizes, n_in, n_out in (((3,), 16, 32), ((5, 0, 1, 57), 48, 64), ((0, 0, 130, 7), 64, 32)):
        rows = sum(sizes)
        x_RI = random(rows, n_in, seed=1, device=device).to(dtype)
        weight_EOI = random(len(sizes), n_out, n_in, seed=2, device=device).to(dtype)
        grad_RO = random(rows, n_out, seed=3, device=device).to(dtype)
        for what, by_rows in SCALES.items():
            one = Factors(x_RI, weight_EOI, grad_RO, _ends(sizes, device), by_rows=by_rows)
            yield Held(
                f"rows {sizes}, {n_in} to {n_out}, scales of {what}",
                _results(kernel, one, dtype=dtype),
                _results(plain, one, dtype=dtype),
                _results(plain, one, dtype=torch.float64, wide=True),
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """Three products: forward, and the gradients of tokens and weights."""
    kernel = REGISTRY["scaled_grouped"][name]
    shapes = SHAPES if device.type == "cuda" else ((4, 256, 128, 96),)
    for E, rows, n_in, n_out in shapes:
        ends_E = _ends((rows // E,) * E, device)
        yield from _products(kernel, ends_E, f"{E} x {rows // E} rows", rows, n_in, n_out)
    if device.type == "cuda":
        for E, rows, n_in, n_out in UNBALANCED:
            ends_E = unbalanced_ends(E, rows, device)
            yield from _products(kernel, ends_E, f"{E} unequal groups of {rows} rows", rows, n_in, n_out)


def _products(
    kernel: ScaledGroupedKernel, ends_E: Tensor, title: str, rows: int, n_in: int, n_out: int
) -> Iterator[Work]:
    device = ends_E.device
    dtype = training_dtype(device)
    x_RI = torch.randn(rows, n_in, device=device).to(dtype)
    weight_EOI = torch.randn(ends_E.shape[0], n_out, n_in, device=device).to(dtype)
    grad_RO = torch.randn(rows, n_out, device=device).to(dtype)
    one = Factors(x_RI, weight_EOI, grad_RO, ends_E, by_rows=True)
    calls = {
        "forward": lambda: kernel.product(
            one.x, one.weight, one.x_scale, one.weight_scale, one.groups.ends, dtype=dtype, fast=True
        ),
        "input gradient": lambda: kernel.product(
            one.grad, one.turned, one.grad_scale, one.turned_scale, one.groups.ends, dtype=dtype
        ),
        "weight gradient": lambda: kernel.weight_product(
            one.grad_columns,
            one.x_columns,
            one.grad_columns_scale,
            one.x_columns_scale,
            one.groups.padded,
            dtype=dtype,
        ),
    }
    for what, call in calls.items():
        yield Work(f"{what}, {title}, {n_in} to {n_out}", call, 2 * rows * n_in * n_out, "flops")


BENCH = Bench(held, works, uses=lambda name: Use(precision="bf16", widths=(2880, 5760, 2048, 1536, 768)))
