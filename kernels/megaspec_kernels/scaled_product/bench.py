"""Products of fp8 matrices."""

# M rows, N columns of the result, K numbers that each is a sum over

from collections.abc import Iterator

import torch
from torch import Tensor

from megaspec_kernels.bench import Bench, Held, Work, random, training_dtype
from megaspec_kernels.catalog import Use, unmet
from megaspec_kernels.fp8_cast.formats import ROW, SHORT_ROW, Block, scale_of, spread
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.scaled_product import cublaslt

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Blocks of the two factors, and the format of the first: forward and backward.
FACTORS: dict[str, tuple[Block, Block, torch.dtype]] = {
    "tensors": ((None, None), (None, None), E4M3),
    "tensors, e5m2": ((None, None), (None, None), E5M2),
    "rows": ((1, None), (1, None), E4M3),
    "1x128 and 128x128": ((1, 128), (128, 128), E4M3),
    "1x128 and 1x128": ((1, 128), (1, 128), E4M3),
}
# The same of the two factors of a weight gradient.
GRADIENTS: dict[str, tuple[Block, torch.dtype]] = {
    "tensors": ((None, None), E5M2),
    "rows": ((1, None), E5M2),
    "1x128": ((1, 128), E4M3),
}
# Outputs and inputs of a layer's linears, of a model of 8B.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
# What asks for such blocks of a first factor: by precision.recipe the catalog says who takes them on which GPU.
_RECIPES: dict[Block, str] = {(None, None): "tensorwise", ROW: "rowwise", SHORT_ROW: "blockwise"}


def _factor(x: Tensor, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kernel = REGISTRY["fp8_cast"]["reference"]
    scale = scale_of(kernel.amax(x, block=block), dtype)
    return kernel.cast(x, scale, block=block, dtype=dtype)[0], scale


def by_tensor_cores(a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """a bᵀ as wrong as Hopper's tensor cores may make it: [M, K], [N, K] in fp64 -> [M, N] in `dtype`.

    They keep about 14 bits of a sum of fp8 products (DeepSeek-AI 2024, section 3.3.2), and without fast sums add it up
    in fp32 every 128 products, which are four of their steps: at most 4 · 2^-13 of the products' sizes is cut off. What
    plain PyTorch makes of the same numbers in fp32 is no yardstick for that; twice this is (see gate.py).
    """
    return (a @ b.t() + 2.0**-12 * (a.abs() @ b.abs().t())).to(dtype)


def takes(name: str, block: Block, device: torch.device) -> bool:
    """Whether an implementation has scales of such blocks on a device."""
    sm = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
    use = Use(precision="bf16", fp8_recipe=_RECIPES[block])
    return unmet("scaled_product", name, device=device.type, sm=sm, use=use) is None


def held(name: str, device: torch.device) -> Iterator[Held]:
    """Every pair of scales that the device has, into the model's format and into that of main gradients, new and added
    to something."""
    kernel = REGISTRY["scaled_product"][name]
    for M, N, K in ((16, 32, 128), (80, 256, 384)):
        for what, (a_block, b_block, format_a) in FACTORS.items():
            if not takes(name, a_block, device):
                continue
            a, a_scale = _factor(random(M, K, seed=1, device=device).float(), a_block, format_a)
            b, b_scale = _factor(random(N, K, seed=2, device=device).float(), b_block, E4M3)
            blocks = {"a_block": a_block, "b_block": b_block}
            a_wide = a.double() * spread(a_scale.double(), a_block, a.shape)
            b_wide = b.double() * spread(b_scale.double(), b_block, b.shape)
            truth = a_wide @ b_wide.t()
            for dtype in dict.fromkeys((training_dtype(device), torch.float32)):
                plain = by_tensor_cores(a_wide, b_wide, dtype=dtype)
                if name == "reference":
                    plain = (a_wide.float() @ b_wide.float().t()).to(dtype)
                what_is_there = random(M, N, seed=3, device=device)
                into = what_is_there.to(dtype)
                kernel(a, b, a_scale, b_scale, **blocks, dtype=dtype, into=into)
                yield Held(
                    f"{M} x {N} x {K}, scales of {what}, {dtype}",
                    {"out": kernel(a, b, a_scale, b_scale, **blocks, dtype=dtype), "sum": into},
                    {"out": plain, "sum": plain + what_is_there.to(dtype)},
                    {"out": truth, "sum": truth + what_is_there},
                )


def works(name: str, device: torch.device) -> Iterator[Work]:
    """A forward product of a large model, and sums of its weight gradients."""
    M, N, K = (8192, 28672, 4096) if device.type == "cuda" else (128, 256, 256)
    kernel = REGISTRY["scaled_product"][name]
    dtype = training_dtype(device)
    yield from _weight_gradients(name, device)
    yield from _fast_sums(name, device)
    for what, (a_block, b_block, format_a) in FACTORS.items():
        if not takes(name, a_block, device):
            continue
        a, a_scale = _factor(torch.randn(M, K, device=device), a_block, format_a)
        b, b_scale = _factor(torch.randn(N, K, device=device), b_block, E4M3)

        def call(
            a: Tensor = a,
            b: Tensor = b,
            scales: tuple[Tensor, Tensor] = (a_scale, b_scale),
            blocks: tuple[Block, Block] = (a_block, b_block),
        ) -> Tensor:
            return kernel(a, b, *scales, a_block=blocks[0], b_block=blocks[1], dtype=dtype, fast=True)

        yield Work(f"{M} x {N} x {K}, scales of {what}", call, 2 * M * N * K, "flops")


def _weight_gradients(name: str, device: torch.device) -> Iterator[Work]:
    """Of the layers of a model of 8B: added to a main gradient in fp32."""
    tokens = 8192
    shapes = SHAPES
    if device.type != "cuda":
        tokens = 128
        shapes = {"small": (48, 32)}
    kernel = REGISTRY["scaled_product"][name]
    for what, (block, format_gradient) in GRADIENTS.items():
        if not takes(name, block, device):
            continue
        for layer, (outputs, inputs) in shapes.items():
            grad_OM, grad_scale = _factor(torch.randn(outputs, tokens, device=device), block, format_gradient)
            x_IM, x_scale = _factor(torch.randn(inputs, tokens, device=device), block, E4M3)
            into = torch.zeros(outputs, inputs, device=device)
            blocks = {"a_block": block, "b_block": block}
            # what cuBLASLt thinks best, and its second thoughts
            count = 1
            if name == "cublaslt":
                count = min(3, cublaslt.algorithms(grad_OM, x_IM, into, **blocks))
            for algorithm in range(count):

                def call(
                    grad_OM: Tensor = grad_OM,
                    x_IM: Tensor = x_IM,
                    scales: tuple[Tensor, Tensor] = (grad_scale, x_scale),
                    blocks: dict[str, Block] = blocks,
                    into: Tensor = into,
                    algorithm: int = algorithm,
                ) -> Tensor:
                    more = {"algorithm": algorithm} if algorithm else {}
                    return kernel(grad_OM, x_IM, *scales, **blocks, dtype=torch.float32, into=into, **more)

                text = f"weight gradient of {layer}, {outputs} x {inputs} x {tokens}, scales of {what}, added"
                if algorithm:
                    text += f", algorithm {algorithm}"
                yield Work(text, call, 2 * outputs * inputs * tokens, "flops")


def _fast_sums(name: str, device: torch.device) -> Iterator[Work]:
    """Forward products of a model of 8B, by each algorithm that cuBLASLt found; the first is what a run takes."""
    if name != "cublaslt":
        return
    tokens = 8192
    whole: Block = (None, None)
    blocks = {"a_block": whole, "b_block": whole}
    for layer, (outputs, inputs) in SHAPES.items():
        x_MK, x_scale = _factor(torch.randn(tokens, inputs, device=device), whole, E4M3)
        weight_NK, weight_scale = _factor(torch.randn(outputs, inputs, device=device), whole, E4M3)
        out_MN = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=device)
        for algorithm in range(cublaslt.algorithms(x_MK, weight_NK, out_MN, **blocks, fast=True)):

            def call(
                x_MK: Tensor = x_MK,
                weight_NK: Tensor = weight_NK,
                scales: tuple[Tensor, Tensor] = (x_scale, weight_scale),
                algorithm: int = algorithm,
            ) -> Tensor:
                return cublaslt.scaled_product(
                    x_MK, weight_NK, *scales, **blocks, dtype=torch.bfloat16, fast=True, algorithm=algorithm
                )

            text = f"{layer}, {tokens} x {outputs} x {inputs}, fast sums, algorithm {algorithm}"
            yield Work(text, call, 2 * tokens * outputs * inputs, "flops")


BENCH = Bench(held, works, uses=lambda name: Use(precision="bf16"))
