"""Launch choices of the Triton kernels of norms, gates and rotations, on a GPU: GB/s of each beside a plain copy.

  python tests/benchmarks/bench_producers.py 8b 1b

Of the shapes of a micro batch of 8B, where none are said; about a minute each, most of it for Triton's compiler.
"""

# M rows, D and F features

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megaspec_kernels import bench
from megaspec_kernels.bench import on_device
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.gated import triton as gates
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.norm import triton as norms
from megaspec_kernels.norm.form import NormForm
from megaspec_kernels.rope import triton as rotations
from megaspec_kernels.rope.bench import angles
from megaspec_kernels.rope.form import Heads

# Tokens, features of the stream, features of the gate.
SIZES = {"8b": (8192, 4096, 14336), "1b": (16384, 2048, 8192)}
HEADS = {"8b": Heads(32, 8, 128), "1b": Heads(32, 8, 64)}
RMS = NormForm("rms", "scale", 1e-5).code
SILU = GatedForm("silu").code


def rate(call: Callable[[], Any], moved: int) -> float:
    """GB/s."""
    return moved / bench._seconds(on_device(call), torch.device("cuda")) / 1e9


def known(dtype: torch.dtype) -> Known:
    return Known(
        torch.ones(1, device="cuda"),
        torch.zeros(1, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        dtype,
    )


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def of_norms(M: int, D: int) -> Iterator[tuple[str, float]]:
    x, term, grad, stream, weight = bf16(M, D), bf16(M, D), bf16(M, D), bf16(M, D), bf16(D)
    _, _, statistics = norms.norm_forward(x, None, weight, None, RMS)
    for features in (256, 512, 1024):
        norms.FEATURES_OF_A_WARP = features
        call = partial(norms.norm_forward, x, term, weight, None, RMS)
        yield f"norm forward, {features} features a warp", rate(call, 8 * M * D)
    for features in (256, 512):
        for programs in (1, 2, 3, 4):
            for stages in (1, 2, 3):
                norms.FEATURES_OF_A_WARP, norms.PROGRAMS, norms.STAGES = features, programs, stages
                call = partial(norms.norm_backward, grad, stream, x, weight, statistics, RMS, True, 1)
                name = f"norm backward, {features} features a warp, {programs} programs, {stages} stages"
                yield name, rate(call, 8 * M * D)
    for features in (256, 512, 1024):
        norms.FEATURES_OF_A_WARP = features
        call = partial(norms.norm_forward_in_fp8, x, term, weight, None, RMS, known=known(torch.float8_e4m3fn))
        yield f"norm in fp8, {features} features a warp", rate(call, 8 * M * D)
        call = partial(call, columns=False)
        yield f"norm in rows of fp8, {features} features a warp", rate(call, 7 * M * D)


def of_gates(M: int, F: int) -> Iterator[tuple[str, float]]:
    gate_up, grad = bf16(M, 2 * F), bf16(M, F)
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        gates.BLOCK, gates.WARPS = block, warps
        yield (
            f"gate forward, {block} features, {warps} warps",
            rate(partial(gates.gated_forward, gate_up, SILU), 6 * M * F),
        )
        call = partial(gates.gated_backward, grad, gate_up, SILU)
        yield f"gate backward, {block} features, {warps} warps", rate(call, 10 * M * F)
    tiles = (
        gates.Tile(128, 64, 4),
        gates.Tile(64, 128, 4),
        gates.Tile(64, 64, 4),
        gates.Tile(128, 128, 8),
        gates.Tile(64, 128, 8),
        gates.Tile(128, 64, 8),
    )
    for tile in tiles:
        gates.FORWARD_TILE = gates.BACKWARD_TILE = tile
        call = partial(gates.gated_forward_in_fp8, gate_up, SILU, known=known(torch.float8_e4m3fn))
        yield f"gate in fp8, forward, {tile}", rate(call, 6 * M * F)
        call = partial(gates.gated_backward_in_fp8, grad, gate_up, SILU, known=known(torch.float8_e5m2))
        yield f"gate in fp8, backward, {tile}", rate(call, 10 * M * F)


def of_rotations(M: int, heads: Heads) -> Iterator[tuple[str, float]]:
    """Of two sequences."""
    qkv = bf16(2, M // 2, heads.width)
    grads = tuple(bf16(2, M // 2, count, heads.size) for count in (heads.queries, heads.keys, heads.keys))
    cos, sin = angles(M // 2, half=heads.size // 2, device=qkv.device)
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        rotations.BLOCK, rotations.WARPS = block, warps
        name = f"{block} features of a half, {warps} warps"
        call = partial(rotations.rope_forward, qkv, cos, sin, *heads)
        yield f"rotation forward, {name}", rate(call, 4 * M * heads.turned * heads.size)
        call = partial(rotations.rope_backward, *grads, cos, sin)
        yield f"rotation backward, {name}", rate(call, 4 * M * heads.width)
    for rows, warps in ((64, 4), (64, 8), (128, 4), (128, 8)):
        tile = rotations.Tile(rows, warps)
        rotations.TILES[heads.size // 2] = tile
        call = partial(rotations.rope_backward_in_fp8, *grads, cos, sin, known=known(torch.float8_e5m2))
        yield f"rotation in fp8, backward, {tile}", rate(call, 4 * M * heads.width)


def main() -> None:
    print(torch.cuda.get_device_name())
    x, y = bf16(8192, 14336), bf16(8192, 14336)
    print(f"{rate(partial(y.copy_, x), 4 * x.numel()):7.0f} GB/s  copy")
    del x, y
    bench.ROUNDS = 5
    bench.SECONDS = 0.02
    for size in sys.argv[1:] or ["8b"]:
        M, D, F = SIZES[size]
        heads = HEADS[size]
        for width, rates in ((heads.width, of_rotations(M, heads)), (D, of_norms(M, D)), (F, of_gates(M, F))):
            for name, found in rates:
                print(f"{found:7.0f} GB/s  {M} x {width}  {name}", flush=True)


if __name__ == "__main__":
    main()
