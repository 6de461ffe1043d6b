"""`megaspec bench ceilings`: measures what the GPUs at hand reach, for `plan ceilings=FILE` and `tune`."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaspec.core.errors import RecipeError, WriteError
from megaspec.data.files import write_text
from megaspec.estimate.ceilings import Ceilings, CeilingTable
from megaspec.estimate.hardware import HARDWARE, Hardware, hardware_of
from megaspec.estimate.target import Target, detect_target
from megaspec_launchers.environment import RankPlace, rank_from_environment

_CEILINGS = """Measure matrix products, attention, element-wise work and the host's share of a step, in about a minute,
and write them to a file that plan and tune read: megaspec plan recipe=NAME ceilings=FILE

On several GPUs, their collectives too: torchrun --nproc-per-node 4 -m megaspec.cli bench ceilings"""


def add_parser(commands: Any) -> None:
    """Register `bench ceilings`."""
    ceilings = commands.add_parser(
        "ceilings",
        help="times of the pieces of a training step",
        description=_CEILINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ceilings.add_argument("--out", metavar="FILE", help="where to write (default: ceilings-NAME.json, the GPU's name)")


def run(args: argparse.Namespace) -> int:
    """Measure and write; 0 when it is done. Raises RecipeError without a GPU that is known, and WriteError."""
    target = detect_target()
    hardware = _hardware(target)
    place = rank_from_environment(os.environ)
    out = Path(args.out or f"ceilings-{hardware.name.lower()}.json")
    _check_writable(out)

    from megaspec.verify.measured_throughput import measure, table_text

    is_first = place is None or place.rank == 0
    with _world(place) as device:
        table = measure(hardware, device=device, target=target, tell=_tell if is_first else _silent)
    if is_first:
        write_text(out, table_text(table))
        for line in summary(table):
            print(line)
        print(f"written: {out}")
    return 0


def summary(table: CeilingTable) -> Iterator[str]:
    """What was reached at usual sizes, a line each."""
    hardware = HARDWARE[table.hardware]
    ceilings = Ceilings(table, hardware)
    m, n, k = 8192, 8192, 4096
    for name in table.products:
        kinds = ("forward", "dgrad", "wgrad")
        rates = [2 * m * n * k / ceilings.matmul_seconds(m, n, k, precision=name, kind=kind) for kind in kinds]
        shares = ", ".join(f"{rate / 1e12:,.0f}" for rate in rates)
        share = sum(rates) / 3 / hardware.peak[name]
        yield f"{name} products [{m} x {n} x {k}], forward, gradients: {shares} TFLOP/s, {share:.0%} of the peak"
    for head_size in (64, 128):
        rates = []
        for direction, factor in (("forward", 2), ("backward", 5)):
            seconds = ceilings.attention_seconds(
                tokens=8192, seq_len=8192, heads=32, kv_heads=8, head_size=head_size, direction=direction
            )
            rates.append(f"{factor * 8192**2 * 32 * head_size / seconds / 1e12:,.0f}")
        yield f"attention, heads of {head_size}, 8192 tokens, forward, backward: {', '.join(rates)} TFLOP/s"
    copied, updated = (2**30 / seconds(2**30) / 1e12 for seconds in (ceilings.memory_seconds, ceilings.update_seconds))
    yield f"element-wise: {copied:.2f} TB/s, an optimizer's update: {updated:.2f} TB/s"
    for one in table.collectives:
        yield f"{one.kind} over {one.ranks} GPUs, 256 MiB: {2**28 / one.curve.at(2**28) / 1e9:,.0f} GB/s"
    yield f"host: {table.launch_seconds * 1e3:.2f} ms a step, {table.layer_seconds * 1e3:.2f} ms a layer"


def _hardware(target: Target) -> Hardware:
    if target.device != "cuda":
        what = "no GPU here" if not target.gpus else f"torch {target.versions.get('torch')} can't use the GPUs here"
        raise RecipeError(
            f"bench ceilings: {what}; run it where there are GPUs. megaspec plan hardware=NAME needs no measurement"
        )
    hardware = hardware_of(target)
    if hardware is None:
        raise RecipeError(f"bench ceilings: {target.gpu} is not in the hardware table, which has {', '.join(HARDWARE)}")
    return hardware


def _check_writable(out: Path) -> None:
    """Before a minute is spent on measuring."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
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
