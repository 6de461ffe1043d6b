"""How ranks agree on a checkpoint: plain JSON between them, and one failure becomes everybody's."""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megaspec.checkpoint.failures import KINDS, UNTOLD, failure_of
from megaspec.core import counted
from megaspec.core.errors import MegaspecError
from megaspec.core.regular_files import disk_failures_told

T = TypeVar("T")


class Comm(Protocol):
    """What the store needs of a process group. Values are JSON: dict, list, str, int, float, bool, None."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank; the others' arguments are not looked at."""


class SoloComm:
    """One process that is alone."""

    rank = 0
    size = 1

    def barrier(self) -> None:
        """Nobody to wait for."""

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """The value."""
        return value


class DistComm:
    """The ranks of a process group. JSON travels as bytes in uint8 tensors: torch's object collectives unpickle.

    `device` is where the group's collectives work: cpu for gloo, this rank's GPU for NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: torch.device | str = "cpu"):
        self.group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        data = self._bytes(value)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        counted.all_gather(lengths, length, group=self.group)
        counts = torch.cat(lengths).tolist()
        # all_gather takes tensors of one size: all are as long as the longest
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        counted.all_gather(gathered, padded, group=self.group)
        return [_value(data[:count]) for data, count in zip(gathered, counts, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        data = self._bytes(value if self.rank == 0 else None)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        counted.broadcast(length, group=self.group, group_src=0)
        if self.rank != 0:
            data = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        counted.broadcast(data, group=self.group, group_src=0)
        return _value(data)

    def _bytes(self, value: Any) -> torch.Tensor:
        data = bytearray(json.dumps(value, separators=(",", ":")).encode())
        return torch.frombuffer(data, dtype=torch.uint8).to(self.device)


def _value(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


# Different failures that an error tells; ranks that failed alike are one.
_MOST_REPORTS = 8


def together(comm: Comm, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return every rank's result (JSON), or raise on every rank when it failed on one.

    An error of a disk is raised as WriteError. A rank that fails in another way than with a MegaspecError still
    tells the others before its own error goes on.
    """
    outcome = UNTOLD
    try:
        # a disk that is full or fails on one rank, wherever that is met, is every rank's affair
        with disk_failures_told():
            outcome = {"value": action()}
    except MegaspecError as error:
        outcome = failure_of(error)
    finally:
        # also while an error of another kind is on its way: the others would wait here for ever
        outcomes = comm.gather(outcome)
    raise_failure(outcomes)
    return [told["value"] for told in outcomes]


def raise_failure(outcomes: list[dict[str, Any]]) -> None:
    """Raises the gravest of the failures among all ranks' outcomes, if there is one."""
    for kind, cls in KINDS.items():
        failed = {}
        for rank, told in enumerate(outcomes):
            if told.get("kind") == kind:
                failed[rank] = tuple(told["lines"])
        if failed:
            raise cls(_report(failed, len(outcomes)))


def on_first(comm: Comm, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone; its result (JSON), or its failure, is every rank's."""

    def act() -> T | None:
        return action() if comm.rank == 0 else None

    first, *_ = together(comm, act)
    return first


def _report(failed: dict[int, tuple[str, ...]], size: int) -> list[str]:
    """The lines of an error that says what failed on which ranks."""
    if size == 1:
        return list(failed[0])
    by_lines: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in failed.items():
        by_lines.setdefault(lines, []).append(rank)
    told = []
    for (first, *others), ranks in list(by_lines.items())[:_MOST_REPORTS]:
        told += [f"rank {', '.join(map(str, ranks))}: {first}", *others]
    if len(by_lines) > _MOST_REPORTS:
        told.append(f"and {len(by_lines) - _MOST_REPORTS} more")
    return told
