"""Some layouts of one model, one after the other in one run: a line of bench_train.py for each, the plan's beside it.

    torchrun --nproc_per_node=2 tests/benchmarks/bench_layouts.py --model llama8b --sequences 8 --out layouts.jsonl \\
        dp_strategy=zero1 tp=2 "pp=2 pipeline.schedule=zb_h1"

A layout is what is said of `parallelism`, and `mbs=`, the micro batch; each gets as many micro batches as --sequences
takes. Other options are those of bench_train.py; --patience is for each layout.
"""

import argparse
import copy
import faulthandler
import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks import bench_train


def arguments(layout: str, args: argparse.Namespace, world: int) -> argparse.Namespace:
    """What bench_train.py would be called with."""
    one = copy.deepcopy(args)
    words = dict(word.split("=", 1) for word in layout.split())
    one.mbs = int(words.pop("mbs", args.mbs))
    one.set += [f"parallelism.{key}={value}" for key, value in words.items()]
    one.tp = int(words.get("tp", 1))
    dp = world // (one.tp * int(words.get("pp", 1)) * int(words.get("cp", 1)))
    one.accum, left = divmod(args.sequences, one.mbs * dp)
    if left or not one.accum:
        raise SystemExit(f"{layout}: --sequences {args.sequences} is no multiple of {one.mbs} x {dp}")
    return one


def parser() -> argparse.ArgumentParser:
    parser = bench_train.parser()
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--sequences", type=int, default=8, help="of a step, all ranks together")
    parser.add_argument("--out", default="layouts.jsonl")
    return parser


def main() -> None:
    args = parser().parse_args()
    rank, world, device = bench_train.start()
    for i, (layout, one) in enumerate([(layout, arguments(layout, args, world)) for layout in args.layouts]):
        if args.patience:
            # for each anew
            faulthandler.dump_traceback_later(args.patience, exit=True)
        if i and world > 1:
            bench_train.join_again(device, f"layout {i}")
        found: dict[str, Any] = {"layout": layout}
        found |= bench_train.measure(one, rank=rank, world=world, device=device)
        # `parallelism` has the layout, with what was left to the plan
        found["set"] = args.set
        if rank == 0:
            with Path(args.out).open("a") as out:
                out.write(json.dumps(found) + "\n")
            found["exposed_ms"] = min((r["exposed_ms"] for r in found["ranks"] if "exposed_ms" in r), default=None)
            keys = ("tokens_per_s_gpu", "step_ms", "step_ms_min", "plan_ms", "exposed_ms", "peak_mem_gib", "plan_gib")
            print(layout, *(f"{key} {found.get(key)}" for key in (*keys, "loss_last")), flush=True)
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
