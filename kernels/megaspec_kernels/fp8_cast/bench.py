"""Quantising to fp8."""

# M rows, K columns

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, copy_of, on_device, random, training_dtype
from megaspec_kernels.fp8_cast.formats import Block, scale_of, spread
from megaspec_kernels.fp8_cast.tiles import CUDA_TILES, TILES
from megaspec_kernels.gate import Results
from megaspec_kernels.registry import REGISTRY, Fp8CastKernel

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
_TILES = {"triton": TILES, "cuda": CUDA_TILES}
BLOCKS: dict[str, Block] = {"a tensor": (None, None), "rows": (1, None), "1x128": (1, 128), "128x128": (128, 128)}


def _quantised(kernel: Fp8CastKernel, x_MK: Tensor, block: Block) -> Results:
    """What is left of a matrix, in the format that the kernel computes in."""
    amax = kernel.amax(x_MK, block=block)
    scale = scale_of(amax, E4M3)
    by_rows, by_columns = kernel.cast(x_MK, scale, block=block, dtype=E4M3, columns=True)
    factor = spread(scale, block, x_MK.shape)
    return {
        "out": by_rows.to(scale.dtype) * factor,
        "columns": by_columns.t().to(scale.dtype) * factor,
        "amax": amax,
    }


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Blocks of each recipe, and ends that fill none. The truth is the cast itself, in fp64: rounding is the same."""
    kernel = REGISTRY["fp8_cast"][name]
    plain = REGISTRY["fp8_cast"]["reference"]
    dtype = training_dtype(device)
    for shape in ((1, 16), (63, 1000), (256, 384)):
        x_MK = random(*shape, seed=1, device=device)
        mine = x_MK.to(dtype)
        for what, block in BLOCKS.items():
            yield Held(
                f"{shape[0]} x {shape[1]}, a scale for {what}",
                _quantised(kernel, mine, block),
                _quantised(plain, mine, block),
                _quantised(plain, x_MK, block),
            )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """What is read and written once: the largest elements and their scales, the cast into both layouts, and both at
    once by a scale that is known before, as delayed scales are. Sizes of a model of 8B."""
    M, K = (8192, 14336) if device.type == "cuda" else (256, 512)
    kernel = REGISTRY["fp8_cast"][name]
    x_MK = torch.randn(M, K, device=device).to(training_dtype(device))
    where = f"{M} x {K}, a scale for"
    size = M * K
    for what, block in BLOCKS.items():
        scale = scale_of(kernel.amax(x_MK, block=block), E4M3)

        def find(block: Block = block) -> Tensor:
            return kernel.scale(x_MK, block=block, dtype=E4M3)

        def cast(block: Block = block, scale: Tensor = scale) -> object:
            return kernel.cast(x_MK, scale, block=block, dtype=E4M3, columns=True)

        yield Work(f"scales, {where} {what}", find, x_MK.itemsize * size, "bytes")
        yield Work(f"cast, both layouts, {where} {what}", cast, (x_MK.itemsize + 2) * size, "bytes")
    yield from _known(name, device)
    yield from _columns(kernel, device)
    yield from _of_groups(kernel, device)


def _columns(kernel: Fp8CastKernel, device: torch.device) -> Iterator[Work]:
    """Rows that were gathered in fp8, turned round."""
    shapes = [(8192, 4096), (16384, 8192)] if device.type == "cuda" else [(256, 512)]
    for M, K in shapes:
        x8_MK = torch.randn(M, K, device=device).to(E5M2)
        yield Work(f"columns of fp8, {M} x {K}", partial(kernel.columns, x8_MK), 2 * M * K, "bytes")


def _of_groups(kernel: Fp8CastKernel, device: torch.device) -> Iterator[Work]:
    """The tokens of 32 experts, in the three steps that a weight gradient takes."""
    E, rows, K = (32, 2048, 2880) if device.type == "cuda" else (4, 64, 96)
    x_RI = torch.randn(E * rows, K, device=device).to(training_dtype(device))
    ends_E = torch.arange(1, E + 1, device=device, dtype=torch.int32) * rows
    scale = scale_of(kernel.group_amax(x_RI, ends_E), E4M3)
    x8_RI = kernel.group_cast(x_RI, scale, ends_E, dtype=E4M3)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "largest elements": (lambda: kernel.group_amax(x_RI, ends_E), x_RI.itemsize),
        "cast": (lambda: kernel.group_cast(x_RI, scale, ends_E, dtype=E4M3), x_RI.itemsize + 1),
        "columns": (lambda: kernel.group_columns(x8_RI, ends_E, ends_E, columns=E * rows), 2),
    }
    for step, (call, per_element) in calls.items():
        yield Work(f"{step} of groups, {E} x {rows} x {K}", call, per_element * x_RI.numel(), "bytes")


def _known(name: str, device: torch.device) -> Iterator[Work]:
    """One pass by a scale that is known: inputs and gradients of layers."""
    shapes = [(256, 512)]
    compared = shapes
    if device.type == "cuda":
        shapes = [(8192, 4096), (8192, 6144), (8192, 14336), (8192, 28672)]
        compared = [(8192, 4096), (8192, 14336)]
    for M, K in shapes:
        x_MK = torch.randn(M, K, device=device).to(training_dtype(device))
        scale = torch.full((1, 1), 2.0**-4, device=device)
        seen = torch.zeros(1, device=device)
        saturated = torch.zeros(1, dtype=torch.int64, device=device)
        amount = (x_MK.itemsize + 2) * M * K
        # of some shapes all tiles, of which the first one is what a run takes
        forms: dict[str, dict[str, object]] = {"": {}}
        for tile, form in _TILES.get(name, {}).items():
            if (M, K) in compared:
                forms[f", tile {tile}"] = {"tile": form}
        for what, form in forms.items():
            call = partial(
                REGISTRY["fp8_cast"][name].cast,
                x_MK,
                scale,
                block=(None, None),
                dtype=E5M2,
                columns=True,
                seen=seen,
                saturated=saturated,
                scale_copy=torch.empty_like(scale),
                **form,
            )
            if device.type == "cuda":
                # a kernel may run for less than the host takes to start it
                call = on_device(call)
            title = f"cast by a known scale, both layouts, recorded, {M} x {K}{what}"
            yield Work(title, call, amount, "bytes", copy_of(amount, device))


BENCH = Bench(held, works)
