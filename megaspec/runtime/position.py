"""Where a rank is, so that a run that hangs ends in a bounded time and says where every rank stood.

Note "Two clocks". On a CPU the training thread stands where the work stands. On a GPU it runs ahead: there a mark is an
event in the stream, and a rank stands behind the last event that the GPU has passed.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary, extract_stack, extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core.errors import HangError, printable
from megaspec.launcher.beat import Page
from megaspec.nn.decoder import Decoder, Unit

ROOT = Path(__file__).parents[2]
_PATIENCE = 3.0
"""Seconds that a rank waits for what the others say."""
_MOST_MARKS = 512
_MOST_RANKS = 16
"""Ranks of one position that are told by their numbers."""


@dataclass
class Position:
    """Written by the training thread at every unit of the model, read by the watchdog."""

    device: torch.device
    what: str = "starting"
    count: int = 0
    """Rises with every mark."""
    step: int = 0
    micro: int = 0
    page: Page | None = None
    """That of who watches this rank from outside."""
    _marks: deque[tuple[torch.cuda.Event, str]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))

    def mark(self, what: str) -> None:
        """The thread begins `what`."""
        if self.step:
            what = f"step {self.step}, {what}"
        # the watchdog reads these meanwhile: when it sees the new count, it sees what began with it
        self.what = what
        self.count += 1
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._marks.append((event, self.what))

    def finished(self, *, step: int, steps: int, loss: float) -> None:
        """A step is done, and its loss was read."""
        if self.page is not None:
            self.page.write_step(step, steps, loss)

    def reached(self) -> tuple[str, int]:
        """What the device is at, and a number that changes when it gets on."""
        if not self._marks:
            return self.what, self.count
        # a copy: the training thread goes on adding marks
        marks = list(self._marks)
        _, reached = marks[0]
        n_passed = 0
        for event, what in marks:
            if not event.query():
                break
            reached = what
            n_passed += 1
        return reached, self.count + n_passed

    def watch(self, chunk: Decoder) -> None:
        """Marks every unit of a chunk, forward and backward."""
        for unit in chunk.units:
            self._watch(unit)

    def _watch(self, unit: Unit) -> None:
        run = unit.run

        def watched(x: Tensor, *more: Any) -> Tensor:
            micro = self.micro
            kind = "forward" if torch.is_grad_enabled() else "evaluation"
            self.mark(f"{kind} of micro batch {micro}, {unit.name}")
            out = run(x, *more)
            if out.requires_grad:
                out.register_hook(lambda _: self.mark(f"backward of micro batch {micro}, {unit.name}"))
            return out

        unit.run = watched


@dataclass(frozen=True)
class RanksAtPosition:
    """Ranks that stood at the same place."""

    ranks: tuple[int, ...]
    where: str


def by_position(reports: Mapping[int, str], world_size: int) -> list[RanksAtPosition]:
    """Ranks by where they stood, most first; of equally many, those of the lowest rank first."""
    ranks_at: dict[str, list[int]] = {}
    for rank in range(world_size):
        where = reports.get(rank, "gone, or too busy to answer")
        ranks_at.setdefault(where, []).append(rank)
    found = [RanksAtPosition(tuple(ranks), where) for where, ranks in ranks_at.items()]
    return sorted(found, key=lambda one: -len(one.ranks))


def in_words(positions: list[RanksAtPosition]) -> str:
    """One line a position."""
    lines = []
    for position in positions:
        ranks = ", ".join(map(str, position.ranks[:_MOST_RANKS]))
        if len(position.ranks) > _MOST_RANKS:
            ranks += " and more"
        plural = "s" if len(position.ranks) > 1 else ""
        lines.append(f"  rank{plural} {ranks}: {position.where}")
    return "\n".join(lines)


def ignore_code(code: int) -> None:
    """For ranks whose launcher reads their exit codes."""


class Watchdog:
    """A thread that ends a rank which has not got on for `seconds`, after all ranks have said where they stand.

    `store`: where ranks leave what they say; every attempt needs one of its own. `record` gets the exit code before the
    rank is ended.
    """

    def __init__(
        self,
        position: Position,
        *,
        rank: int,
        world_size: int,
        store: dist.Store,
        seconds: float,
        record: Callable[[int], object] = ignore_code,
    ):
        self._position = position
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._seconds = seconds
        self._record = record
        self._thread_id = threading.get_ident()
        self._told = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def tell(self, reason: str, error: BaseException | None = None) -> None:
        """Says where this rank stands, waits for the others; the first of them prints what all have said. Once.

        `error`: what ended the training thread's work; the rank stands where that was raised.
        """
        if not self._told.acquire(blocking=False):
            time.sleep(2 * _PATIENCE)  # the other thread prints, and ends the process where it has to
            return
        # said before the others are heard: they wait for it as this rank waits for them
        self._store.set(_key(self._rank), json.dumps(self._stand(error)))
        heard: dict[int, str] = {}
        end = time.monotonic() + _PATIENCE
        while len(heard) < self._world_size and time.monotonic() < end:
            for rank in set(range(self._world_size)) - set(heard):
                if self._store.check([_key(rank)]):
                    heard[rank] = json.loads(self._store.get(_key(rank)))
            time.sleep(0.05)
        if self._rank == min(heard):
            text = f"{reason}; where every rank stood:\n{in_words(by_position(heard, self._world_size))}"
            print(printable(text, keep="\n"), file=sys.stderr)
            sys.stderr.flush()

    def _stand(self, error: BaseException | None) -> str:
        """Where this rank stands: what the device is at, and the collective or the line that the work is in."""
        what, _ = self._position.reached()
        # on a GPU the training thread's own line says little: it runs ahead
        if self._position.device.type == "cuda":
            pending = pending_collective()
            if pending:
                return f"{what}{pending}"
        stack = extract_tb(error.__traceback__) if error else stack_of(self._thread_id)
        return f"{what}{innermost(stack)}"

    def _watch(self) -> None:
        last_count = -1
        since = time.monotonic()
        while not self._done.wait(min(0.5, self._seconds / 10)):
            _, count = self._position.reached()
            now = time.monotonic()
            if count != last_count:
                last_count = count
                since = now
            elif now - since > self._seconds:
                self.tell(f"rank {self._rank} has not got on for {now - since:.0f} s")
                self._record(HangError.exit_code)
                # not sys.exit: the training thread hangs in native code and would be waited for
                os._exit(HangError.exit_code)


def _key(rank: int) -> str:
    return f"position/{rank}"


def stack_of(thread_id: int) -> list[FrameSummary]:
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return []
    return extract_stack(frame)


def innermost(stack: list[FrameSummary]) -> str:
    """`, in all_reduce (megaspec/parallelism/collectives.py:62)`: the innermost line of this project."""
    for line in reversed(stack):
        path = Path(line.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f", in {line.name} ({path.relative_to(ROOT)}:{line.lineno})"
    return ""


def pending_collective() -> str:
    """`, waiting for nccl:all_reduce number 12 of group tp`: the oldest that NCCL has begun and not ended."""
    dumped: dict[str, Any] = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(True, True))
    for entry in dumped.get("entries", []):
        if entry.get("state") == "completed":
            continue
        name = entry.get("profiling_name")
        number = entry.get("collective_seq_id")
        group = entry.get("process_group", ["?"])[-1]
        of = "all ranks" if group == "default_pg" else f"group {group}"
        return f", waiting for {name} number {number} of {of}"
    return ""
