"""Where a rank is, so that a run that hangs ends in a bounded time and says where every rank stood.

Note "Two clocks". On a CPU the training thread stands where the work stands. On a GPU it runs ahead: there a mark is an
event in the stream, and a rank stands behind the last event that the GPU has passed.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from traceback import FrameSummary, extract_stack, extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspec.core import counted
from megaspec.core.collective_word import words_of_collective
from megaspec.core.errors import HangError, printable
from megaspec.launcher import beat as beats
from megaspec.launcher.beat import Page
from megaspec.launcher.kernel_state import kernel_of
from megaspec.nn.decoder import Decoder, Unit

ROOT = Path(__file__).parents[2]
_NOT_TOLD = (Path(__file__), Path(counted.__file__))
"""Lines of these say nothing of where a rank is."""
_PATIENCE = 2.0
"""Seconds that a rank waits for what the others say."""
_STORE_SECONDS = 1.0
"""Seconds beyond that for the store itself."""
_GONE = "gone, or too busy to answer"
"""Where a rank stands that says nothing."""
_MOST_MARKS = 512
_MOST_STACKS = 8
_MOST_FRAMES = 8
_STOOD_STILL = 5.0
"""A watchdog that did not look for so long was stopped itself."""
_ASKED = "position/asked"
_MOST_RANKS = 16
"""Ranks of one position that are told by their numbers."""


Mark = float | torch.cuda.Event


class Passes:
    """When the forward passes of a step begin and end, without what they spend inside of collectives."""

    def __init__(self, is_cuda: bool):
        self._is_cuda = is_cuda
        self._marks: list[Mark] = []
        self._inside = 0.0
        self._inside_before = 0.0

    def __enter__(self) -> None:
        self._inside_before = counted.seconds_inside()
        self._marks.append(self._mark())

    def __exit__(self, *_: object) -> None:
        self._marks.append(self._mark())
        self._inside += counted.seconds_inside() - self._inside_before

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, between: Callable[[Any, Any], float]) -> float:
        """Of all of them, once the device has passed them. `between`: seconds between two marks."""
        total = 0.0
        for begin, end in zip(self._marks[::2], self._marks[1::2], strict=True):
            total += between(begin, end)
        if self._is_cuda:
            return total
        return total - self._inside


@dataclass(frozen=True)
class Newest:
    """The newest step whose numbers were read."""

    step: int = 0
    steps: int = 0
    """Of the whole run; 0: not known yet."""
    loss: float = math.nan


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
    newest: Newest = field(default_factory=Newest)
    _passes: Passes = field(default_factory=lambda: Passes(is_cuda=False))
    _marks: deque[tuple[torch.cuda.Event, str]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))

    def mark(self, what: str) -> None:
        """The thread begins `what`."""
        if self.step:
            what = f"step {self.step}, {what}"
        # the watchdog reads these meanwhile: when it sees the new count, it sees what began with it
        self.what = what
        self.count += 1
        if self.page is not None:
            self.page.write_where(what)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._marks.append((event, self.what))

    def begin_passes(self) -> Passes:
        """Forward passes from now on are those of another step."""
        self._passes = Passes(self.device.type == "cuda")
        return self._passes

    def forward_pass(self) -> Passes:
        """While entered a forward pass is made."""
        return self._passes

    def finished(self, *, step: int, steps: int, loss: float) -> None:
        """A step is done, and its loss was read."""
        self.newest = Newest(step, steps, loss)
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

    `store`: where ranks leave what they say; every attempt needs one of its own; None: there is one rank. `record` gets
    the exit code before the rank is ended. Where no launcher of ours watches, a rank also looks whether another one
    asks where it is.
    """

    def __init__(
        self,
        position: Position,
        *,
        rank: int,
        world_size: int,
        store: dist.Store | None,
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
        self._is_asked_here = store is not None and beats.current() is None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        # not the watching one: a store at a host that is lost keeps whoever asks it waiting, without bound
        self._listener = threading.Thread(target=self._listen, name="watchdog-listener", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._is_asked_here:
            assert self._store is not None
            self._store.set(_process_key(self._rank), json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            self._listener.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._is_asked_here:
            self._listener.join(_STORE_SECONDS)

    def tell(self, reason: str, error: BaseException | None = None) -> None:
        """Says where this rank stands, waits for the others; the first of them prints what all have said. Once.

        `error`: what ended the training thread's work; the rank stands where that was raised.
        """
        if not self._told.acquire(blocking=False):
            time.sleep(2 * _PATIENCE)  # the other thread prints, and ends the process where it has to
            return
        heard = {self._rank: self._stand(error)}
        places: dict[int, str] = {}
        if self._store is not None:
            store = self._store
            within(_PATIENCE + _STORE_SECONDS, lambda: self._hear(store, heard, places))
        # what has come so far, where the store is lost
        heard = dict(heard)
        if self._rank != min(heard):
            return
        for rank in range(self._world_size):
            if rank in heard:
                places[rank] = heard[rank].where
            else:
                places.setdefault(rank, _GONE)
        text = f"{reason}; where every rank stood:\n{in_words(by_position(places, self._world_size))}"
        text += _stacks_in_words(heard)
        print(printable(text, keep="\n"), file=sys.stderr)
        sys.stderr.flush()

    def _hear(self, store: dist.Store, heard: dict[int, "Stand"], places: dict[int, str]) -> None:
        """Tells the other ranks where this one stands, and takes into `heard` what they say until all have, or time is
        up; into `places` what is known of those that say nothing."""
        # said before the others are heard: they wait for it as this rank waits for them
        store.set(_key(self._rank), json.dumps(asdict(heard[self._rank])))
        store.set(_ASKED, "")
        end = time.monotonic() + _PATIENCE
        missing = set(range(self._world_size)) - {self._rank}
        while missing and time.monotonic() < end:
            for rank in sorted(missing):
                if store.check([_key(rank)]):
                    heard[rank] = stand_of(store.get(_key(rank)))
            missing -= set(heard)
            time.sleep(0.05)
        for rank in sorted(missing):
            places[rank] = self._unheard(store, rank)

    def _unheard(self, store: dist.Store, rank: int) -> str:
        """What is known of a rank that says nothing: of one on this machine the kernel's word."""
        if not self._is_asked_here or not store.check([_process_key(rank)]):
            return _GONE
        found = json.loads(store.get(_process_key(rank)))
        named = f"on {found['host']}, pid {found['pid']}"
        if found["host"] != socket.gethostname():
            return f"{_GONE} ({named})"
        kernel = kernel_of(found["pid"])
        if kernel.get("state", "").startswith(("T", "t")):
            return f"stopped (SIGSTOP, or a debugger), in the kernel's {kernel.get('wchan', '?')} ({named})"
        if not kernel:
            return f"gone ({named})"
        return f"{_GONE} ({named}: {kernel.get('state', '?')})"

    def _stand(self, error: BaseException | None) -> "Stand":
        """Where this rank stands: what the device is at, its collective, and the line and stack that the work is in."""
        what, _ = self._position.reached()
        stack = extract_tb(error.__traceback__) if error else stack_of(self._thread_id)
        collective = words_of_collective(counted.latest(), counted.group_names())
        where = f"{what}, {collective}" if collective else what
        # on a GPU the training thread's own line says little: it runs ahead
        if self._position.device.type == "cuda":
            pending = pending_collective()
            if pending:
                return Stand(f"{what}{pending}", beats.lines_of(stack))
        return Stand(f"{where}{innermost(stack)}", beats.lines_of(stack))

    def _listen(self) -> None:
        """Says where this rank stands when another one asks."""
        assert self._store is not None
        try:
            while not self._done.wait(min(0.5, self._seconds / 10)):
                if self._store.check([_ASKED]):
                    self._store.set(_key(self._rank), json.dumps(asdict(self._stand(None))))
                    return
        except RuntimeError:
            # the store (dist.DistError, which is one) is that of a rank that is gone: its end is told where it is met
            return

    def _watch(self) -> None:
        last_count = -1
        since = time.monotonic()
        last_look = since
        while not self._done.wait(min(0.5, self._seconds / 10)):
            _, count = self._position.reached()
            now = time.monotonic()
            if now - last_look > _STOOD_STILL:
                # this process was stopped itself: what it did not do meanwhile is no hang
                since = now
            last_look = now
            if count != last_count:
                last_count = count
                since = now
            elif now - since > self._seconds:
                self.tell(f"rank {self._rank} has not got on for {now - since:.0f} s")
                self._record(HangError.exit_code)
                # not sys.exit: the training thread hangs in native code and would be waited for
                os._exit(HangError.exit_code)


def within(seconds: float, call: Callable[[], object]) -> None:
    """Returns when a call of the store has ended, or failed, or after these seconds: a store at a host that is lost
    answers nobody, and its client waits until the network gives up, a quarter of an hour later."""

    def called() -> None:
        # dist.DistError, which is one: the store is gone
        with suppress(RuntimeError):
            call()

    thread = threading.Thread(target=called, name="store", daemon=True)
    thread.start()
    thread.join(seconds)


def _key(rank: int) -> str:
    return f"position/{rank}"


def _process_key(rank: int) -> str:
    return f"process/{rank}"


@dataclass(frozen=True)
class Stand:
    """Where a rank stands."""

    where: str
    stack: list[str]
    """Of the training thread, outermost first."""


def stand_of(data: bytes) -> Stand:
    """What another rank wrote, taken as input: anything else reads as nothing."""
    try:
        found = json.loads(data)
        return Stand(str(found["where"]), [str(line) for line in found["stack"]])
    except (ValueError, KeyError, TypeError):
        return Stand("it said nothing that can be read", [])


def _stacks_in_words(heard: Mapping[int, Stand]) -> str:
    """The innermost lines of the stacks, of ranks that stand alike once."""
    ranks_at: dict[tuple[str, ...], list[int]] = {}
    for rank, stand in sorted(heard.items()):
        ranks_at.setdefault(tuple(stand.stack[-_MOST_FRAMES:]), []).append(rank)
    text = ""
    for stack, ranks in list(ranks_at.items())[:_MOST_STACKS]:
        shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
        lines = "".join(f"\n      {line}" for line in stack)
        text += f"\n    stack of rank {shown}:{lines}"
    return text


def stack_of(thread_id: int) -> list[FrameSummary]:
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return []
    return extract_stack(frame)


def innermost(stack: list[FrameSummary]) -> str:
    """`, in all_reduce (megaspec/parallelism/collectives.py:62)`: the innermost line of this project."""
    for line in reversed(stack):
        path = Path(line.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path not in _NOT_TOLD:
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
