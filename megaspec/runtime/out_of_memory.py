"""What to say when a GPU's memory runs out: who, where, what was predicted, and what saves most."""

from dataclasses import fields

from megaspec.core.errors import MemoryRunOut
from megaspec.core.units import GIB
from megaspec.resolve.hardware import hardware_of
from megaspec.resolve.memory import StageMemory, memory_of
from megaspec.resolve.remedies import savings
from megaspec.resolve.target import Target
from megaspec.spec import Spec


def out_of_memory(spec: Spec, target: Target, *, rank: int, stage: int, where: str, cause: str) -> MemoryRunOut:
    """The error that a rank ends with. `stage`: its pipeline rank; `where`: what it was at; `cause`: torch's words."""
    predicted = memory_of(spec)[stage]
    lines = [
        f"rank {rank} of {spec.world_size} ran out of memory in {where}: {cause.splitlines()[0]}",
        f"predicted for this rank: {predicted.total / GIB:,.1f} GiB ({_by_kind(predicted)})",
    ]
    hardware = hardware_of(target)
    ways = (
        [f"{' '.join(one.overrides)} ({one.total / GIB:,.1f} GiB)" for one in savings(spec, hardware)]
        if hardware
        else []
    )
    if ways:
        lines.append(f"what saves most, as predicted for the fullest rank: {'; '.join(ways)}")
    return MemoryRunOut("\n".join(lines))


def _by_kind(memory: StageMemory) -> str:
    sizes = {field.name: getattr(memory, field.name) for field in fields(memory)}
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:,.1f}" for name, size in sizes.items() if size)
