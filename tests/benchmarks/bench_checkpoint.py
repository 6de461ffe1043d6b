"""Speed of saving, verifying and loading a checkpoint: one JSON line, MB/s with 1 MB = 10^6 bytes.

  python tests/benchmarks/bench_checkpoint.py --gb 2 --folder /tmp/bench

In the same run and on the same disk: `raw_write` is one thread that writes the same bytes without checksums and waits
for the disk, `raw_read` one thread that reads them (from memory, as they were just written).
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.examine import worker_threads
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.shard import SavedPiece, as_bytes
from megaspec.checkpoint.store import Store


def tensors(total: int) -> dict[str, torch.Tensor]:
    """fp32 weights of a model's usual sizes, `total` bytes."""
    source = torch.Generator().manual_seed(1)
    block = torch.randint(0, 256, (4096, 4096 * 4), generator=source, dtype=torch.uint8).view(torch.float32)
    found = {f"layers.{i}.weight": block.clone() for i in range(total // (block.numel() * 4))}
    return found | {f"layers.{i}.norm": torch.ones(4096) for i in range(64)}


def seconds(action: Callable[[], object]) -> float:
    """Wall time of a call."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def raw_write(path: Path, saved: dict[str, torch.Tensor]) -> None:
    """Write every tensor one after another and wait for the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for t in saved.values():
        view = as_bytes(t)
        for at in range(0, len(view), 8 << 20):
            os.write(fd, view[at : at + (8 << 20)])
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path) -> None:
    """Read a file into one buffer, over and over."""
    buffer = bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(folder: Path, total: int, rounds: int) -> dict[str, object]:
    """Best of `rounds` of each, in MB/s."""
    comm = SoloComm()
    saved = tensors(total)
    size = sum(t.numel() * t.element_size() for t in saved.values())
    pieces = [SavedPiece(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in saved.items()]
    store = Store(folder)
    times: dict[str, list[float]] = {}

    def load_whole() -> None:
        with Reader(store.folder / "step-00000001") as reader:
            for name in reader.names():
                reader.read(name)

    def load_half_columns() -> None:
        with Reader(store.folder / "step-00000001") as reader:
            for name in reader.names():
                shape = reader.shape(name)
                half = (*shape[:-1], shape[-1] // 2)
                reader.read(name, (0,) * len(shape), half)

    for _ in range(rounds):
        shutil.rmtree(store.folder, ignore_errors=True)
        (folder / "raw").unlink(missing_ok=True)
        os.sync()
        times.setdefault("raw_write", []).append(seconds(lambda: raw_write(folder / "raw", saved)))
        times.setdefault("raw_read", []).append(seconds(lambda: raw_read(folder / "raw")))
        (folder / "raw").unlink()
        os.sync()
        times.setdefault("save", []).append(seconds(lambda: store.save(1, pieces, spec={}, state={}, comm=comm)))
        times.setdefault("verify", []).append(seconds(lambda: store.newest_good(comm).close()))
        times.setdefault("load", []).append(seconds(load_whole))
        times.setdefault("load_half_columns", []).append(seconds(load_half_columns))
    return {"bytes": size} | {f"{k}_MBps": round(size / min(v) / 1e6) for k, v in times.items()}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.folder))
    try:
        found = measure(folder, int(args.gb * 1e9), args.rounds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"bench": "checkpoint", "threads": worker_threads(), "cores": os.cpu_count(), **found}))


if __name__ == "__main__":
    main()
