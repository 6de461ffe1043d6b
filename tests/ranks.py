"""Rank processes for tests: forked from a server that has torch loaded, used for many cases, thrown away when one dies.

A task is a function of a module, `task(rank, *arguments, **more)`. It runs on ranks 0..n-1 inside a fresh world of n
ranks (no process group at all for one rank) and returns plain data: numbers, strings, lists, dictionaries, arrays.
"""

import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from time import monotonic
from typing import Any

from tests.source_patch import PROJECT, Patch, forget_project, install

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "pydantic", "safetensors.torch", "pytest"]
# What takes most of a rank's first second otherwise; nothing of it has run when a rank is forked.
PRELOAD += ["tokenizers", "megaspec.spec", "megaspec.verify.parity", "megaspec.checkpoint.store"]
PRELOAD += ["megaspec.cli", "megaspec.commands.starting", "megaspec.runtime.rank"]
COMPILER = "torch._inductor.compile_fx"
"""Four seconds of each rank that compiles something."""

NOT_CONNECTED = "Gloo connectFullMesh failed"
"""What gloo says when the ranks of a new world could not reach each other."""


class RankDied(AssertionError):
    """A rank left before its task was done; the text holds what it printed."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    log: Path


def forks() -> ForkServerContext:
    """Makes processes that have PRELOAD loaded, and none of this process's threads. A process has one such server, so
    that all tests have to ask for the same."""
    from megaspec.estimate.target import gpu_identifiers

    context = multiprocessing.get_context("forkserver")
    # where there is a GPU, importing the compiler opens its driver, which no fork can then use
    context.set_forkserver_preload(PRELOAD if gpu_identifiers() else [*PRELOAD, COMPILER])
    return context


class RankPool:
    """Rank processes that live until `close`. `patches` change the source of the project before any of it runs."""

    def __init__(self, *, patches: tuple[Patch, ...] = (), timeout: float = 120.0, device: str = "cpu"):
        self._context = forks()
        self._patches, self._timeout, self._device = patches, timeout, device
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._worlds = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()

    def run(self, task: Callable[..., Any], *arguments: Any, ranks: int, **more: Any) -> list[Any]:
        """What the task returned on each rank. Raises RankDied, after which the pool starts afresh.

        A world whose ranks could not reach each other is tried once more: on a busy machine gloo now and then loses a
        connection while it makes them, before anything of the task has run.
        """
        try:
            return self._run(task, *arguments, ranks=ranks, **more)
        except RankDied as died:
            if NOT_CONNECTED not in str(died):
                raise
        return self._run(task, *arguments, ranks=ranks, **more)

    def _run(self, task: Callable[..., Any], *arguments: Any, ranks: int, **more: Any) -> list[Any]:
        while len(self._ranks) < ranks:
            self._start()
        self._worlds += 1
        store = str(Path(self._folder.name) / f"world-{self._worlds}")
        used = self._ranks[:ranks]
        for index, rank in enumerate(used):
            # by name, so that the function is looked up in the rank's own, perhaps patched, modules
            try:
                rank.pipe.send((task.__module__, task.__qualname__, arguments, more, store, ranks))
            except BrokenPipeError:
                self._give_up(f"rank {index} died")
        results: dict[int, Any] = {}
        deadline = monotonic() + self._timeout
        while len(results) < ranks:
            ready = wait([r.pipe for i, r in enumerate(used) if i not in results], timeout=deadline - monotonic())
            if not ready:
                self._give_up(f"ranks {sorted(set(range(ranks)) - set(results))} did not answer in {self._timeout} s")
            for pipe in ready:
                index = next(i for i, r in enumerate(used) if r.pipe is pipe)
                try:
                    results[index] = pipe.recv()
                # reset: it died before it had read what it was sent
                except (EOFError, ConnectionResetError):
                    self._give_up(f"rank {index} died")
        return [results[i] for i in range(ranks)]

    def close(self) -> None:
        """Ends the ranks."""
        for rank in self._ranks:
            rank.pipe.close()  # an idle rank leaves at the end of its pipe
        for rank in self._ranks:
            rank.process.join(timeout=2)
            if rank.process.is_alive():
                rank.process.kill()
        self._ranks = []

    def _start(self) -> None:
        here, there = self._context.Pipe()
        index = len(self._ranks)
        log = Path(self._folder.name) / f"rank-{index}-{self._worlds}.log"
        process = self._context.Process(
            target=_serve,
            args=(there, index, str(log), self._patches, self._device, sys.path, 0.9 * self._timeout),
            daemon=True,
        )
        process.start()
        there.close()
        self._ranks.append(_Rank(process, here, log))

    def _give_up(self, reason: str) -> None:
        logs = []
        for i, rank in enumerate(self._ranks):
            rank.process.join(timeout=0.2)
            rank.process.kill()
            text = rank.log.read_text() if rank.log.exists() else ""
            if "Error" in text or "most recent call first" in text:
                logs.append(f"--- rank {i}\n{text[-4000:]}")
        self._ranks = []
        raise RankDied("\n".join([reason, *logs]))


def needs_gpus(ranks: int) -> None:
    """Skips a test where there is no GPU for each rank. NCCL 2.30 and later takes several ranks to a GPU, if it is told
    to by NCCL_MULTI_RANK_GPU_ENABLE=1."""
    import pytest
    import torch

    count = torch.cuda.device_count()
    if count < ranks and not (count and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"):
        pytest.skip(f"needs {ranks} GPUs")


def gpu_of(rank: int) -> Any:
    """The torch.device of a rank; see needs_gpus."""
    import torch

    return torch.device("cuda", rank % torch.cuda.device_count())


def _serve(
    pipe: Connection,
    rank: int,
    log: str,
    patches: tuple[Patch, ...],
    device: str,
    path: list[str],
    patience: float,
) -> None:
    """A rank's life: one task after the other until the pipe ends. A task that takes longer than `patience` seconds
    says where it is."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 2)
    sys.path[:] = path
    _forget_what_lies_elsewhere()
    install(patches)

    import torch  # loaded in the fork server already

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank))
    status = 1
    try:
        while True:
            try:
                module, name, arguments, more, store, size = pipe.recv()
            except EOFError:
                status = 0
                break
            task = partial(getattr(import_module(module), name), rank, *arguments, **more)
            # what is there stays: the collection behind the task looks at what the task has made alone
            gc.freeze()
            faulthandler.dump_traceback_later(patience)
            pipe.send(_in_world(task, rank, store, size, device))
            faulthandler.cancel_dump_traceback_later()
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(status)  # gloo's threads may abort in a normal interpreter exit


def _forget_what_lies_elsewhere() -> None:
    """The server that ranks are forked from searches where the environment says, this rank where its test does."""
    for name in PROJECT:
        if name in sys.modules:
            found = PathFinder.find_spec(name, sys.path)
            if found is not None and found.origin != sys.modules[name].__file__:
                forget_project()
                return


def _in_world(task: Callable[[], Any], rank: int, store: str, size: int, device: str) -> Any:
    import torch.distributed as dist

    if size == 1:
        return task()
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore("world", dist.FileStore(store, size)),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=gpu_of(rank) if device == "cuda" else None,
    )
    # each world that is made puts one more prefix before the lines of a traceback
    sys.excepthook = sys.__excepthook__
    result = task()
    dist.barrier()
    dist.destroy_process_group()
    # a gloo group has threads that wake a hundred times a second until it is gone
    gc.collect()
    return result
