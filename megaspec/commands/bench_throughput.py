"""`megaspec bench throughput`: measures what the GPUs at hand reach, for `plan throughput=FILE` and `tune`."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from megaspec.commands.paragraphs import Paragraphs
from megaspec.core.errors import RecipeError, WriteError
from megaspec.data.files import write_text
from megaspec.estimate.hardware import HARDWARE, Hardware, hardware_of
from megaspec.estimate.target import Target, detect_target
from megaspec.estimate.throughput import MeasuredThroughput, ThroughputTable, read_throughput
from megaspec_launchers.environment import RankPlace, rank_from_environment

_THROUGHPUT = """Measure matrix products, attention through every implementation that is installed, element-wise work
and the host's share of a step, in a few minutes, and write them to a file that plan and tune read:
megaspec plan recipe=NAME throughput=FILE

On several GPUs, their collectives too: torchrun --nproc-per-node 4 -m megaspec.cli bench throughput"""


def add_parser(commands: Any) -> None:
    """Register `bench throughput`."""
    throughput = commands.add_parser(
        "throughput",
        help="times of the pieces of a training step",
        description=_THROUGHPUT,
        formatter_class=Paragraphs,
    )
    throughput.add_argument(
        "--out", metavar="FILE", help="where to write (default: throughput-NAME.json, the GPU's name)"
    )
    throughput.add_argument(
        "--only",
        choices=("attention",),
        help="measure every implementation of attention alone, and put it into --out, a table that is there: all else "
        "in it stays",
    )
    throughput.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="with --only: begin with no further implementation once so many seconds have gone",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write; 0 when it is done. Raises RecipeError without a GPU that is known, and WriteError."""
    target = detect_target()
    hardware = _hardware(target)
    place = rank_from_environment(os.environ)
    out = Path(args.out or f"throughput-{hardware.name.lower()}.json")
    _check_writable(out)
    before = _table_before(args, out, hardware, place)

    from megaspec.verify.measured_throughput import measure, table_text, with_attention

    is_first = place is None or place.rank == 0
    with _world(place) as device:
        if before is None:
            table = measure(hardware, device=device, target=target, tell=_tell if is_first else _silent)
        else:
            table = with_attention(before, device=device, target=target, tell=_tell, seconds=args.seconds)
    if is_first:
        write_text(out, table_text(table))
        for line in summary(table):
            print(line)
        print(f"written: {out}")
    return 0


def _table_before(
    args: argparse.Namespace, out: Path, hardware: Hardware, place: RankPlace | None
) -> ThroughputTable | None:
    """With --only, the table that it goes into. Raises RecipeError where there is none of this kind of GPU."""
    if args.only is None:
        if args.seconds is not None:
            raise RecipeError(f"--seconds {args.seconds:g} goes with --only attention; all of it takes a few minutes")
        return None
    if args.seconds is not None and not 0 < args.seconds < inf:
        raise RecipeError(f"--seconds {args.seconds:g} must be above 0; try 60")
    if place is not None and place.world_size > 1:
        text = f"--only {args.only} measures one GPU, there are {place.world_size} ranks; start it without torchrun"
        raise RecipeError(text)
    if args.out is None:
        raise RecipeError(f"--only {args.only} needs --out FILE, the table that it goes into; leave it out for all")
    table = read_throughput(out).table
    if table.hardware != hardware.name:
        text = f"--out {out} is of hardware={table.hardware}, this GPU is {hardware.name}; name a table of its own"
        raise RecipeError(text)
    return table


def summary(table: ThroughputTable) -> Iterator[str]:
    """What was reached at usual sizes, a line each."""
    hardware = HARDWARE[table.hardware]
    throughput = MeasuredThroughput(table, hardware)
    m, n, k = 8192, 8192, 4096
    for name in table.products:
        # FLOP/s of [m x k] · [k x n] and of the two products of its backward, each of 2 m n k FLOPs
        rates = []
        for kind in ("forward", "dgrad", "wgrad"):
            seconds = throughput.matmul_seconds(m, n, k, precision=name, kind=kind)
            rates.append(2 * m * n * k / seconds)
        in_words = ", ".join(f"{rate / 1e12:,.0f}" for rate in rates)
        share = sum(rates) / 3 / hardware.peak[name]
        yield f"{name} products [{m} x {n} x {k}], forward, gradients: {in_words} TFLOP/s, {share:.0%} of the peak"
    tokens = 8192
    heads = 32
    for head_size in (64, 128):
        tflops = []
        # a causal product over one sequence: tokens² · heads · head size FLOPs; two of them forward, five backward
        for direction, n_products in (("forward", 2), ("backward", 5)):
            seconds = throughput.attention_seconds(
                tokens=tokens, seq_len=tokens, heads=heads, kv_heads=8, head_size=head_size, direction=direction
            )
            tflops.append(f"{n_products * tokens**2 * heads * head_size / seconds / 1e12:,.0f}")
        yield f"attention, heads of {head_size}, {tokens} tokens, forward, backward: {', '.join(tflops)} TFLOP/s"
    yield from _attention_rates(table)
    copied = 2**30 / throughput.memory_seconds(2**30) / 1e12
    updated = 2**30 / throughput.update_seconds(2**30) / 1e12
    yield f"element-wise: {copied:.2f} TB/s, an optimizer's update: {updated:.2f} TB/s"
    for one in table.collectives:
        yield f"{one.kind} over {one.ranks} GPUs, 256 MiB: {2**28 / one.curve.at(2**28) / 1e9:,.0f} GB/s"
    yield f"host: {table.launch_seconds * 1e3:.2f} ms a step, {table.layer_seconds * 1e3:.2f} ms a layer"


def _attention_rates(table: ThroughputTable) -> Iterator[str]:
    """Milliseconds of every implementation, a line for each use."""
    by_use: dict[str, list[str]] = {}
    for one in table.attention_rates:
        use = one.kind if one.kind == "causal" else f"{one.kind} of {one.seen}"
        in_ms = f"{one.implementation} {one.seconds * 1e3:.2f}"
        order = ", sums in one order" if one.deterministic else ""
        by_use.setdefault(f"heads of {one.head_size}, {one.tokens} tokens, {use}{order}", []).append(in_ms)
    for use, times in by_use.items():
        yield f"a layer's attention, forward and backward, {use}: {', '.join(times)} ms"


def _hardware(target: Target) -> Hardware:
    if target.device != "cuda":
        what = "no GPU here"
        if target.gpus:
            what = f"torch {target.versions.get('torch')} can't use the GPUs here"
        raise RecipeError(
            f"bench throughput: {what}; run it where there are GPUs. megaspec plan hardware=NAME needs no measurement"
        )
    hardware = hardware_of(target)
    if hardware is None:
        raise RecipeError(
            f"bench throughput: {target.gpu} is not in the hardware table, which has {', '.join(HARDWARE)}"
        )
    return hardware


def _check_writable(out: Path) -> None:
    """Before a minute is spent on measuring."""
    folder = out.parent
    # a file that is there is written over, a new one needs its folder
    written = out if out.exists() else folder
    if out.is_dir() or not folder.is_dir() or not os.access(written, os.W_OK):
        raise WriteError(f"{out} can't be written; name another file with --out")


@contextmanager
def _world(place: RankPlace | None) -> Iterator[Any]:
    """This rank's device, and the process group of ranks that torchrun has started."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0 if place is None else place.local_rank)
    torch.cuda.set_device(device)
    if place is None or place.world_size == 1:
        yield device
        return
    dist.init_process_group("nccl", device_id=device)
    yield device
    dist.destroy_process_group()


def _tell(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def _silent(what: str) -> None:
    pass
