"""Speed of saving, verifying and loading a checkpoint: one JSON line, MB/s with 1 MB = 10^6 bytes.

  python tests/benchmarks/bench_checkpoint.py --gb 2 --folder /tmp/bench

In the same run and on the same disk: `raw_write` is one thread that writes the same bytes without checksums and waits
for the disk, `raw_read` one thread that reads them (from memory, as they were just written).

  python tests/benchmarks/bench_checkpoint.py --training --parameters 3 --ranks 2 --folder /tmp/bench

Saves beside training: each rank (a GPU each where there are any) holds its share of 12 bytes for each of so many 10^9
parameters and does steps of `--step-ms`, matrix products and then an update that adds 1 to all of the state. Of two
saves with checkpoint.saving=async, both left on the disk, one JSON line says how much longer the steps around them
took, how long their writing took, and what steps took meanwhile; then one save that training waits for (of
`--blocking-gb`), the disk's own rate, and how long `--copy-parameters` take to be copied out and not written. Each
checkpoint must hold its own step in every element: a save that mixed two steps ends the benchmark with an error.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm
from megaspec.checkpoint.examine import worker_threads
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.saver import SPARE_BYTES, AsyncSaver, BlockingSaver, Saved, Saver, Tries
from megaspec.checkpoint.shard import SavedPiece, as_bytes
from megaspec.checkpoint.store import Store
from megaspec.runtime.loop import StepClock


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


BYTES_PER_PARAMETER = 12
"""fp32 weights and two moments."""
TENSOR_ELEMENTS = 1 << 26


class Trained:
    """A state on a device, and steps that change it. `seconds`: of each, by the device's clock."""

    def __init__(self, total: int, *, device: torch.device, step_ms: float):
        self.device = device
        n_tensors = max(1, total // (4 * TENSOR_ELEMENTS))
        elements = total // 4 // n_tensors
        self.state = [torch.zeros(elements, device=device) for _ in range(n_tensors)]
        self.step = 0
        size = 8192 if device.type == "cuda" else 256
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._one = torch.randn(size, size, device=device, dtype=dtype)
        self._products = 1
        self._clock = StepClock(device)
        # as many products as fill a step
        for _ in range(3):
            taken = self.advance(None)
            self._products = max(1, round(self._products * step_ms / 1e3 / taken))

    def advance(self, saver: AsyncSaver | None) -> float:
        """One step. -> its seconds."""
        self._clock.restart()
        for _ in range(self._products):
            torch.mm(self._one, self._one)
        if saver is not None:
            saver.before_update()
        torch._foreach_add_(self.state, 1.0)
        self.step += 1
        return self._clock.lap(self._clock.mark())

    def pieces(self, comm: Comm, share: int = 1) -> list[SavedPiece]:
        """What this rank saves; of a share the first of its tensors."""
        found = []
        for number, tensor in enumerate(self.state[: max(1, len(self.state) // share)]):
            elements = tensor.numel()
            shape = (comm.size * elements,)
            found.append(SavedPiece(f"model/{number}", shape, (comm.rank * elements,), tensor))
        return found


def of_rank(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """What each rank does; rank 0 prints the line."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    comm: Comm = SoloComm()
    if is_cuda:
        torch.cuda.set_device(device)
    if args.ranks > 1:
        meeting = dist.FileStore(str(folder / "meeting"), args.ranks)
        backend = "nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=args.ranks)
        comm = DistComm(device=device)
    found = measure_training(args, folder, comm, device)
    if rank == 0:
        print(json.dumps({"bench": "checkpoint beside training", **found}), flush=True)
    if args.ranks > 1:
        dist.destroy_process_group()


def measure_training(args: argparse.Namespace, folder: Path, comm: Comm, device: torch.device) -> dict[str, object]:
    """Of this rank; see the top."""
    total = int(args.parameters * 1e9) * BYTES_PER_PARAMETER
    trained = Trained(total // comm.size, device=device, step_ms=args.step_ms)
    store = Store(folder)
    saver = AsyncSaver(Tries(store, retries=0), comm, device=device)
    pieces = trained.pieces(comm)
    size = comm.size * sum(piece.tensor.numel() * 4 for piece in pieces)
    prepare_seconds = seconds(lambda: saver.prepare(pieces))
    quiet = statistics.median(trained.advance(saver) for _ in range(8))

    saves = []
    for _ in range(2):
        saves.append(one_save(trained, saver, comm, quiet))
    for step in store.steps():
        assert_one_step(store, step, pieces)

    # what training waits for, of fewer bytes where the disk or the time is short
    share = max(1, round(size / (args.blocking_gb * 1e9)))
    some = trained.pieces(comm, share)
    some_bytes = comm.size * sum(piece.tensor.numel() * 4 for piece in some)
    blocking = BlockingSaver(Tries(Store(folder / "blocking"), retries=0), comm)
    blocking_seconds = seconds(lambda: save_with(blocking, trained, comm, some))

    raw_bytes = min(4 << 30, size // comm.size)
    one = trained.state[0].cpu()
    copies = max(1, raw_bytes // (4 * one.numel()))
    raw = seconds(lambda: raw_write(folder / f"raw-{comm.rank}", dict(enumerate([one] * copies))))
    (folder / f"raw-{comm.rank}").unlink()
    copy_bytes = int(args.copy_parameters * 1e9) * BYTES_PER_PARAMETER // comm.size
    copy_seconds = copy_out(saver, trained, copy_bytes)
    saver.close()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": comm.size,
        "parameters": args.parameters,
        "bytes": size,
        "prepare_seconds": round(prepare_seconds, 2),
        "quiet_step_ms": round(quiet * 1e3, 1),
        "saves": saves,
        "blocking_bytes": some_bytes,
        "blocking_seconds": round(blocking_seconds, 2),
        "blocking_MBps": round(some_bytes / blocking_seconds / 1e6),
        "disk_MBps_of_each_rank_at_once": round(copies * 4 * one.numel() / raw / 1e6),
        "copy_out_bytes_of_each_rank": copy_bytes,
        "copy_out_seconds": round(copy_seconds, 2),
        "cores": os.cpu_count(),
    }


def save_with(saver: Saver, trained: Trained, comm: Comm, pieces: list[SavedPiece]) -> list[Saved]:
    """Begins to save the state as it is."""
    return saver.save(trained.step, pieces, spec={}, state={"step": trained.step}, is_steady=lambda piece: True)


def one_save(trained: Trained, saver: AsyncSaver, comm: Comm, quiet: float) -> dict[str, object]:
    """One save with steps around it. Stalls are of this rank, the rest is of all."""
    begun = time.perf_counter()
    earlier = save_with(saver, trained, comm, trained.pieces(comm))
    assert not earlier, "the save before was still under way"
    call = time.perf_counter() - begun
    steps = []
    saved: list[Saved] = []
    while not saved:
        # each rank's word goes with a step, as the training loop's does
        words = comm.gather(saver.word())
        steps.append(trained.advance(saver))
        if sum(words) >= comm.size:
            saved = saver.settle()
    writing = saved[0].seconds
    meanwhile = statistics.median(steps[2:]) if len(steps) > 2 else steps[-1]
    # the step whose update waits for the copies
    stall = call + max(0.0, max(steps[:2]) - quiet)
    return {
        "call_seconds": round(call, 3),
        "stall_seconds": round(stall, 3),
        "seconds": round(writing, 2),
        "steps": len(steps),
        "step_ms_meanwhile": round(meanwhile * 1e3, 1),
        "longest_step_ms": round(max(steps) * 1e3, 1),
        "MBps": round(comm.size * 4 * sum(one.numel() for one in trained.state) / writing / 1e6),
    }


def assert_one_step(store: Store, step: int, pieces: list[SavedPiece]) -> None:
    """Some of each tensor, from all over this rank's share, is of the step that the checkpoint is of."""
    with Reader(store.folder / f"step-{step:08d}") as reader:
        for piece in pieces:
            count = min(1 << 16, piece.tensor.numel())
            for start in (piece.start[0], piece.start[0] + piece.tensor.numel() - count):
                held = reader.read(piece.name, (start,), (count,))
                assert bool((held == float(step)).all()), f"{piece.name} of step {step} holds other steps"


def copy_out(saver: AsyncSaver, trained: Trained, n_bytes: int) -> float:
    """Seconds to copy so many bytes into the shared memory, over and over the same; nothing is written."""
    buffer = saver._buffer
    assert buffer is not None, "nothing was prepared"
    source = trained.state[0]
    one = source.numel() * 4
    places = max(1, (buffer.n_bytes - SPARE_BYTES) // one)
    begun = time.perf_counter()
    for number in range(max(1, n_bytes // one)):
        buffer.part(number % places * one, source).copy_(source, non_blocking=True)
    if trained.device.type == "cuda":
        torch.cuda.synchronize(trained.device)
    return time.perf_counter() - begun


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--training", action="store_true", help="saves beside training instead")
    parser.add_argument("--parameters", type=float, default=3.0, help="of the model, in 10^9")
    parser.add_argument("--copy-parameters", type=float, default=8.0, help="copied out and not written, in 10^9")
    parser.add_argument("--blocking-gb", type=float, default=8.0, help="saved while training waits, in 10^9 bytes")
    parser.add_argument("--step-ms", type=float, default=400.0)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.folder))
    try:
        if args.training:
            if args.ranks == 1:
                of_rank(0, args, folder)
            else:
                torch.multiprocessing.spawn(of_rank, (args, folder), nprocs=args.ranks)
            return
        found = measure(folder, int(args.gb * 1e9), args.rounds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps({"bench": "checkpoint", "threads": worker_threads(), "cores": os.cpu_count(), **found}))


if __name__ == "__main__":
    main()
