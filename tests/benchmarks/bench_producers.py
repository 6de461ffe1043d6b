"""Triton kernels of norms, gates, rotations and casts, on a GPU: GB/s of each beside a plain copy.

  python tests/benchmarks/bench_producers.py --chosen --out writers.jsonl 8b 1b
  python tests/benchmarks/bench_producers.py 8b 1b

`--chosen`: what a run takes of all that writes fp8, that of experts among it, as JSON lines; some seconds. Without it
launch choices, about a minute for each size, most of it for Triton's compiler. Tiles of gates that write fp8 are
compared by `megaspec bench kernel gated`.
"""

# M rows, D and F features

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megaspec_kernels import bench
from megaspec_kernels.bench import Work, on_device
from megaspec_kernels.fp8_cast import triton as casts
from megaspec_kernels.fp8_cast import triton_groups as casts_of_groups
from megaspec_kernels.fp8_cast.bench import known_one, tokens_of_rows, unbalanced_ends
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.gated import triton as gates
from megaspec_kernels.gated import triton_weighted as weighted
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


def rate(call: Callable[[], Any], moved: float) -> float:
    """GB/s."""
    return moved / bench._seconds(on_device(call), torch.device("cuda")) / 1e9


def known(dtype: torch.dtype) -> Known:
    return known_one(dtype, torch.device("cuda"))


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
        for registers in (96, 128):
            tile = rotations.Tile(rows, warps, registers, below=8)
            rotations.TILES[heads.size // 2] = tile
            call = partial(rotations.rope_backward_in_fp8, *grads, cos, sin, known=known(torch.float8_e5m2))
            yield f"rotation in fp8, backward, {tile}", rate(call, 4 * M * heads.width)


def work(name: str, call: Callable[[], Any], moved: int) -> Work:
    """With a copy of as many bytes."""
    return Work(name, call, moved, "bytes", bench.copy_of(moved, torch.device("cuda")))


def that_write_fp8(size: str) -> Iterator[Work]:
    """Each with the launch choices that a run takes."""
    M, D, F = SIZES[size]
    gate_up, grad = bf16(M, 2 * F), bf16(M, F)
    e4m3 = known(torch.float8_e4m3fn)
    e5m2 = known(torch.float8_e5m2)
    forward = partial(gates.gated_forward_in_fp8, gate_up, SILU, known=e4m3)
    yield work(f"gate, forward, {M} x {F}", forward, 6 * M * F)
    backward = partial(gates.gated_backward_in_fp8, grad, gate_up, SILU, known=e5m2)
    yield work(f"gate, backward, {M} x {F}", backward, 10 * M * F)
    heads = HEADS[size]
    # of two sequences
    grads = tuple(bf16(2, M // 2, count, heads.size) for count in (heads.queries, heads.keys, heads.keys))
    cos, sin = angles(M // 2, half=heads.size // 2, device=gate_up.device)
    turned = partial(rotations.rope_backward_in_fp8, *grads, cos, sin, known=e5m2)
    yield work(f"rotation, backward, {M} x {heads.width}, heads of {heads.size}", turned, 4 * M * heads.width)
    norm = partial(norms.norm_forward_in_fp8, bf16(M, D), bf16(M, D), bf16(D), None, RMS, known=e4m3)
    yield work(f"sum and norm, forward, {M} x {D}", norm, 8 * M * D)
    yield work(f"sum and norm in rows alone, forward, {M} x {D}", partial(norm, columns=False), 7 * M * D)
    rows = bf16(M, D).to(e5m2.dtype)
    yield work(f"columns of fp8, {M} x {D}", partial(casts.columns, rows), 2 * M * D)
    for columns in (D, 2 * F):
        x = bf16(M, columns)
        cast = partial(casts.cast, x, e5m2.scale.view(1, 1), block=(None, None), dtype=e5m2.dtype, columns=True)
        recorded = partial(cast, seen=e5m2.seen, saturated=e5m2.saturated, scale_copy=torch.empty(1, 1, device="cuda"))
        yield work(f"cast, {M} x {columns}", recorded, 4 * M * columns)
        # with the pass that finds the largest elements, where there is one
        yield work(f"tensorwise, {M} x {columns}", partial(tensorwise, x), 6 * M * columns)
        yield work(f"rowwise, {M} x {columns}", partial(casts.quantise_lines, x, dtype=e4m3.dtype), 6 * M * columns)
        short = partial(casts.quantise_short_lines, x, dtype=e4m3.dtype)
        yield work(f"blockwise, {M} x {columns}", short, 4 * M * columns)


def tensorwise(x: torch.Tensor) -> object:
    """Both layouts by the scale of the whole tensor."""
    scale = casts.scale(x, block=(None, None), dtype=torch.float8_e4m3fn)
    return casts.cast(x, scale, block=(None, None), dtype=torch.float8_e4m3fn, columns=True)


def of_experts(x: torch.Tensor, groups: Groups) -> object:
    """The same by the scale of what each expert takes."""
    scale = casts.scale_of(casts_of_groups.group_amax(x, groups.ends), torch.float8_e4m3fn)
    return casts_of_groups.group_cast(x, scale, groups, dtype=torch.float8_e4m3fn, columns=True)


def columns_of_experts(x: torch.Tensor, groups: Groups) -> object:
    """The layout of columns alone, by scales of each expert's columns."""
    amax = casts_of_groups.group_amax(x, groups.ends, by_column=True)
    scale = casts.scale_of(amax, torch.float8_e4m3fn)
    return casts_of_groups.group_cast(x, scale, groups, dtype=torch.float8_e4m3fn, rows=False, columns=True)


def that_write_fp8_of_experts() -> Iterator[Work]:
    """32 unequal groups of rows, as a layer like gpt-oss-20b's takes 8 k tokens, each by 4 experts."""
    E, R, M, F = 32, 32768, 8192, 2880
    gate_up = bf16(R, 2 * F)
    grad = bf16(R, F)
    weights = torch.rand(R, device="cuda")
    groups = casts_of_groups.groups(unbalanced_ends(E, R, gate_up.device), R)
    form = GatedForm("silu")
    forward = partial(weighted.forward_in_fp8, gate_up, weights, groups, form=form, known=known(torch.float8_e4m3fn))
    yield work(f"experts' gate, forward, {R} x {F}", forward, 6 * R * F)
    backward = partial(
        weighted.gradients_in_fp8, grad, gate_up, weights, groups, form=form, known=known(torch.float8_e5m2)
    )
    yield work(f"experts' gate, backward, {R} x {F}", backward, 10 * R * F)
    e4m3 = known(torch.float8_e4m3fn)
    known_scale = {"scale": e4m3.scale.view(1, 1), "groups": groups, "dtype": e4m3.dtype, "columns": True}
    known_scale |= {"seen": e4m3.seen, "saturated": e4m3.saturated, "scale_copy": torch.empty(1, 1, device="cuda")}
    yield work(f"experts' rows, {R} x {F}", partial(casts_of_groups.group_cast, grad, **known_scale), 4 * R * F)
    index_R = tokens_of_rows(groups.ends, M)
    gathered = partial(casts_of_groups.group_cast, grad[:M], index_R=index_R, **known_scale)
    # a token is read once at least
    yield work(f"experts' rows gathered from {M} tokens, {R} x {F}", gathered, 2 * M * F + 2 * R * F)
    yield work(f"experts' rows, tensorwise, {R} x {F}", partial(of_experts, grad, groups), 6 * R * F)
    yield work(f"experts' columns, rowwise, {R} x {F}", partial(columns_of_experts, grad, groups), 5 * R * F)


def chosen(sizes: list[str], out: Path | None) -> None:
    """Prints a JSON line of each, and appends it to a file: microseconds, and GB/s beside a copy."""
    works = [that_write_fp8(size) for size in sizes] + [that_write_fp8_of_experts()]
    for one in chain.from_iterable(works):
        found = rate(one.call, one.amount)
        copied = rate(one.copy, one.amount)
        line = {
            "name": one.name,
            "us": round(one.amount / found / 1e3, 1),
            "GB_s": round(found),
            "copy_GB_s": round(copied),
        }
        print(json.dumps(line), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", help=f"micro batches of these models, of {', '.join(SIZES)}; none: 8b")
    parser.add_argument("--chosen", action="store_true", help="what a run takes, of what writes fp8")
    parser.add_argument("--out", type=Path, help="a file that every line of --chosen is appended to")
    args = parser.parse_args()
    sizes = args.sizes or ["8b"]
    for size in sizes:
        if size not in SIZES:
            parser.error(f"sizes={size} is none of {', '.join(SIZES)}")
    if args.chosen:
        chosen(sizes, args.out)
        return
    print(torch.cuda.get_device_name())
    moved = 4 * 8192 * 14336
    print(f"{rate(bench.copy_of(moved, torch.device('cuda')), moved):7.0f} GB/s  copy")
    bench.ROUNDS = 5
    bench.SECONDS = 0.02
    for size in sizes:
        M, D, F = SIZES[size]
        heads = HEADS[size]
        for width, rates in ((heads.width, of_rotations(M, heads)), (D, of_norms(M, D)), (F, of_gates(M, F))):
            for name, found in rates:
                print(f"{found:7.0f} GB/s  {M} x {width}  {name}", flush=True)


if __name__ == "__main__":
    main()
