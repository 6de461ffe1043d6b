"""How long each rank takes by itself, gathered every few steps, so that a slow one is named: see stragglers.py.

On a CPU the time inside of collectives is known (core/counted.py) and taken off each phase. On a GPU phases are times
between events in its stream, which nothing waits for; a collective inside of a phase, of tensor parallel layers or of
shards that are gathered, makes all ranks' phases equally long there. What tells a slow GPU all the same is a product
of matrices that every GPU makes at the end of a window, with no collective in it. The table of all ranks is gathered
by one small collective a window.
"""

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from megaspec.checkpoint.comm import Comm
from megaspec.core import counted
from megaspec.log.events import Event, PaceMeasured, PhaseOfRanks, SlowRank
from megaspec.parallelism.mesh import Mesh
from megaspec.runtime.stragglers import (
    DEVICE,
    LOOK_BACK,
    NOISE,
    PHASES,
    SAVE,
    STEADY,
    WINDOW,
    Stragglers,
    steady_time,
)

PACE_EVERY = 50
"""Steps between two events that tell how long ranks take."""
_SIDE = 2048
"""Of the square matrices, in bf16: 17 GFLOP a product, some 30 us on an H100, and 8 MB."""
_PRODUCTS = 8
_MISSING = -1.0
_COLUMNS = (*PHASES, STEADY, NOISE)
"""Of the table that is gathered."""


@dataclass
class Pace:
    """Of one rank: takes each step's phases, and at the end of a window what they came to on all ranks. All ranks call
    it alike."""

    mesh: Mesh
    comm: Comm
    device: torch.device
    _steps: dict[str, list[float]] = field(default_factory=dict)
    """Of this window, by phase."""
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LOOK_BACK))
    """What the last steps took in all their phases."""
    _stragglers: Stragglers = field(init=False)
    _pending: tuple[int, Tensor] | None = None
    """Step and rows of a window that a GPU may still be gathering."""
    _copied: torch.cuda.Event | None = None
    _marks: list[torch.cuda.Event] = field(default_factory=list)
    """Around the products of the latest window."""
    _where: list[dict[str, str]] = field(default_factory=list)
    """Host and device of each rank."""

    def __post_init__(self) -> None:
        stages = self.mesh.degrees.get("pp", 1)
        size = self.mesh.world_size // stages
        # pp is the outermost axis of the ranks
        self._stragglers = Stragglers([range(stage * size, (stage + 1) * size) for stage in range(stages)])

    def add(self, phases: Mapping[str, float]) -> None:
        """This rank's own seconds of a step, in each of its phases."""
        self._last.append(sum(phases.values()))
        for phase, seconds in phases.items():
            self._steps.setdefault(phase, []).append(seconds)

    def saved(self, seconds: float) -> None:
        """This rank's own seconds of a save."""
        self._steps.setdefault(SAVE, []).append(seconds)

    def events(self, step: int) -> list[Event]:
        """After `step`: at the end of a window who is slow, and now and then how long ranks take. On a GPU a step
        later, so that the host waits for nothing."""
        if self.mesh.world_size < 2:
            return []
        found: list[Event] = []
        if self._pending is not None:
            found = self._judged(*self._pending)
            self._pending = None
        if step % WINDOW:
            return found
        if not self._where:
            self._where = self.comm.gather({"host": socket.gethostname(), "device": self._device_name()})
        mine = []
        for phase in PHASES:
            seconds = self._steps.get(phase, [])
            mine.append(median(seconds) if seconds else _MISSING)
        steady = steady_time(tuple(self._last))
        mine += [steady.get(STEADY, _MISSING), steady.get(NOISE, _MISSING)]
        if self.device.type == "cuda":
            mine[_COLUMNS.index(DEVICE)] = self._probe()
        self._steps.clear()
        table = self._gather(mine)
        if self.device.type == "cuda":
            self._pending = (step, table)
            return found
        return self._judged(step, table)

    def _judged(self, step: int, rows: Tensor) -> list[Event]:
        if self._copied is not None:
            self._copied.synchronize()
        table = []
        for values in rows.tolist():
            table.append({phase: value for phase, value in zip(_COLUMNS, values, strict=True) if value >= 0})
        found: list[Event] = []
        for slow in self._stragglers.add(table):
            where = self._where[slow.rank]
            found.append(
                SlowRank(
                    step=step,
                    rank=slow.rank,
                    host=where["host"],
                    device=where["device"],
                    phase=slow.phase,
                    seconds=slow.seconds,
                    usual_seconds=slow.usual_seconds,
                    share=slow.share,
                )
            )
        if step % PACE_EVERY == 0:
            found.append(PaceMeasured(step=step, phases=_of_ranks(table)))
        return found

    def _gather(self, mine: Sequence[float]) -> Tensor:
        """Starts to gather the rows of all ranks. -> float64 [ranks, columns] on the CPU, there once `_copied` is."""
        row = torch.tensor(mine, dtype=torch.float64)
        if self.device.type == "cuda":
            row = row.pin_memory().to(self.device, non_blocking=True)
        rows = [torch.empty_like(row) for _ in range(self.mesh.world_size)]
        counted.all_gather(rows, row)
        table = torch.stack(rows)
        if self.device.type == "cpu":
            return table
        table = torch.empty_like(table, device="cpu", pin_memory=True).copy_(table, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return table

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return f"cuda:{self.device.index} {torch.cuda.get_device_name(self.device)}"
        return "cpu"

    def _probe(self) -> float:
        """Seconds of a product of the window before, the median of a few; starts those of this one."""
        seconds = _MISSING
        if self._marks:
            # a window old: the device has passed them long ago
            self._marks[-1].synchronize()
            times = [first.elapsed_time(second) for first, second in zip(self._marks, self._marks[1:], strict=False)]
            # the first products warm caches up
            seconds = median(times[2:]) / 1e3
        x = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(x)
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(_PRODUCTS + 1)]
        self._marks[0].record()
        for mark in self._marks[1:]:
            torch.mm(x, x, out=out)
            mark.record()
        return seconds


def _of_ranks(table: Sequence[Mapping[str, float]]) -> dict[str, PhaseOfRanks]:
    found = {}
    for phase in PHASES:
        by_rank = {rank: row[phase] for rank, row in enumerate(table) if phase in row}
        if by_rank:
            slowest = max(by_rank, key=lambda rank: by_rank[rank])
            found[phase] = PhaseOfRanks(median(by_rank.values()), by_rank[slowest], slowest)
    return found
