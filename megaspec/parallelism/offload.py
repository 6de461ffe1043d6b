"""Activations that wait in the memory of the CPU. On a CPU all is done the same way, with copies for transfers.

Note "Host memory". Blocks are taken again in the order of the program: the copy into one waits, on the GPU, for the
copy out of it. So a step takes as many as are away at once, and no step after the first takes another. If a block were
free only when the GPU is done with it, a host that runs ahead would take more and more, each from the driver, which may
wait for all that the GPU was given.
"""

# B sequences, T tokens, D model

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megaspec.nn.attention.module import SequenceContext
from megaspec.nn.decoder import Decoder, Unit
from megaspec.nn.transfer import Side, on_host, wait_for
from megaspec.parallelism.saved import SavedTensors

# Smaller tensors stay: a transfer of a megabyte takes some 20 microseconds, as long as starting it.
SMALLEST = 2**20

Run = Callable[..., Tensor]


class _Storage:
    """The memory behind saved tensors, away from the device between two passes."""

    def __init__(self, x: Tensor, offload: "Offload"):
        self._offload = offload
        self._device = x.device
        own = _bytes_of(x)
        self._host, free = offload.take(own)
        with offload.out.after_now():
            if free is not None:
                offload.out.stream.wait_event(free)
            self._host.copy_(own, non_blocking=True)
            if offload.out.stream is not None:
                # its memory is free for others once the copy is made
                own.record_stream(offload.out.stream)
        self._left = offload.out.done()
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Starts its way back."""
        if self._back is not None:
            return
        side = self._offload.back
        with side.after_now():
            if self._left is not None:
                side.stream.wait_event(self._left)
            self._back = torch.empty_like(self._host, device=self._device)
            self._back.copy_(self._host, non_blocking=True)
        self._arrived = side.done()
        self._offload.give_back(self._host, self._arrived)
        self._host = None

    def wait(self) -> Tensor:
        """Its bytes, for the computation's stream."""
        self.fetch()
        wait_for(self._arrived)
        if self._arrived is not None:
            self._back.record_stream(torch.cuda.current_stream())
        return self._back


def _bytes_of(x: Tensor) -> Tensor:
    """All of the storage that a tensor lies in, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


@dataclass(frozen=True)
class _Part:
    """Stands for a tensor in an offloaded storage."""

    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Waits for it."""
        whole = self.storage.wait().view(self.dtype)
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class _Pass:
    """One micro batch through one unit: the keeper of what is saved."""

    offload: "Offload"
    stays: frozenset[int]
    """Addresses of what lies on the device anyway."""
    before: "_Pass | None"
    """The same micro batch through the unit before."""
    found: dict[int, tuple[Tensor, _Storage]] = field(default_factory=dict)
    storages: "WeakSet[_Storage]" = field(default_factory=WeakSet)

    def keep(self, x: Tensor) -> _Part | None:
        """See Keeper."""
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() < self.offload.smallest or address in self.stays or x.device != self.offload.device:
            return None
        if address not in self.found:
            # x is held until the unit is through, so that no other tensor comes to lie at the same address
            one = _Storage(x, self.offload)
            self.storages.add(one)
            self.found[address] = x.detach(), one
        return _Part(self.found[address][1], x.dtype, x.shape, x.stride(), x.storage_offset())

    def fetch(self) -> None:
        """Starts the way back of everything."""
        for one in self.storages:
            one.fetch()


class Offload:
    """The strategy for activations: those of the first `layers` layers of each chunk go to the CPU's memory.

    They leave beside the forward pass of what follows, and come back while the unit behind theirs runs backward.
    """

    def __init__(self, layers: int, saved: SavedTensors, *, device: torch.device, smallest: int = SMALLEST):
        """`smallest`: bytes of the storages that are worth the way."""
        self.layers, self.saved, self.device, self.smallest = layers, saved, device, smallest
        self.out, self.back = Side(device), Side(device)
        self._free: dict[int, deque[tuple[Tensor, torch.cuda.Event | None]]] = {}
        """Blocks of the CPU's memory by their bytes, each with the end of the last copy out of it."""

    def take(self, like: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
        """A block of so many bytes, and when it may be written to; see the note "Host memory"."""
        free = self._free.get(like.numel())
        return free.popleft() if free else (on_host(like), None)

    def give_back(self, block: Tensor, free: "torch.cuda.Event | None") -> None:
        """A block that nobody reads once `free` is over."""
        self._free.setdefault(block.numel(), deque()).append((block, free))

    def apply(self, chunk: Decoder) -> None:
        """Wraps the units of the first layers, after they were joined for recomputation, and the one behind them."""
        if not self.layers:
            return
        passed: list[_Pass | None] = [None]
        units, left = [], self.layers
        for unit in chunk.units:
            if unit.role == "embedding" or left == 0:
                units.append(unit)
            elif left > 0 and unit.role == "layer":
                units.append(replace(unit, run=self._offloaded(unit, passed)))
                left = left - len(unit.modules) or -1
            else:
                units.append(replace(unit, run=_fetching(unit.run, passed)))
                left = 0
        chunk.units = units

    def _offloaded(self, unit: Unit, passed: list[_Pass | None]) -> Run:
        """`passed`: the pass through the unit before, replaced by this one."""

        def run(x_BTD: Tensor, context: SequenceContext) -> Tensor:
            if not torch.is_grad_enabled():
                return unit.run(x_BTD, context)
            one = _Pass(self, _addresses(unit, context), passed[0])
            with self.saved.under(one):
                y_BTD = unit.run(x_BTD, context)
            one.found.clear()
            passed[0] = one
            # nothing was kept where nothing is trained up to here
            if y_BTD.requires_grad:
                y_BTD.register_hook(lambda _: _fetch(one, one.before))
            return y_BTD

        return run


def _fetching(run: Run, passed: list[_Pass | None]) -> Run:
    """A unit's run whose backward pass fetches what the unit before it has offloaded."""

    def fetching(*inputs: Any) -> Tensor:
        y = run(*inputs)
        one, passed[0] = passed[0], None
        if y.requires_grad:
            y.register_hook(lambda _: _fetch(one))
        return y

    return fetching


def _fetch(*passes: _Pass | None) -> None:
    for one in passes:
        if one is not None:
            one.fetch()


def _addresses(unit: Unit, context: SequenceContext) -> frozenset[int]:
    """Of a unit's parameters and buffers, and of what its layers are told of the batch."""
    own = [x for module in unit.modules for x in (*module.parameters(), *module.buffers())]
    angles = [x for table in context.angles for x in table]
    told = [*angles, context.positions, context.index, context.aux_weight]
    if context.documents is not None:
        told += [context.documents.number, context.documents.starts]
    tensors = [*own, *(x for x in told if x is not None)]
    return frozenset(x.untyped_storage().data_ptr() for x in tensors)
