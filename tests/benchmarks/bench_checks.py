"""What looking for bad hardware costs on this device (train.checks): a line of JSON for each setting.

    python tests/benchmarks/bench_checks.py --parameters 1e9                  # one GPU, about 30 s
    torchrun --nproc-per-node 2 tests/benchmarks/bench_checks.py              # with the comparison over NCCL

First checksums alone, over as many bytes as bf16 weights, fp32 master weights and two fp32 moments of `--parameters`
have: seconds, and bytes a second beside a plain copy's, which reads and writes them. Then steps of a model of the
Llama kind on random tokens, without checks and with each of them.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.data.batch import Batch
from megaspec.estimate.target import Target
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.checks import build_checks
from megaspec.runtime.checksums import Checksums, Summed
from megaspec.runtime.step import train_step
from tests.runtime.specs import TARGET, spec

STEPS = 8
WARMUP = 3
CHECKS: dict[str, dict[str, Any]] = {
    "none": {},
    "replicas each step": {"replicas_every": STEPS},
    "replicas, one sum": {"replicas_every": STEPS, "sum_every": STEPS},
    "state 1.0": {"state": 1.0},
    "state 0.01": {"state": 0.01},
    "recompute 1.0": {"recompute": 1.0},
}


def seconds_of(work: Callable[[], object], device: torch.device, *, times: int) -> float:
    """Of one call, after one that is not counted."""
    work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def checksums_alone(parameters: int, device: torch.device) -> dict[str, Any]:
    """Of tensors of 16 Mi elements each."""
    size = 1 << 24
    count = max(1, parameters // size)
    held: dict[str, dict[str, torch.Tensor]] = {}
    for kind, dtype in (
        ("weights", torch.bfloat16),
        ("master", torch.float32),
        ("m", torch.float32),
        ("v", torch.float32),
    ):
        held[kind] = {str(number): torch.randn(size, device=device).to(dtype) for number in range(count)}
    pieces = []
    for kind, tensors in held.items():
        for name in tensors:
            pieces.append(Summed(f"{kind}/{name}", kind, name, (slice(0, size),)))
    sums = Checksums(pieces, lambda: held, device=device)
    n_bytes = sums.bytes_read
    seconds = seconds_of(sums.take, device, times=5)
    copied = torch.empty(size, device=device)
    copy_seconds = seconds_of(lambda: copied.copy_(held["master"]["0"]), device, times=20)
    return {
        "what": "checksums",
        "bytes": n_bytes,
        "seconds": seconds,
        "bytes_per_second": n_bytes / seconds,
        "copy_bytes_per_second": 2 * copied.nbytes / copy_seconds,
    }


def built_on(
    device: torch.device, checks: dict[str, Any], *, rank: int, ranks: int, width: int, layers: int, tokens: int
) -> TrainState:
    changes = {
        "model": {"kind": "decoder", "n_layers": layers, "d_model": width, "n_heads": width // 128, "d_ffn": 3 * width},
        "model.n_kv_heads": width // 256,
        "model.vocab_size": 32000,
        "model.max_seq_len": tokens,
        "data": {"kind": "random", "vocab_size": 32000, "seq_len": tokens},
        "precision.kind": "bf16",
        "parallelism.dp_replicate": ranks,
        "train.global_batch": 4 * ranks,
        "train.micro_batch": 2,
        "train.deterministic": "recompute" in checks,
        "train.checks": checks,
    }
    target = TARGET
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        target = Target(gpus=ranks, gpu=name, sm=90, cores=16, versions={"torch": torch.__version__})
    made = spec({**changes, "kernels.compile": "none"}, target)
    built = build(made, mesh=mesh_of(made, rank=rank, device=device))
    initialise(built)
    return built


def steps_with(name: str, comm: Comm, device: torch.device, *, width: int, layers: int, tokens: int) -> dict[str, Any]:
    """Mean seconds of a step with these checks."""
    checks = dict(CHECKS[name])
    if comm.size == 1:
        checks.pop("replicas_every", None)
        checks.pop("sum_every", None)
    built = built_on(device, checks, rank=comm.rank, ranks=comm.size, width=width, layers=layers, tokens=tokens)
    looker = build_checks(built, comm, step=0)
    scaler = build_scaler(built.spec.precision, device=device)
    draw = torch.Generator().manual_seed(comm.rank)
    drawn = torch.randint(0, 32000, (2, tokens + 1), generator=draw).to(device)
    mask = torch.ones(2, tokens, dtype=torch.bool, device=device)
    ids = torch.arange(2, device=device)
    batch = Batch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), mask, ids)
    taken = 0
    found = []

    def step() -> None:
        nonlocal taken
        taken += 1
        if looker is not None:
            looker.begin(taken)
        result = train_step(built, [batch, batch], lr=1e-4, weight_decay=0.1, scaler=scaler, checks=looker)
        found.append(torch.stack([result.found.changed, result.found.recomputed, result.found.differing]))

    for _ in range(WARMUP):
        step()
    seconds = seconds_of(step, device, times=STEPS)
    return {
        "what": "step",
        "checks": name,
        "ranks": comm.size,
        "parameters": sum(parameter.numel() for parameter in built.parameters.values()),
        "seconds": seconds,
        "found": torch.stack(found).sum().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    comm: Comm = SoloComm()
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        comm = DistComm(device=device)
    lines = [lambda: checksums_alone(int(asked.parameters), device)]
    for name in CHECKS:
        if comm.size > 1 or "replicas" not in name:
            lines.append(
                lambda name=name: steps_with(
                    name, comm, device, width=asked.width, layers=asked.layers, tokens=asked.tokens
                )
            )
    for line in lines:
        found = line()
        if device.type == "cuda":
            found["gpu"] = torch.cuda.get_device_name(device)
            torch.cuda.empty_cache()
        if comm.rank == 0:
            print(json.dumps(found), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
