"""Ranks as processes of this machine: start, watch, stop, start again. Never imports torch."""

import errno
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaspec.core.errors import WriteError, printable
from megaspec.core.regular_files import open_inside
from megaspec.launcher.memory_kills import memory_kills
from megaspec.launcher.stop import STACKS
from megaspec_launchers.outcome import HANG, INTERNAL, MEMORY, PREEMPTED, WORTH_ANOTHER_ATTEMPT, Outcome, RankEnd, judge
from megaspec_launchers.rank_factory import RankFactory, ServerGone
from megaspec_launchers.signals import StopRequests
from megaspec_launchers.standing import UNKNOWN, Standing, is_halted, main_stack
from megaspec_launchers.watch import ANSWER_SECONDS, LOOK_SECONDS, Hang, Watch

ENTRY = "megaspec.runtime.rank:main"
# torch.optim imports the compiler when an optimizer is made: two seconds, here once instead of in every rank.
PRELOADED = ("torch", "torch._dynamo", "torch._inductor")
# How long ranks may go on after another rank has failed: they can't finish a step without it.
AFTER_FAILURE_SECONDS = 5.0
# Between the request to write stacks and the kill.
STACKS_SECONDS = 1.0
# How long killed ranks may take to go: the kernel gives the memory of a large one back for seconds.
AFTER_KILL_SECONDS = 60.0
# How long what follows a traceback of rank 0 is kept from the terminal: a failure of another rank, which explains it,
# is heard of meanwhile.
HOLD_SECONDS = 10.0
_TRACEBACK = b"Traceback (most recent call last):"
# File descriptors.
STDOUT = 1
STDERR = 2
# Of a rank's log, what is shown of the one that failed and what is searched for stacks.
TAIL_BYTES = 2000
STACK_BYTES = 1 << 20


def launch(
    run_dir: str,
    *,
    ranks: int,
    entry: str = ENTRY,
    max_restarts: int = 0,
    grace_seconds: float = 30.0,
    timeout_seconds: float = 600.0,
    arguments: dict[str, Any] | None = None,
    factory: RankFactory | None = None,
    is_ours: Callable[[], bool] = lambda: True,
    writes_heartbeat: bool = False,
    first_attempt: int = 0,
    meeting: str | None = None,
    heard: Callable[[Outcome], None] = lambda outcome: None,
) -> int:
    """Runs `ranks` processes until all have ended. -> the exit code of the run (core/errors.py).

    Each rank is a call `entry(run_dir, rank=, world_size=, local_rank=, attempt=, store=, timeout_seconds=,
    **arguments)` that returns an exit code; `entry` is "module:function", `arguments` plain JSON data, `store` a
    FileRendezvous that no other attempt has seen. Rank 0 writes to this terminal, its stderr also to
    run_dir/logs/rank-0.log; the others write to run_dir/logs/rank-N.log. When a rank has failed, what rank 0 says of
    missing it goes to its log alone: the terminal shows the first cause.

    SIGTERM, SIGINT, SIGHUP or SIGUSR1 here reaches every rank once, as SIGTERM. Ranks that still run `grace_seconds`
    later, or when a second signal comes, are killed. When a rank fails, the others are stopped; when the failure is one
    that another attempt may not meet, ranks are started again, at most `max_restarts` times. Once the first rank has
    ended well, the others have `timeout_seconds`. Ranks never outlive this process. SIGUSR2 makes every rank write its
    stacks, and stops nothing. A rank that does not get on for `timeout_seconds`, or is frozen for as long, ends the
    attempt with 74, and where every rank stood is told within 5 s (watch.py).

    `factory`: where ranks come from, when several launches share one; it is left open. `is_ours`: whether this job
    still has the run folder; what rank 0 says goes to its log only then. `writes_heartbeat`: into run_dir, for probes
    and for who watches this process (megaspec/launcher/heartbeat.py). `first_attempt`: the number of the first attempt.
    `meeting`: a folder that is the user's alone, in which ranks meet; None makes one, which stays behind where this
    process is killed. `heard` gets what each attempt came to. Call in the main thread. WriteError: the log files can't
    be made, or are no plain files.
    """
    own_factory = None
    if factory is None:
        entry_module, _, _ = entry.partition(":")
        own_factory = RankFactory((*PRELOADED, entry_module), threads=threads_of_a_rank(ranks))
        factory = own_factory
    try:
        with StopRequests() as stop, _meeting_folder(meeting) as folder:
            for restart in range(max_restarts + 1):
                attempt = first_attempt + restart
                keywords = {
                    "world_size": ranks,
                    "attempt": attempt,
                    "store": {"path": os.path.join(folder, f"attempt-{attempt}")},
                    "timeout_seconds": timeout_seconds,
                    **(arguments or {}),
                }
                watch = Watch(
                    store=keywords["store"]["path"],
                    world_size=ranks,
                    attempt=attempt,
                    timeout_seconds=timeout_seconds,
                    run_dir=run_dir,
                    writes_heartbeat=writes_heartbeat,
                    is_ours=is_ours,
                )
                times = {"grace_seconds": grace_seconds, "timeout_seconds": timeout_seconds}
                outcome = _Attempt(run_dir, entry, keywords, factory, stop, is_ours, watch, **times).run()
                heard(outcome)
                if outcome.code not in WORTH_ANOTHER_ATTEMPT or stop.count:
                    break
                if restart < max_restarts:
                    _say(f"starting again, restart {restart + 1} of {max_restarts}")
            watch.end(outcome.code)
            return outcome.code
    finally:
        if own_factory is not None:
            own_factory.close()


def _meeting_folder(where: str | None) -> tempfile.TemporaryDirectory[str]:
    """Where ranks meet; what can't be removed of it in the end costs nothing."""
    return tempfile.TemporaryDirectory(prefix="megaspec-", dir=where, ignore_cleanup_errors=True)


def threads_of_a_rank(ranks: int) -> int:
    """The cores that this process may use, shared out; 1 where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@dataclass
class _Rank:
    rank: int
    pid: int
    signals: dict[int, float] = field(default_factory=dict)
    """What it was sent to end it, and when first (monotonic seconds): a later death by one is a consequence."""
    standing: Standing = UNKNOWN


@dataclass
class _Attempt:
    """One life of all ranks. Waits in one selector for the server, for signals and for what rank 0 says."""

    run_dir: str
    entry: str
    keywords: dict[str, Any]
    factory: RankFactory
    stop: StopRequests
    is_ours: Callable[[], bool]
    watch: Watch
    grace_seconds: float
    timeout_seconds: float
    running: dict[int, _Rank] = field(default_factory=dict)
    ends: list[RankEnd] = field(default_factory=list)
    stopping: int = 0
    stacks_told: int = 0
    """Requests to write stacks that came from outside and were passed on."""
    deadline: float = float("inf")
    stacks_asked: bool = False
    is_killed: bool = False
    """Ranks were killed, and their ends are still to come."""
    is_given_up: bool = False
    """They did not come, so that the server was killed."""
    logs: list[int] = field(default_factory=list)
    began_at: list[int] = field(default_factory=list)
    """Bytes that earlier attempts had left in each rank's log."""
    held: bytearray = field(default_factory=bytearray)
    """What rank 0 wrote to stderr and the terminal has not been shown."""
    held_until: float = float("inf")
    """Monotonic seconds at which it is shown although no rank has failed."""
    asked_at: list[int] = field(default_factory=list)
    """Bytes in each rank's log when ranks were asked for their stacks before they are killed."""
    hang: Hang | None = None
    """Why ranks were asked where they are, until that is told."""
    told_at: float = float("inf")
    """Monotonic seconds at which it is told, with what was answered by then."""
    is_hang_told: bool = False
    """Where every rank stood was told: later places are those of its consequences."""
    are_stacks_wanted: bool = False
    """Ranks that have not answered were asked by a signal."""

    def run(self) -> Outcome:
        if self.stop.count:
            return self._not_started()
        self.stacks_told = self.stop.stacks
        self.logs = _open_logs(self.run_dir, self.keywords["world_size"])
        try:
            self.began_at = self._log_sizes()
            outcome = self._run()
            if outcome.cause is None:
                self._show_held()
            else:
                self._tell_cause(outcome.cause)
            return outcome
        finally:
            for fd in self.logs:
                os.close(fd)

    def _run(self) -> Outcome:
        killed_before = memory_kills()
        pipe, stderr = os.pipe()
        os.set_blocking(pipe, False)
        try:
            self.factory.open()
            with selectors.DefaultSelector() as self._selector:
                self._selector.register(self.factory, selectors.EVENT_READ)
                self._selector.register(self.stop, selectors.EVENT_READ)
                self._selector.register(pipe, selectors.EVENT_READ)
                if not self._wait_until_ready():
                    return self._not_started()
                self._start(stderr)
                for message in self.factory.ended():
                    self._ended(message)
                while self.running:
                    self._wait()
                    self._act()
        except ServerGone:
            if self.is_given_up:
                return Outcome(HANG, None, "killed ranks were not heard of")
            return _server_gone(_risen(killed_before), self.factory.killed_by())
        finally:
            if self.running:
                self.factory.close()
            self._copy(pipe)
            for fd in (pipe, stderr):
                os.close(fd)
        killed = _risen(killed_before)
        outcome = judge(self.ends, memory_kills=killed)
        if killed and outcome.cause is not None and not outcome.cause.for_memory:
            _say(f"memory ran out meanwhile: the kernel killed {killed} of this job's processes for it")
        return outcome

    def _not_started(self) -> Outcome:
        why = f"{self.stop.last} before the ranks had started"
        _say(f"{why}: nothing is lost, start again to go on")
        return Outcome(PREEMPTED, None, why)

    def _wait_until_ready(self) -> bool:
        """Waits for the imports of a cold server. -> False when a request to stop came first."""
        while not self.factory.is_ready:
            self._wait()
            if self.stop.count:
                return False
        return True

    def _start(self, stderr: int) -> None:
        with open(os.devnull, "rb") as nothing:
            for rank, log in enumerate(self.logs):
                # rank 0 is on the terminal, its stderr on the way there through a pipe that is also logged
                output, errors = (STDOUT, stderr) if rank == 0 else (log, log)
                pid = self.factory.start(
                    entry=self.entry,
                    run_dir=self.run_dir,
                    keywords={"rank": rank, "local_rank": rank} | self.keywords,
                    files=(nothing.fileno(), output, errors),
                )
                self.running[pid] = _Rank(rank, pid)
                self.watch.add(rank, pid)

    def _wait(self) -> None:
        """Until something happens or the deadline is there; takes in what happened."""
        until = min(self.deadline, self.held_until, self.told_at, time.monotonic() + LOOK_SECONDS)
        ready = self._selector.select(max(0.0, until - time.monotonic()))
        for key, _ in ready:
            if key.fileobj is self.stop:
                self.stop.clear()
            elif key.fileobj is self.factory:
                for message in self.factory.receive():
                    self._ended(message)
            elif not self._copy(key.fd):
                self._selector.unregister(key.fd)

    def _ended(self, message: dict[str, Any]) -> None:
        rank = self.running.pop(message["ended"])
        self.watch.ended(rank.rank)
        # a rank whose end is heard of only now may have been dead already when the signal was sent to it
        by_launcher = message["at"] >= rank.signals.get(message["signal"], float("inf"))
        end = RankEnd(rank.rank, message["code"], message["signal"], by_launcher, rank.standing, ended_at=message["at"])
        self.ends.append(end)
        if not end.is_clean and self.running:
            self._signal_all(signal.SIGTERM)
            self._not_later_than(min(self.grace_seconds, AFTER_FAILURE_SECONDS))
        elif end.is_clean:
            self._not_later_than(self.timeout_seconds)

    def _act(self) -> None:
        """Passes requests on, shows what was held back in vain, and kills ranks whose time is over."""
        if time.monotonic() >= self.held_until:
            self._show_held()
        self._look()
        if self.stop.stacks > self.stacks_told:
            self.stacks_told = self.stop.stacks
            _say(f"{signal.Signals(STACKS).name}: every rank writes its stacks to its log and goes on")
            self._signal_all(STACKS)
        # the first request to stop asks ranks, the second kills them
        if self.stop.count > self.stopping:
            self.stopping = self.stop.count
            self.watch.state = "stopping"
            if self.stopping == 1:
                _say(
                    f"{self.stop.last}: ranks finish their step and save, within {self.grace_seconds:g} s; "
                    "another signal kills them at once"
                )
                self._signal_all(signal.SIGTERM)
                self._not_later_than(self.grace_seconds)
            else:
                _say(f"{self.stop.last} again: killing {_count(len(self.running))}")
                self._kill_all()
        elif time.monotonic() >= self.deadline:
            if self.is_killed:
                self._give_up()
            elif self.stacks_asked:
                self._kill_all()
            else:
                # says where a rank hangs; the kill follows when it had time to write
                self.stacks_asked = True
                self.asked_at = self._log_sizes()
                self._signal_all(STACKS)
                self.deadline = time.monotonic() + STACKS_SECONDS

    def _look(self) -> None:
        """Whether ranks get on. Where one hangs, all are asked where they are, that is told, and they are killed."""
        found = self.watch.look(self.factory.pid)
        if self.is_killed:
            return
        # one that ends by itself may be asked already; that it hangs all the same counts more
        if found is not None and (self.hang is None or (self.hang.by_rank and not found.by_rank)):
            self.hang = found
            self.asked_at = self._log_sizes()
            self.are_stacks_wanted = False
            self.told_at = time.monotonic() + ANSWER_SECONDS
            self.watch.ask()
        if self.hang is None or time.monotonic() < self.told_at:
            return
        if not self.are_stacks_wanted:
            self.are_stacks_wanted = True
            silent = self.watch.silent()
            for pid in silent:
                if pid in self.running:
                    self.factory.signal(pid, STACKS)
            if silent:
                self.told_at = time.monotonic() + STACKS_SECONDS
                return
        self._tell_hang(self.hang)

    def _tell_hang(self, hang: Hang) -> None:
        self.hang = None
        self.told_at = float("inf")
        # a rank that failed by itself explains why others miss it: that is told when all have ended
        is_explained = any(end.explains_others for end in self.ends)
        if self.is_hang_told:
            _say(hang.reason)  # where ranks stood was told when it began
        elif not hang.by_rank or not is_explained:
            self.is_hang_told = True
            reports = self.watch.reports(lambda rank: self._written(rank, since=self.asked_at[rank]))
            self.watch.tell(hang, reports, _say)
        self.watch.told()
        if hang.by_rank:
            return  # it ends by itself, and says why
        self.watch.state = "hung"
        self._kill_all()
        if is_halted(self.factory.pid):
            self._give_up()

    def _give_up(self) -> None:
        """Killed ranks have not been heard of: the server that reports them is stopped, or the kernel holds a rank."""
        ranks = ", ".join(str(rank.rank) for rank in self.running.values())
        why = ""
        if is_halted(self.factory.pid):
            why = "; the process that starts ranks, and hears of their ends, was stopped (SIGSTOP, or a debugger)"
        _say(f"no end of rank {ranks} was heard of after the kill{why}")
        self.is_given_up = True
        self.deadline = float("inf")
        self.factory.kill()

    def _not_later_than(self, seconds: float) -> None:
        if self.is_killed:
            return
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _signal_all(self, number: int) -> None:
        for pid, rank in self.running.items():
            if number != STACKS:
                rank.signals.setdefault(number, time.monotonic())
            self.factory.signal(pid, number)

    def _kill_all(self) -> None:
        self.is_killed = True
        self.deadline = time.monotonic() + AFTER_KILL_SECONDS
        for pid, rank in self.running.items():
            written = ""
            if self.asked_at:
                written = self._written(rank.rank, since=self.asked_at[rank.rank])
            rank.standing = Standing(is_halted(pid), main_stack(written))
            rank.signals.setdefault(signal.SIGKILL, time.monotonic())
            self.factory.signal(pid, signal.SIGKILL, group=True)

    def _log_sizes(self) -> list[int]:
        return [_size(log) for log in self.logs]

    def _written(self, rank: int, *, since: int, most: int = STACK_BYTES) -> str:
        """The end of what a rank has written to its log since it had `since` bytes."""
        log = self.logs[rank]
        start = max(since, _size(log) - most)
        try:
            return os.pread(log, most, start).decode(errors="replace")
        except OSError:
            return ""  # a failing disk costs the text

    def _copy(self, pipe: int) -> bool:
        """What rank 0 wrote to stderr, to its log and to this stderr. -> False when nothing more can come."""
        while True:
            try:
                data = os.read(pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self.is_ours():
                _write(self.logs[0], data)
            self._show(data)

    def _show(self, data: bytes) -> None:
        """On the terminal: at once, unless it may be a consequence of another rank's failure."""
        has_failed = any(not end.is_clean for end in self.ends)
        if has_failed or self.held:
            self.held += data
            return
        begin = data.find(_TRACEBACK)
        if begin >= 0:
            # torch puts the rank's number before it
            begin = data.rfind(b"\n", 0, begin) + 1
            self.held += data[begin:]
            self.held_until = time.monotonic() + HOLD_SECONDS
            data = data[:begin]
        _write(STDERR, data)

    def _show_held(self) -> None:
        _write(STDERR, bytes(self.held))
        self.held.clear()
        self.held_until = float("inf")

    def _tell_cause(self, cause: RankEnd) -> None:
        """The first cause on the terminal, and where the rest is."""
        rank = cause.rank
        logs = Path(self.run_dir, "logs")
        if rank == 0 or not cause.explains_others:
            self._show_held()
        _say(f"{cause}; what it wrote: {logs / _log_name(rank)}")
        if rank == 0:
            return  # its stderr is on the terminal
        written = self._written(rank, since=self.began_at[rank], most=TAIL_BYTES)
        for line in written.splitlines()[-15:]:
            shown = printable(line, keep="\t")
            _write(STDERR, f"  [rank {rank}] {shown}\n".encode())
        if self.held:
            named = printable(str(logs / _log_name("*")))
            _write(STDERR, f"  what other ranks wrote when they missed it: {named}\n".encode())


def _server_gone(killed: int, killed_by: int | None) -> Outcome:
    """What an attempt comes to that lost the process its ranks were forked from, and with it the ranks.

    `killed`: processes that the kernel killed meanwhile because memory ran out. `killed_by`: the signal that ended it.
    """
    if killed:
        why = "the process that starts ranks was killed because memory ran out"
        _say(f"{why}, and its ranks with it")
        return Outcome(MEMORY, None, why)
    if killed_by is not None:
        # it writes nothing then; the code is that of a killed rank
        may_be_memory = ", by hand or because memory ran out" if killed_by == signal.SIGKILL else ""
        name = signal.Signals(killed_by).name
        why = f"the process that starts ranks was killed by {name}{may_be_memory}"
        _say(f"{why}, and its ranks with it")
        return Outcome(HANG, None, why)
    why = "the process that starts ranks ended"
    _say(f"{why}; its message is above")
    return Outcome(INTERNAL, None, why)


def _risen(before: int | None) -> int:
    """How many processes of this job the kernel has killed since then because memory ran out; 0 where it can't say."""
    now = memory_kills()
    if before is None or now is None:
        return 0
    return now - before


def _open_logs(run_dir: str, ranks: int) -> list[int]:
    logs: list[int] = []
    try:
        Path(run_dir, "logs").mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            name = Path("logs", _log_name(rank))
            logs.append(open_inside(Path(run_dir), name, os.O_RDWR | os.O_APPEND | os.O_CREAT))
    except OSError as error:
        for fd in logs:
            os.close(fd)
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "remove it, make it writable"
        raise WriteError(f"{error.filename}: {error.strerror}; {remedy} or choose another run_dir") from None
    return logs


def _size(log: int) -> int:
    """Bytes of a log; 0 where a failing disk doesn't say."""
    try:
        return os.fstat(log).st_size
    except OSError:
        return 0


def _log_name(rank: int | str) -> str:
    return f"rank-{rank}.log"


def _write(fd: int, data: bytes) -> None:
    """A terminal that was closed or a full disk costs the text, never the run."""
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        pass


def _count(ranks: int) -> str:
    if ranks == 1:
        return "1 rank"
    return f"{ranks} ranks"


def _say(text: str) -> None:
    _write(STDERR, f"megaspec: {printable(text)}\n".encode())
