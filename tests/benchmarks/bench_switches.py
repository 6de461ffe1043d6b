"""What each overlap and each offload is worth, in one run: step time, exposed messages and peak memory, on and off.

    torchrun --nproc_per_node=4 tests/benchmarks/bench_switches.py --out switches.jsonl

Each pair is measured on and off, --rounds times; a JSON line a measurement. Exposed are messages beside which a rank
computes nothing; the rank with the fewest is told, since the others also wait for that one.
"""

import argparse
import faulthandler
import gc
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspec.profiling.exposed import profiled
from megaspec.runtime.build import mesh_of
from tests.benchmarks import bench_train


@dataclass(frozen=True)
class Switch:
    """A layout, of which one setting is `on` or `off`. `{n}` stands for the number of ranks."""

    path: str
    layout: str
    shape: str
    on: Any = True
    off: Any = False


DENSE = "--model llama8b8 --mbs 1"
EXPERTS = "--model qwen3moe4 --seq 4096 --mbs 4 --set model.moe.d_shared=768"
SWITCHES = [
    Switch("parallelism.overlap.grad_reduce", "dp_strategy=zero1", f"{DENSE} --accum 2"),
    Switch("parallelism.overlap.param_gather", "dp_strategy=zero1", f"{DENSE} --accum 2"),
    Switch("parallelism.overlap.grad_reduce", "dp_strategy=fsdp", f"{DENSE} --accum 2"),
    Switch("parallelism.overlap.param_gather", "dp_strategy=fsdp", f"{DENSE} --accum 2"),
    Switch("parallelism.overlap.tp", "tp={n}", DENSE),
    Switch("parallelism.overlap.p2p", "pp={n}", f"{DENSE} --accum 8"),
    Switch(
        "parallelism.overlap.p2p",
        "pp={n} pipeline.schedule=interleaved pipeline.virtual_stages=2",
        f"{DENSE} --accum 8",
    ),
    Switch("parallelism.overlap.shared_experts", "ep={n} dp_strategy=zero1 dispatch=all_to_all", EXPERTS),
    Switch("parallelism.overlap.shared_experts", "ep={n} dp_strategy=zero1 dispatch=all_gather", EXPERTS),
    Switch("parallelism.offload.layers", "dp_strategy=zero1", DENSE, on=8, off=0),
    Switch("parallelism.offload.optimizer", "dp_strategy=zero1", DENSE, on=0.5, off=0.0),
]


def arguments(switch: Switch, value: Any, world: int) -> list[str]:
    """What bench_train.py would be called with."""
    settings = [f"parallelism.{word}" for word in switch.layout.format(n=world).split()]
    settings.append(f"{switch.path}={json.dumps(value)}")
    return [*switch.shape.split(), *(word for setting in settings for word in ("--set", setting))]


def measure(switch: Switch, value: Any, more: argparse.Namespace, *, rank: int, world: int, device: Any) -> None:
    """Builds, trains and prints one side of a switch."""
    args = bench_train.parser().parse_args([*arguments(switch, value, world), *more.words])
    spec = bench_train.spec_of(args, world)
    step = bench_train.stepper(args, spec, mesh_of(spec, rank=rank, device=device))
    bench_train.timed(step, range(more.warmup))
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, losses = bench_train.timed(step, range(more.steps))
    mine: dict[str, float] = {"peak": torch.cuda.max_memory_allocated() if cuda else 0}
    if cuda:
        mine |= profiled(step)
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        found = {
            "switch": switch.path, "value": value, "layout": switch.layout.format(n=world), "model": args.model,
            "seq": args.seq, "mbs": args.mbs, "accum": args.accum, "gpus": world, "torch": torch.__version__,
            "step_ms": round(statistics.median(times) * 1e3, 2), "step_ms_min": round(min(times) * 1e3, 2),
            "exposed_ms": min((r["exposed_ms"] for r in ranks if "exposed_ms" in r), default=None),
            "peak_mem_gib": round(max(r["peak"] for r in ranks) / 2**30, 2), "loss_last": losses[-1], "ranks": ranks,
        }  # fmt: skip
        with Path(more.out).open("a") as out:
            out.write(json.dumps(found) + "\n")
        keys = ("layout", "switch", "value", "step_ms", "exposed_ms", "peak_mem_gib")
        print(" | ".join(f"{found[key]}" for key in keys), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="switches.jsonl")
    parser.add_argument("--only", default="", help="of the switches, those that contain this")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--patience", type=float, default=0, help="seconds until a run that hangs says where, and ends")
    more, more.words = parser.parse_known_args()
    if more.patience:
        faulthandler.dump_traceback_later(more.patience, exit=True)
    rank, world, device = bench_train.start()
    for switch in SWITCHES:
        if more.only in f"{switch.path} {switch.layout}":
            for value in (switch.on, switch.off) * more.rounds:
                measure(switch, value, more, rank=rank, world=world, device=device)
                gc.collect()
                torch._dynamo.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
