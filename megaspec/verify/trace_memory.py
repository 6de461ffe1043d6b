"""Memory that tensors without numbers would take, by what it is for."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What memory is for; the names of StageMemory's fields.
WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
LOGITS = "logits"
EXPERTS = "expert_buffers"
COMMUNICATION = "communication"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, EXPERTS, COMMUNICATION)
INSIDE = "inside"
"""What operations inside a compiled block make: counted as the tables say, not one by one."""
_LINE = 512
"""Bytes: no two storages share an address, however small they are."""


@dataclass
class _Held:
    bytes: int
    kind: str
    address: int
    alive: weakref.ref[torch.UntypedStorage]


class Memory:
    """Bytes of all storages that are alive, by kind, and at the moment when they were most.

    What is `INSIDE` counts nothing. Storages are found by identity: torch keeps one Python object for each.
    """

    def __init__(self, where: Callable[[], str]):
        """`where`: the place in the step, to be told of the peak."""
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.peak_at = ""
        self._where = where
        self._total = 0
        self._most = 0
        self._next = _LINE  # the address of the next storage; none has 0
        self._held: dict[int, _Held] = {}

    def forget_peak(self) -> None:
        """The peak is counted from here on."""
        self._take_peak()

    def _take_peak(self) -> None:
        self._most = self._total
        self.peak = dict(self.now)
        self.peak_at = self._where()

    def see(self, x: Tensor, kind: str) -> None:
        """Counts a tensor's storage, if it is new."""
        storage = storage_of(x)
        if id(storage) not in self._held:
            key = id(storage)
            held = _Held(storage.nbytes(), kind, self._next, weakref.ref(storage, lambda _: self._gone(key)))
            self._held[key] = held
            self._next += held.bytes + _LINE
            self._add(kind, held.bytes)

    def name(self, x: Tensor, kind: str) -> None:
        """From now on the tensor's storage is of this kind."""
        self.see(x, kind)
        held = self._held[id(storage_of(x))]
        if held.kind != kind:
            self._add(held.kind, -held.bytes)
            held.kind = kind
            self._add(kind, held.bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage got or lost memory."""
        held = self._held[id(storage)]
        self._add(held.kind, storage.nbytes() - held.bytes)
        held.bytes = storage.nbytes()
        if held.bytes:
            held.address = self._next
            self._next += held.bytes + _LINE

    def address(self, storage: torch.UntypedStorage) -> int:
        """A number that no other storage has, and none had before."""
        held = self._held.get(id(storage))
        if held is None:
            return 0
        return held.address

    def _gone(self, key: int) -> None:
        held = self._held.pop(key)
        self._add(held.kind, -held.bytes)

    def _add(self, kind: str, size: int) -> None:
        if kind == INSIDE:
            return
        self.now[kind] += size
        self._total += size
        if self._total > self._most:
            self._take_peak()


def storage_of(x: Tensor) -> torch.UntypedStorage:
    """A tensor's storage itself, whatever a trace puts in the place of torch's method."""
    return torch._C.TensorBase.untyped_storage(x)
