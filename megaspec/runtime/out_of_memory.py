"""What to say when a GPU's memory runs out: who, where, what was predicted, and what saves most."""

from dataclasses import fields

import torch
import torch.distributed as dist

from megaspec.core.errors import MemoryRunOut
from megaspec.core.units import GIB
from megaspec.estimate.hardware import hardware_of
from megaspec.estimate.memory import StageMemory, memory_of
from megaspec.estimate.target import Target
from megaspec.search.remedies import savings
from megaspec.spec import Spec

_WORDS = ("out of memory", "Failed to CUDA calloc")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory ran out, in torch's allocator, in NCCL or in CUDA."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | dist.DistError) and _tells(str(error))


def _tells(text: str) -> bool:
    return any(words in text for words in _WORDS)


def out_of_memory(spec: Spec, target: Target, *, rank: int, stage: int, where: str, cause: str) -> MemoryRunOut:
    """The error that a rank ends with. `stage`: its pipeline rank; `where`: what it was at; `cause`: what failed."""
    predicted = memory_of(spec)[stage]
    reason = next(line for line in cause.splitlines() if _tells(line))
    lines = [
        f"rank {rank} of {spec.world_size} ran out of memory in {where}: {reason}",
        f"predicted for this rank: {predicted.total / GIB:,.1f} GiB ({_by_kind(predicted)})",
    ]
    hardware = hardware_of(target)
    ways = [f"{one.words} ({one.total / GIB:,.1f} GiB)" for one in savings(spec, hardware)] if hardware else []
    if ways:
        lines.append(f"what saves most, as predicted for the fullest rank: {'; '.join(ways)}")
    return MemoryRunOut(lines)


def _by_kind(memory: StageMemory) -> str:
    sizes = {field.name: getattr(memory, field.name) for field in fields(memory)}
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:,.1f}" for name, size in sizes.items() if size)
