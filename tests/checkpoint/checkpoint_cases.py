"""Small checkpoints whose every value follows from (step, salt), ranks that are threads, and rank processes."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec.checkpoint.comm import Comm, SoloComm
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import Store
from tests.ranks import forks

SOLO = SoloComm()
CHUNK = 64

# A rank process starts in some 20 ms.
FORKS = forks()

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "layers.0.wq": ((8, 6), torch.float32),
    "optim/layers.0.wq/m": ((8, 6), torch.float64),
    "embed": ((10, 4), torch.bfloat16),
    "rng": ((48,), torch.uint8),
    "count": ((), torch.int64),
}


def values(step: int, salt: int = 0) -> dict[str, Tensor]:
    """The global tensors of a step."""
    source = torch.Generator().manual_seed(1000 * step + salt)
    return {name: torch.randint(0, 250, shape, generator=source).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def own_pieces(tensors: dict[str, Tensor], rank: int, size: int) -> list[SavedPiece]:
    """Rank's rows of each tensor (0-d ones on rank 0)."""
    found = []
    for name, t in tensors.items():
        if t.ndim == 0:
            if rank == 0:
                found.append(SavedPiece(name, (), (), t))
            continue
        low, high = len(t) * rank // size, len(t) * (rank + 1) // size
        found.append(SavedPiece(name, tuple(t.shape), (low, *[0] * (t.ndim - 1)), t[low:high]))
    return found


def save(store: Store, step: int, comm: Comm = SOLO, *, salt: int = 0) -> Path:
    """Save `values(step, salt)` and say so in the state."""
    return store.save(
        step,
        own_pieces(values(step, salt), comm.rank, comm.size),
        spec={"name": "case"},
        state={"step": step, "salt": salt},
        comm=comm,
    )


def assert_holds(reader: Reader, step: int, salt: int | None = None) -> None:
    """Every tensor in the checkpoint is, bit for bit, what was saved."""
    salt = reader.state["salt"] if salt is None else salt
    assert reader.state == {"step": step, "salt": salt}
    truth = values(step, salt)
    assert reader.names() == sorted(truth)
    for name, t in truth.items():
        got = reader.read(name)
        assert got.dtype == t.dtype, name
        assert torch.equal(got, t), name


class ThreadComm:
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]):
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def barrier(self) -> None:
        self._barrier.wait(20)

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(20)
        found = list(self._board)
        self._barrier.wait(20)
        return found

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def on_ranks(size: int, action: Callable[[Comm], Any]) -> list[Any]:
    """What `action` returns, or raises, on each of `size` ranks."""
    barrier, board = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(action, ThreadComm(rank, size, barrier, board)) for rank in range(size)]
        return [f.exception() or f.result() for f in futures]


def no_rank_failed(results: list[Any]) -> list[Any]:
    """The results, when none of them is an error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextmanager
def counters_read() -> Iterator[list[bytes]]:
    """What is read of locks' counters while entered: who asks for a lock waits for nothing but for one to move."""
    seen: list[bytes] = []
    read = RunLock._read

    def reading(lock: RunLock, name: str) -> bytes:
        found = read(lock, name)
        if name.endswith(".beat"):
            seen.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLock, "_read", reading)
        yield seen
