"""What a rank's tensors take between two steps, by what they are for: measured, to stand beside the plan."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megaspec.log.events import MemoryHeld
from megaspec.runtime.build import TrainState


def memory_held(built: TrainState, *, step: int) -> MemoryHeld:
    """Bytes in the memory of the rank's device. What a tensor shares with another one counts once, for the first of
    weights, gradients and optimizer: an fp32 weight is its own master. What lies in the CPU's memory is not counted on
    a GPU."""
    data = built.data_parallel
    weights: list[Tensor] = [*data.weights.values()]
    for chunk in built.chunks:
        weights += [*chunk.parameters(), *chunk.buffers()]
    counted: set[int] = set()
    return MemoryHeld(
        step=step,
        weights=_bytes_of(weights, built.device, counted),
        gradients=_bytes_of(data.gradients.values(), built.device, counted),
        optimizer=_bytes_of(built.optimizer.tensors(), built.device, counted),
    )


def _bytes_of(tensors: Iterable[Tensor], device: torch.device, counted: set[int]) -> int:
    """Of the storages that are not in `counted`, by their addresses, which they are put into."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != device.type or not storage.nbytes() or storage.data_ptr() in counted:
            continue
        counted.add(storage.data_ptr())
        total += storage.nbytes()
    return total
