"""One rank of a run: from its number and a run folder to an exit code."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm, on_first
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.store import Store
from megaspec.core.errors import HangError, MegaspecError
from megaspec.log.events import Event, RunEnded, RunStarted
from megaspec.log.sinks import open_sinks
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.build import build
from megaspec.runtime.loop import Run, StopRequest
from megaspec.spec import Spec


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int = 0,
    store: str | None = None,
    lock_token: int | None = None,
) -> int:
    """Trains the run whose spec.json is in `run_dir`. -> exit code (DESIGN.md 10).

    `store`: path of a file for the ranks to meet in; None reads MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    `lock_token`: the fencing token of the launcher that holds the run's lock; None takes the lock here, on rank 0.
    """
    stop = StopRequest()
    signal.signal(signal.SIGTERM, stop.ask)
    signal.signal(signal.SIGINT, stop.ask)
    try:
        spec = read_spec(Path(run_dir))
        run_rank(spec, Path(run_dir), stop, rank, world_size, local_rank, attempt, store, lock_token)
        return 0
    except MegaspecError as error:
        print(f"rank {rank}: {error}" if world_size > 1 else str(error), file=sys.stderr, flush=True)
        return error.exit_code
    except dist.DistError as error:
        print(f"rank {rank}: a collective failed: {error}", file=sys.stderr, flush=True)
        return HangError.exit_code
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors when a peer is gone or late
        if not is_collective_failure(error):
            raise
        traceback.print_exc()
        print(f"rank {rank}: a collective failed, another rank is gone or late", file=sys.stderr, flush=True)
        return HangError.exit_code


def is_collective_failure(error: RuntimeError) -> bool:
    """Whether an error comes from gloo's transport."""
    text = str(error)
    marks = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo", "Broken pipe")
    return any(mark in text for mark in marks)


def read_spec(run_dir: Path) -> Spec:
    """The Spec that every rank builds."""
    return Spec.model_validate_json((run_dir / "spec.json").read_text())


def run_rank(
    spec: Spec,
    run_dir: Path,
    stop: StopRequest,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: str | None,
    lock_token: int | None,
) -> None:
    """Sets up devices, groups, lock and sinks, and trains."""
    device = pick_device(spec, local_rank)
    with ExitStack() as stack:
        if world_size > 1:
            join_world(spec, rank=rank, world_size=world_size, attempt=attempt, store=store, device=device)
            stack.callback(leave_world)
        comm: Comm = DistComm(device=device) if world_size > 1 else SoloComm()
        lock = take_lock(run_dir, comm, lock_token, stack)
        degrees = {"dp_replicate": spec.parallelism.dp_replicate, "tp": spec.parallelism.tp}
        mesh = Mesh(degrees, rank=rank, device=device)
        built = build(spec, mesh=mesh)
        checkpoints = Store(run_dir, lock=lock)
        run = Run(built, run_dir, checkpoints, comm, stop, emit=lambda event: None)
        run.start()
        sinks = open_sinks(spec, run_dir, step=run.step) if rank == 0 else []
        run.emit = sender(sinks)
        run.emit(RunStarted(step=run.step, steps=spec.train.steps, attempt=attempt))
        ended = "failed"
        try:
            run.train()
            ended = "done"
        except MegaspecError as error:
            ended = f"exit {error.exit_code}"
            raise
        finally:
            run.emit(RunEnded(step=run.step, how=ended))
            for sink in sinks:
                sink.close()


def sender(sinks: list) -> Callable[[Event], None]:
    """Hands an event to every sink."""

    def send(event: Event) -> None:
        for sink in sinks:
            sink.handle(event)

    return send


def pick_device(spec: Spec, local_rank: int) -> torch.device:
    """This rank's device, made current."""
    if spec.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def join_world(
    spec: Spec, *, rank: int, world_size: int, attempt: int, store: str | None, device: torch.device
) -> None:
    """Makes the default process group; keys are prefixed with the attempt, so that none reads an earlier one's."""
    timeout = timedelta(seconds=spec.launcher.timeout_seconds)
    if store is None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        meeting = dist.TCPStore(address, port, world_size, is_master=rank == 0 and not agent, timeout=timeout)
    else:
        meeting = dist.FileStore(store, world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"megaspec/{attempt}", meeting),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def leave_world() -> None:
    """Ends the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()


def take_lock(run_dir: Path, comm: Comm, token: int | None, stack: ExitStack) -> RunLock | None:
    """The run's lock on rank 0, the launcher's where it holds one; None on the other ranks."""
    if token is not None:
        return RunLock.held(run_dir, token) if comm.rank == 0 else None
    lock = RunLock(run_dir) if comm.rank == 0 else None

    def acquire() -> int:
        if lock is not None:
            stack.enter_context(lock)
        return 0

    on_first(comm, acquire)
    return lock


def main_under_torchrun(run_dir: str) -> int:
    """A rank that torchrun started."""
    return main(
        run_dir,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
