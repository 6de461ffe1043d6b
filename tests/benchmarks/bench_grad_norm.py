"""The Triton kernel of gradients' norms with blocks, parts of programs and warps of all sizes, beside torch's: which to
take.

    python tests/benchmarks/bench_grad_norm.py    # one GPU, a minute; a line of JSON each, the fastest last

Gradients in fp32, shapes of a 1B model's layers and its table, in buckets of about 100 MB. `ms`: of all norms on the
GPU, from a graph; `host_ms`: what the host takes to start them; `of_copy`: bytes a second as a share of a copy's. See
kernels/megaspec_kernels/grad_norm/triton.py.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from time import perf_counter

import torch
from torch import Tensor

from megaspec_kernels.bench import on_device
from megaspec_kernels.grad_norm import reference, triton
from tests.benchmarks.bench_adamw import LAYER, TABLE, milliseconds

BLOCKS = (2048, 4096, 8192)
PARTS = (1, 2, 4, 8)
WARPS = (4, 8, 16)


def buckets_of(layers: int) -> list[list[Tensor]]:
    """A table, and half a layer each, as data parallelism cuts them."""
    shapes: list[Sequence[tuple[int, ...]]] = [(TABLE,)]
    for _ in range(layers):
        shapes += [LAYER[:2], LAYER[2:]]
    return [[0.01 * torch.randn(shape, device="cuda") for shape in bucket] for bucket in shapes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--times", type=int, default=10)
    arguments = parser.parse_args()
    buckets = buckets_of(arguments.layers)
    read = 4 * sum(one.numel() for bucket in buckets for one in bucket)
    source = buckets[0][0]
    into = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: into.copy_(source), times=arguments.times) / 1e6

    def tell(what: str, kernel: Callable[[Sequence[Tensor]], list[Tensor]]) -> dict[str, object]:
        def norms() -> list[list[Tensor]]:
            return [kernel(bucket) for bucket in buckets]

        norms()
        torch.cuda.synchronize()
        start = perf_counter()
        norms()
        host = (perf_counter() - start) * 1e3
        spent = milliseconds(on_device(norms), times=arguments.times)
        rate = read / spent / 1e6
        line: dict[str, object] = {"what": what, "ms": round(spent, 3), "host_ms": round(host, 3)}
        line |= {"gb_per_s": round(rate), "of_copy": round(rate / copied, 3)}
        print(json.dumps(line), flush=True)
        return line

    tell("torch", reference.grad_norm)
    lines = []
    for block, parts, warps in product(BLOCKS, PARTS, WARPS):
        triton.BLOCK = block
        triton.CHUNK = parts * block
        triton.WARPS = warps
        lines.append(tell(f"triton BLOCK={block} CHUNK={parts}*BLOCK WARPS={warps}", triton.grad_norm))
    print(json.dumps({"fastest": min(lines, key=lambda line: line["ms"])}))


if __name__ == "__main__":
    main()
