"""An entry whose ranks need each other: a gloo world that sums in a loop."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaspec.core.errors import HangError
from megaspec.launcher.rendezvous import FileRendezvous


def join(rank: int, world_size: int, store: FileRendezvous, timeout_seconds: float) -> None:
    """Makes the world."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store.path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def sums(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    attempt: int,
    store: FileRendezvous,
    timeout_seconds: float,
    deaths: list[int],
    **_: Any,
) -> int:
    """Sums twenty times over all ranks; in attempt n, rank deaths[n] kills itself half-way."""
    join(rank, world_size, store, timeout_seconds)
    total = torch.ones(1)
    for step in range(20):
        if step == 10 and attempt < len(deaths) and rank == deaths[attempt]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise HangError(f"step {step}: {error}") from None
        total /= world_size
    Path(run_dir, f"sum-{rank}").write_text(f"{attempt} {float(total)}")
    dist.destroy_process_group()
    return 0


def meets(run_dir: str, *, rank: int, world_size: int, store: FileRendezvous, timeout_seconds: float, **_: Any) -> int:
    """Sums once, and stays until somebody has looked: the file `seen`."""
    join(rank, world_size, store, timeout_seconds)
    dist.all_reduce(torch.ones(1))
    Path(run_dir, f"met-{rank}").touch()
    end = time.monotonic() + 60
    while not Path(run_dir, "seen").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return 0


def stuck(
    run_dir: str, *, rank: int, world_size: int, store: FileRendezvous, timeout_seconds: float, culprit: int, **_: Any
) -> int:
    """One rank does not come to a sum, for a call that does not come back; the others wait there."""
    join(rank, world_size, store, timeout_seconds)
    total = torch.ones(1)
    dist.all_reduce(total)
    Path(run_dir, f"up-{rank}").touch()
    if rank == culprit:
        time.sleep(60)
    dist.all_reduce(total)
    return 0
