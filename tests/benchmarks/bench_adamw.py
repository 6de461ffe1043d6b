"""The Triton kernel of AdamW with blocks, parts of programs and warps of all sizes, beside torch's: which to take.

    python tests/benchmarks/bench_adamw.py    # one GPU, a minute; a line of JSON each, the fastest last

Weights in bf16 with masters and moments in fp32, shapes of a 1B model's layers and its table; milliseconds of a step
and bytes that one pass has to move, 30 for each weight. See kernels/megaspec_kernels/adamw/triton.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from megaspec_kernels.adamw import triton
from megaspec_kernels.adamw.bench import WIDE, State, torch_adamw, torch_and_copy

BLOCKS = (1024, 2048, 4096)
PARTS = (1, 2, 4, 16)
WARPS = (4, 8)
# A table, and layers of query, key and value, output, gate and up, down, two norms.
TABLE = (128_256, 2048)
LAYER = ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (2048,), (2048,))


def milliseconds(call: Callable[[], object], *, times: int) -> float:
    """The median of so many, behind three that nobody measures."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in spans)[times // 2]


def tell(what: str, spent: float, elements: int) -> dict[str, object]:
    line = {"what": what, "ms": round(spent, 3), "gb_per_s": round(30 * elements / spent / 1e6)}
    print(json.dumps(line), flush=True)
    return line


def values_of(shapes: Sequence[tuple[int, ...]], scale: float) -> list[Tensor]:
    return [scale * torch.randn(shape, device="cuda") for shape in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=10)
    arguments = parser.parse_args()
    shapes = (TABLE, *(LAYER * arguments.layers))
    gradients = values_of(shapes, 0.01)
    elements = sum(one.numel() for one in gradients)

    weights = [one.requires_grad_() for one in values_of(shapes, 0.02)]
    optimizer = torch_adamw(weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    call = torch_and_copy(optimizer, weights)
    tell("torch, fused, and a copy", milliseconds(call, times=arguments.times), elements)
    del weights, optimizer, call

    state = State(values_of(shapes, 0.02), WIDE, torch.float32, weights=torch.bfloat16)
    lines = []
    for block, parts, warps in product(BLOCKS, PARTS, WARPS):
        triton.BLOCK = block
        triton.CHUNK = parts * block
        triton.WARPS = warps
        spent = milliseconds(lambda: state.update(triton.adamw_, gradients), times=arguments.times)
        lines.append(tell(f"triton BLOCK={block} CHUNK={parts}*BLOCK WARPS={warps}", spent, elements))
    print(json.dumps({"fastest": min(lines, key=lambda line: line["ms"])}))


if __name__ == "__main__":
    main()
