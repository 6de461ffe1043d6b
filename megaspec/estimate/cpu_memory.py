"""Memory of a machine without GPUs: what processes can still take, and what a run's ranks need together. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megaspec.core.units import GIB
from megaspec.estimate.memory import StageMemory, fullest, memory_of
from megaspec.launcher.control_groups import GROUPS, OF_THIS_PROCESS, lines_of, memory_groups
from megaspec.recipe import Recipe

# What processes take beside what is counted tensor by tensor, measured with torch 2.13 (README.md of this folder).
_OF_A_RANK = 0.15 * GIB
_OF_THE_LAUNCHER = 0.15 * GIB
# Limit, use, and the lines of memory.stat that say how much of the use is files' and can be dropped; by version. What
# was read twice counts as active: the kernel drops it, too, before it kills.
_LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


@dataclass(frozen=True)
class CpuNeed:
    """Bytes that the ranks of a run take on one machine."""

    ranks: int
    of_ranks: int
    """What is counted tensor by tensor, of all ranks."""
    of_processes: int
    """The interpreter and libraries of ranks and launcher."""

    @property
    def total(self) -> int:
        return self.of_ranks + self.of_processes


def cpu_need(recipe: Recipe, *, world: int, local: int | None = None) -> CpuNeed:
    """Of a filled recipe on the CPU. `local`: ranks on this machine, None for all of the world."""
    return need_of_stages(memory_of(recipe, device="cpu"), world=world, local=local)


def need_of_stages(stages: Sequence[StageMemory], *, world: int, local: int | None = None) -> CpuNeed:
    """The same from what a rank of each pipeline stage needs."""
    if local is None or local == world:
        ranks = world
        of_ranks = sum(stage.total for stage in stages) * world // len(stages)
    else:
        # which stages are here is the scheduler's affair: the fullest ones may be
        ranks = local
        of_ranks = fullest(stages).total * local
    return CpuNeed(ranks=ranks, of_ranks=of_ranks, of_processes=int(ranks * _OF_A_RANK + _OF_THE_LAUNCHER))


def available_memory(groups: Path = GROUPS, of_this_process: Path = OF_THIS_PROCESS) -> int:
    """Bytes that processes can take here before swapping, within the limits of the control groups around them."""
    available = psutil.virtual_memory().available
    for version, folder in memory_groups(groups, of_this_process):
        left = _left_in(version, folder)
        if left is not None:
            available = min(available, left)
    return available


def _left_in(version: int, folder: Path) -> int | None:
    """Bytes below a group's limit; None where it has none."""
    limit_name, use_name, files_names = _LIMIT_FILES[version]
    limit = _number(lines_of(folder / limit_name))
    use = _number(lines_of(folder / use_name))
    if limit is None or use is None:
        return None
    droppable = 0
    for line in lines_of(folder / "memory.stat"):
        name, _, count = line.partition(" ")
        if name in files_names and count.isdecimal():
            droppable += int(count)
    return max(0, limit - max(0, use - droppable))


def _number(lines: Sequence[str]) -> int | None:
    """What a file of one number says; `max`, no limit, is none."""
    if len(lines) == 1 and lines[0].isdecimal():
        return int(lines[0])
    return None
