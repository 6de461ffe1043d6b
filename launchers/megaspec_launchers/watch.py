"""Who watches ranks is not one of them: the launcher looks at their pages, and says where each stood when one hangs.

A rank hangs when it has not got on for the time that a collective has, whatever its side thread does: all ranks may
wait for each other, one may be alone, all may be stopped. A rank that the kernel has stopped for as long counts too,
and so does the process that starts ranks. When this process was stopped itself, together with its ranks or alone, the
time that it has not seen counts for nobody. Never imports torch.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspec.core.collective_word import words_of_collective
from megaspec.core.regular_files import open_inside
from megaspec.launcher.beat import Page, PageState, Word, page_path, read_report
from megaspec.launcher.heartbeat import EVERY_SECONDS, Heartbeat, RankBeat, state_in_words, write_heartbeat
from megaspec.launcher.kernel_state import kernel_of
from megaspec_launchers.standing import Frame, is_halted, main_stack

LOOK_SECONDS = 0.5
"""Between two looks."""
FAILS_BY_ITSELF_SECONDS = 1.5
"""What a collective gets beyond its own bound, to fail by itself and say why."""
STARTS_SECONDS = 60.0
"""What a rank gets beyond that while it starts: imports, a device that is opened."""
ANSWER_SECONDS = 1.0
"""What ranks get to write where they are."""
MISSED_SECONDS = 2.0
"""A side thread that has not moved for so long is looked at: the kernel says whether the rank was stopped."""
STOOD_STILL_SECONDS = 5.0
"""A gap between two looks that is longer means that this process was stopped."""
HANG_FILE = "hang-{attempt}.json"
_MOST_GROUPS = 16
_MOST_RANKS = 16
_MOST_FRAMES = 12


@dataclass
class Seen:
    """What was seen of a rank."""

    rank: int
    pid: int
    path: str
    page: Page | None = None
    beats: int = -1
    beats_at: float = 0.0
    progress: tuple[int, int, int] = (-1, -1, -1)
    """Its state, its count, and its latest collective: it gets on when any of them changes."""
    progress_at: float = 0.0
    halted_since: float | None = None
    is_gone: bool = False


@dataclass(frozen=True)
class Hang:
    """Why the ranks are asked where they are."""

    reason: str
    by_rank: bool = False
    """A rank met it and ends by itself: a collective of its failed."""


@dataclass(frozen=True)
class RankReport:
    """Where a rank stood."""

    rank: int
    pid: int
    state: str
    """running, stopped, gone"""
    where: str
    collective: str
    counts: dict[str, int]
    """Collectives that were begun, by group; empty where the rank did not answer."""
    stacks: dict[str, list[str]]
    """By thread, outermost first."""
    kernel: dict[str, str]
    """What /proc says: state, and the function of the kernel that it waits in."""
    line: str
    """The innermost line of the project."""

    @property
    def is_waiting(self) -> bool:
        """It was inside of a collective."""
        return self.collective.startswith("in ")

    @property
    def blame(self) -> int:
        """The lower, the likelier it is that the others wait for this rank."""
        if self.state != "running":
            return 0
        return 2 if self.is_waiting else 1

    def in_words(self) -> str:
        """One line."""
        parts = [self.where, self.collective, self.line]
        if self.state == "gone":
            parts = ["gone"]
        elif self.state == "stopped":
            asleep = self.kernel.get("wchan", "")
            kernel = f", in the kernel's {asleep}" if asleep else ""
            where = f"last seen at {self.where}" if self.where else ""
            parts = [f"stopped (SIGSTOP, or a debugger){kernel}", where, self.collective, self.line]
        return ", ".join(part for part in parts if part)


@dataclass
class Watch:
    """Of the ranks of an attempt. `store`: the file by which they meet; their pages are beside it."""

    store: str
    world_size: int
    attempt: int
    timeout_seconds: float
    run_dir: str
    writes_heartbeat: bool = False
    is_ours: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.monotonic
    seen: dict[int, Seen] = field(default_factory=dict)
    server_halted_since: float | None = None
    state: str = "starting"
    _looked_at: float | None = None
    _written_at: float = float("-inf")
    _written_state: str = ""
    _progress_time: float = field(default_factory=time.time)
    _failed: set[int] = field(default_factory=set)

    def add(self, rank: int, pid: int) -> None:
        """A rank was started."""
        now = self.clock()
        self.seen[rank] = Seen(rank, pid, page_path(self.store, rank), beats_at=now, progress_at=now)

    def ended(self, rank: int) -> None:
        """A rank has ended."""
        seen = self.seen[rank]
        if seen.page is None:
            # it made one since the last look: the last heartbeat says how far it came
            seen.page = Page.open(seen.path)
        seen.is_gone = True

    def look(self, server_pid: int) -> Hang | None:
        """Looks at every rank. -> that one hangs, or that a collective failed on one; each failure once."""
        now = self.clock()
        self._forgive(now)
        found = None
        for seen in self.seen.values():
            if not seen.is_gone:
                self._look_at(seen, now)
                found = found or self._judged(seen, now)
        found = found or self._judged_server(server_pid, now)
        self._beat(now)
        return found

    def _forgive(self, now: float) -> None:
        """Time in which this process did not look, because it was stopped itself, counts for nobody."""
        last = self._looked_at
        self._looked_at = now
        if last is None or now - last < STOOD_STILL_SECONDS:
            return
        for seen in self.seen.values():
            seen.beats_at = now
            seen.progress_at = now
            seen.halted_since = None
        self.server_halted_since = None

    def _look_at(self, seen: Seen, now: float) -> None:
        if seen.page is None:
            seen.page = Page.open(seen.path)
        if seen.page is not None:
            words = seen.page.words
            words[Word.LOOKS] += 1
            if words[Word.BEATS] != seen.beats:
                seen.beats = words[Word.BEATS]
                seen.beats_at = now
                seen.halted_since = None
            progress = (words[Word.STATE], words[Word.PROGRESS], words[Word.COLLECTIVE])
            if progress != seen.progress:
                seen.progress = progress
                seen.progress_at = now
                self._progress_time = time.time()
        if now - seen.beats_at < MISSED_SECONDS:
            return
        if not is_halted(seen.pid):
            seen.halted_since = None
        elif seen.halted_since is None:
            # since it beat last, as far as is known
            seen.halted_since = seen.beats_at

    def _judged(self, seen: Seen, now: float) -> Hang | None:
        patience = self.timeout_seconds + FAILS_BY_ITSELF_SECONDS
        if seen.halted_since is not None and now - seen.halted_since > patience:
            stopped = now - seen.halted_since
            return Hang(f"rank {seen.rank} was stopped (SIGSTOP, or a debugger) {stopped:.0f} s ago")
        state = seen.progress[0]
        if state == PageState.FAILED and seen.rank not in self._failed:
            self._failed.add(seen.rank)
            return Hang(f"a collective of rank {seen.rank} failed: another rank is gone or late", by_rank=True)
        if state == PageState.STARTING:
            patience += STARTS_SECONDS
        is_expected = state in (PageState.STARTING, PageState.WATCHED, PageState.FAILED)
        stands_for = now - seen.progress_at
        if is_expected and stands_for > patience:
            return Hang(f"rank {seen.rank} has not got on for {stands_for:.0f} s")
        return None

    def _judged_server(self, pid: int, now: float) -> Hang | None:
        if not is_halted(pid):
            self.server_halted_since = None
            return None
        if self.server_halted_since is None:
            self.server_halted_since = now
        stopped = now - self.server_halted_since
        if stopped > self.timeout_seconds + FAILS_BY_ITSELF_SECONDS:
            return Hang(f"the process that starts ranks was stopped (SIGSTOP, or a debugger) {stopped:.0f} s ago")
        return None

    def ask(self) -> None:
        """Asks every rank to write where it is."""
        for seen in self._here():
            assert seen.page is not None
            seen.page.words[Word.WANTED] += 1

    def told(self) -> None:
        """Says to ranks that wait for it that where they are was told."""
        for seen in self._here():
            assert seen.page is not None
            seen.page.words[Word.TOLD] += 1

    def silent(self) -> list[int]:
        """Process ids of ranks that run and have not answered: no thread of theirs gets Python's lock."""
        found = []
        for seen in self._here():
            if _answer_of(seen) is None and not is_halted(seen.pid):
                found.append(seen.pid)
        return found

    def reports(self, written: Callable[[int], str]) -> list[RankReport]:
        """Where each rank stands. `written`: the stacks that a rank wrote to its log since it was asked."""
        found = []
        for rank in range(self.world_size):
            seen = self.seen.get(rank)
            if seen is not None:
                found.append(_report_of(seen, written(rank)))
        return found

    def tell(self, hang: Hang, reports: Sequence[RankReport], say: Callable[[str], object]) -> None:
        """Says where every rank stood, and writes it all to the run's logs."""
        say(f"{hang.reason}; where every rank stood:")
        by_words: dict[str, list[int]] = {}
        for report in reports:
            by_words.setdefault(report.in_words(), []).append(report.rank)
        for words, ranks in list(by_words.items())[:_MOST_GROUPS]:
            say(f"  {_ranks(ranks)}: {words}")
        if len(by_words) > _MOST_GROUPS:
            say(f"  and {len(by_words) - _MOST_GROUPS} more places")
        suspect = _suspect(reports)
        if suspect is not None:
            say(f"most likely the others wait for rank {suspect.rank}{_because(suspect)}")
            for line in suspect.stacks.get("main", [])[-_MOST_FRAMES:]:
                say(f"    {line}")
        name = Path("logs", HANG_FILE.format(attempt=self.attempt))
        if self._write(name, hang, reports):
            say(f"collectives, numbers and stacks of every rank: {Path(self.run_dir, name)}")

    def _write(self, name: Path, hang: Hang, reports: Sequence[RankReport]) -> bool:
        content = {
            "reason": hang.reason,
            "time": time.time(),
            "host": socket.gethostname(),
            "attempt": self.attempt,
            "timeout_seconds": self.timeout_seconds,
            "ranks": [vars(report) for report in reports],
        }
        if not self.is_ours():
            return False
        try:
            fd = open_inside(Path(self.run_dir), name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(fd, "w") as file:
                file.write(json.dumps(content, indent=1) + "\n")
        except OSError:
            return False
        return True

    def _here(self) -> list[Seen]:
        return [seen for seen in self.seen.values() if seen.page is not None and not seen.is_gone]

    def _beat(self, now: float) -> None:
        if not self.writes_heartbeat:
            return
        if now - self._written_at < EVERY_SECONDS and self.state == self._written_state:
            return
        self._written_at = now
        self._written_state = self.state
        self.write_heartbeat(self.state)

    def end(self, code: int) -> None:
        """Says how it all ended, with this exit code."""
        if self.writes_heartbeat:
            self.write_heartbeat({0: "done", 75: "preempted"}.get(code, "failed"))

    def write_heartbeat(self, state: str) -> None:
        """Says to probes and to a supervisor where the run is."""
        if not self.is_ours():
            return
        first = self.seen.get(0)
        step = 0
        steps = 0
        loss = None
        if first is not None and first.page is not None:
            step = first.page.words[Word.STEP]
            steps = first.page.words[Word.STEPS]
            loss = first.page.read_loss()
            if not math.isfinite(loss):
                loss = None
            if state == "starting":
                state = _state_of(first.page)
        ranks = []
        for seen in self.seen.values():
            ranks.append(RankBeat(seen.rank, seen.pid, _seen_as(seen)))
        beat = Heartbeat(
            state=state,
            step=step,
            steps=steps,
            loss=loss,
            progress_time=self._progress_time,
            attempt=self.attempt,
            world_size=self.world_size,
            ranks=ranks,
        )
        write_heartbeat(Path(self.run_dir), beat)


def _state_of(page: Page) -> str:
    """In the words of a heartbeat, of a rank that nobody has asked to stop."""
    if page.words[Word.STATE] < PageState.WATCHED:
        return "starting"
    return state_in_words(page.read_where())


def _seen_as(seen: Seen) -> str:
    if seen.is_gone:
        return "ended"
    if seen.halted_since is not None:
        return "frozen"
    return "running"


def _answer_of(seen: Seen) -> dict[str, Any] | None:
    assert seen.page is not None, f"rank {seen.rank} has no page"
    return read_report(seen.path, seen.page.words[Word.WANTED])


def _report_of(seen: Seen, written: str) -> RankReport:
    kernel = kernel_of(seen.pid)
    if seen.is_gone or not kernel or kernel.get("state", "").startswith("Z"):
        return RankReport(seen.rank, seen.pid, "gone", "", "", {}, {}, kernel, "")
    state = "stopped" if is_halted(seen.pid) else "running"
    where = ""
    answer = None
    collective = ""
    if seen.page is not None:
        where = seen.page.read_where()
        collective = words_of_collective(seen.page.words[Word.COLLECTIVE], seen.page.read_groups())
        answer = _answer_of(seen)
    if answer is None:
        # what stands in the page, and what the kernel and faulthandler say
        frames = main_stack(written)
        stacks = {}
        if frames:
            stacks["main"] = [f"{frame.function} ({frame.file}:{frame.line})" for frame in reversed(frames)]
        line = _line(frames)
        return RankReport(seen.rank, seen.pid, state, where, collective, {}, stacks, kernel, line)
    return RankReport(
        rank=seen.rank,
        pid=seen.pid,
        state=state,
        where=str(answer.get("where", "")),
        collective=str(answer.get("collective") or collective),
        counts=answer.get("counts", {}),
        stacks=answer.get("stacks", {}),
        kernel=kernel,
        line=str(answer.get("line", "")),
    )


def _line(frames: Sequence[Frame]) -> str:
    """The innermost line of the project, of a stack that is innermost first."""
    for frame in frames:
        if frame.is_ours:
            return f"in {frame}"
    return ""


def _suspect(reports: Sequence[RankReport]) -> RankReport | None:
    """The rank that the others wait for; None where one is as likely as another."""
    if not reports:
        return None
    least = min(report.blame for report in reports)
    likeliest = [report for report in reports if report.blame == least]
    if len(likeliest) == len(reports) > 1:
        return None
    return likeliest[0]


def _because(report: RankReport) -> str:
    if report.state == "stopped":
        return ": it was stopped"
    if report.state == "gone":
        return ": it is gone"
    if report.is_waiting:
        return ""
    return ": it is in no collective"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    if len(ranks) > _MOST_RANKS:
        shown += " and more"
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {shown}"
