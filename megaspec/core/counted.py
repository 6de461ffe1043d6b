"""torch's collectives, counted: which one a rank is in, of which group and the how-many-th, can be read from outside.

Ranks that wait for each other call a group's collectives in one order, so of ranks that hang the one whose number is
lower has not come. Everything of this project goes through here (a test looks for calls that don't). What is counted is
one word, written where a collective begins and where it returns: no lock, no synchronisation. Inside of what
torch.compile traces nothing can be counted; on a GPU NCCL's flight recorder has those.

How long the calling thread was inside is added up too, see `seconds_inside`: with gloo that is waiting and sending.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.collective_word import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    GROUP_AT,
    NAME_AT,
    RECV,
    REDUCE_SCATTER,
    RETURNED,
    SEND,
    SEND_RECV,
)

_WORLD = "all ranks"
# torch 2.13 has other names for both
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class _Group:
    index: int
    name: str
    count: int = 0


class _Counter:
    """Of this process. `word`: where the latest is kept, a list or a page that others read."""

    def __init__(self) -> None:
        self.word: list[int] | memoryview = [0]
        self.at = 0
        self.groups: dict[str, _Group] = {}
        self.inside = 0.0
        self.now = 0
        self.tell_groups: Callable[[list[str]], object] = list


_counter = _Counter()


def publish(word: list[int] | memoryview, at: int, *, tell_groups: Callable[[list[str]], object] = list) -> None:
    """From now on the latest collective is written to `word[at]`, and `tell_groups` is called with the names that its
    number of a group stands for, whenever there is another one."""
    _counter.tell_groups = tell_groups
    tell_groups(group_names())
    word[at] = _counter.now
    _counter.word = word
    # a plain number: an enum costs more at every collective
    _counter.at = int(at)


def forget() -> None:
    """Counts begin anew: the groups of before are gone."""
    _counter.groups.clear()
    _counter.now = 0
    _counter.word[_counter.at] = 0


def group_names() -> list[str]:
    """By the index that a word holds."""
    return [group.name for group in list(_counter.groups.values())]


def group_counts() -> dict[str, int]:
    """How many collectives of each group were begun."""
    return {group.name: group.count for group in list(_counter.groups.values())}


def seconds_inside() -> float:
    """How long this process has been inside of collectives so far."""
    return _counter.inside


def latest() -> int:
    """The word of the latest collective."""
    return _counter.now


def _begin(name: int, group: dist.ProcessGroup | None) -> int:
    """Counts a collective. -> its word."""
    if group is None:
        group = dist.group.WORLD
    key = group.group_name
    found = _counter.groups.get(key)
    if found is None:
        described = group.group_desc
        if group is dist.group.WORLD:
            described = _WORLD
        elif described == "undefined":
            described = f"group {key}"  # nobody named it
        # twelve bits of a word: groups beyond share the last number
        found = _Group(min(len(_counter.groups), 4095), described)
        _counter.groups[key] = found
        _counter.tell_groups(group_names())
    found.count += 1
    word = name << NAME_AT | found.index << GROUP_AT | found.count
    _counter.now = word
    _counter.word[_counter.at] = word
    return word


def _end(word: int) -> None:
    word |= RETURNED
    _counter.now = word
    _counter.word[_counter.at] = word


def issued(name: int, group: dist.ProcessGroup) -> None:
    """Counts a collective that is given to a GPU; nothing happens while torch.compile traces."""
    if torch.compiler.is_compiling():
        return
    _end(_begin(name, group))


class _Inside:
    """While entered the process is in a collective."""

    __slots__ = ("_began", "_group", "_name", "_word")

    def __init__(self, name: int, group: dist.ProcessGroup | None):
        self._name = name
        self._group = group

    def __enter__(self) -> None:
        self._word = _begin(self._name, self._group)
        self._began = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        _counter.inside += time.perf_counter() - self._began
        # one that failed stays the one that the rank is in
        if kind is None:
            _end(self._word)


def _inside(name: int, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    if torch.compiler.is_compiling():
        return nullcontext()
    return _Inside(name, group)


def all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """As torch's, in place."""
    with _inside(ALL_REDUCE, group):
        dist.all_reduce(x, op, group=group)


def all_gather(out: list[Tensor], x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """As torch's."""
    with _inside(ALL_GATHER, group):
        dist.all_gather(out, x, group=group)


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """As torch's all_gather_into_tensor."""
    with _inside(ALL_GATHER, group):
        _torch_all_gather(out, x, group=group)


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """As torch's reduce_scatter_tensor: the sum."""
    with _inside(REDUCE_SCATTER, group):
        _torch_reduce_scatter(out, x, group=group)


def all_to_all_single(
    out: Tensor,
    x: Tensor,
    receive: list[int],
    send: list[int],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """As torch's."""
    with _inside(ALL_TO_ALL, group):
        return dist.all_to_all_single(out, x, receive, send, group=group, async_op=async_op)


def broadcast(x: Tensor, group: dist.ProcessGroup | None = None, *, group_src: int) -> None:
    """As torch's."""
    with _inside(BROADCAST, group):
        dist.broadcast(x, group=group, group_src=group_src)


def gather(x: Tensor, out: list[Tensor] | None, *, dst: int) -> None:
    """As torch's, over all ranks."""
    with _inside(GATHER, None):
        dist.gather(x, out, dst=dst)


def barrier() -> None:
    """As torch's, over all ranks."""
    with _inside(BARRIER, None):
        dist.barrier()


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """As torch's; all of them of one group. They count as one."""
    name = SEND_RECV
    if len(ops) == 1:
        name = SEND if ops[0].op is dist.isend else RECV
    with _inside(name, ops[0].group):
        return dist.batch_isend_irecv(ops)


def wait(work: dist.Work) -> None:
    """Waits for what was begun; the latest collective stays what it is."""
    began = time.perf_counter()
    before = _counter.now
    waiting = before & ~RETURNED
    _counter.word[_counter.at] = waiting
    work.wait()
    _counter.word[_counter.at] = before
    _counter.inside += time.perf_counter() - began
