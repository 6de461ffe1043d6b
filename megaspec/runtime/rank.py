"""One rank of a run: from its number and a run folder to an exit code."""

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from megaspec.checkpoint.comm import Comm, DistComm, SoloComm, on_first
from megaspec.checkpoint.fallback import file_elsewhere, newest_anywhere
from megaspec.checkpoint.format import FORMAT_VERSION
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.store import Store
from megaspec.core import counted
from megaspec.core.bounded_json import MAX_BYTES
from megaspec.core.errors import (
    AlertStop,
    HangError,
    HardwareError,
    MegaspecError,
    MemoryRunOut,
    Preempted,
    RecipeError,
    printable,
)
from megaspec.core.regular_files import disk_failures_told, raise_disk_failure, read_inside
from megaspec.launcher import beat as beats
from megaspec.launcher import exit_file
from megaspec.launcher.loopback import listen_at
from megaspec.launcher.memory_kills import memory_kills
from megaspec.launcher.rendezvous import FileRendezvous, Rendezvous, TcpRendezvous
from megaspec.launcher.stop import ask_to_stop, seconds_since_request, stopped_because, watch_signals
from megaspec.launcher.suspects import SUSPECTS, tell_suspects
from megaspec.log import prediction
from megaspec.log.alerts import Alerts
from megaspec.log.background import CLOSE_SECONDS
from megaspec.log.events import RunEnded, RunStarted
from megaspec.log.prediction import Prediction
from megaspec.log.sinks import METRICS, open_sinks
from megaspec.parallelism.group_memory import outside_torch
from megaspec.plugins import load, loaded
from megaspec.rules.belonging import objections
from megaspec.runtime.build import build, mesh_of
from megaspec.runtime.loop import Run, always
from megaspec.runtime.out_of_memory import is_out_of_memory, out_of_memory
from megaspec.runtime.own_heartbeat import OwnHeartbeat
from megaspec.runtime.plugins import loaded_builders
from megaspec.runtime.position import Position, Watchdog, ignore_code
from megaspec.runtime.watched import begin_watched, is_told_by_watcher, watched
from megaspec.spec import Spec

_TO_LEAVE = 2.0
"""Seconds of the grace that are kept for what follows the sinks' end: ranks part, and their processes end."""
_GRACE = 1.5
"""Seconds that a collective has to fail by itself before the watchdog ends its rank."""
_WATCHER_SECONDS = 6.0
"""What a launcher that watches gets beyond that: it says more, and ends all ranks."""


def main(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    attempt: int,
    store: Rendezvous,
    timeout_seconds: float,
    lock_token: int | None = None,
    plugins: Sequence[str] = (),
    why: str = "",
) -> int:
    """Trains the run whose spec.json is in `run_dir`. -> exit code (core/errors.py).

    `store`: where the ranks of this attempt meet. `timeout_seconds`: bound of every collective. `lock_token`: the
    fencing token of a launcher that holds the run's lock; None takes the lock here, on rank 0. `plugins`: packages
    that the command line named. `why`: what a supervisor starts this attempt after.
    """
    me = RankInfo(rank, world_size, local_rank, attempt, store, timeout_seconds)

    def train() -> None:
        load(plugins)
        with suspects_told(Path(run_dir), me):
            run_rank(Path(run_dir), me, lock_token, why)

    return exit_code_of(me, train)


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in its world."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    store: Rendezvous
    timeout_seconds: float


@contextmanager
def suspects_told(run_dir: Path, me: RankInfo) -> Iterator[None]:
    """Leaves in the run's folder which ranks are suspected, for a supervisor that keeps away from their devices."""
    try:
        yield
    except HardwareError as error:
        try:
            tell_suspects(run_dir, attempt=me.attempt, ranks=error.ranks, why=str(error))
        except OSError as failure:
            # the exit code and this rank's own words are left
            tell(me, f"{run_dir / SUSPECTS}: {failure.strerror}")
        raise


def exit_code_of(me: RankInfo, work: Callable[[], None]) -> int:
    """What a rank is started for, from its first request to stop to its exit code; errors are told."""
    watch_signals()
    begin_watched()
    try:
        # also before `explained` is entered, and behind it
        with disk_failures_told():
            work()
        return 0
    except MegaspecError as error:
        tell(me, error)
        return error.exit_code
    except RuntimeError as error:
        # before there is a watchdog: while ranks meet
        if not isinstance(error, dist.DistError) and not is_collective_failure(error):
            raise
        traceback.print_exc()
        tell(me, "a collective failed: another rank is gone or late")
        return HangError.exit_code


def tell(me: RankInfo, what: object) -> None:
    """An error in this rank's words, on stderr."""
    text = str(what)
    # what `together` reports names its ranks by itself
    if me.world_size > 1 and not text.startswith("rank "):
        text = f"rank {me.rank}: {text}"
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)


def is_collective_failure(error: RuntimeError) -> bool:
    """Whether an error comes from gloo's transport."""
    text = str(error)
    marks = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "gloo", "Broken pipe")
    return any(mark in text for mark in marks)


def read_spec(run_dir: Path) -> Spec:
    """The Spec that every rank builds. RecipeError: its file is no file."""
    spec = Spec.model_validate_json(read_file(run_dir, "spec.json"))
    assert spec.format_version == FORMAT_VERSION, f"a Spec of format {spec.format_version}, {FORMAT_VERSION} is read"
    return spec


def read_prediction(run_dir: Path) -> Prediction:
    """What was predicted when this start was prepared. RecipeError: its file is no file."""
    return Prediction.model_validate_json(read_file(run_dir, prediction.FILE_NAME))


def read_file(run_dir: Path, name: str) -> bytes:
    """A file of a run's folder. RecipeError: it can't be read. WriteError: a failing disk doesn't let it be."""
    try:
        return read_inside(run_dir, name, limit=MAX_BYTES)
    except OSError as error:
        raise_disk_failure(error)
        raise RecipeError(f"{run_dir / name} can't be read: {error.strerror}") from None


def run_rank(run_dir: Path, me: RankInfo, lock_token: int | None, why: str = "") -> None:
    """Sets up device, groups, lock and sinks, and trains. `why`: see `main`."""
    spec = read_spec(run_dir)
    assert set(spec.plugins) <= set(loaded()), f"spec.json needs plugins {spec.plugins}, loaded are {loaded()}"
    # here already: a builder that can't be imported is told before ranks wait for each other
    builders = loaded_builders()
    assert spec.world_size == me.world_size, f"spec.json is for {spec.world_size} ranks, {me.world_size} were started"
    device = pick_device(spec, me.local_rank)
    # What the stack holds ends in the opposite order: sinks are closed and the end is recorded while the lock is held
    # and the ranks are together; the process groups end last.
    with ExitStack() as stack:
        comm: Comm = SoloComm()
        if me.world_size > 1:
            join_world(me, device)
            stack.push(leave_world)
            comm = DistComm(device=device)
        lock = take_lock(run_dir, comm, lock_token, stack)
        record: Callable[[int], object] = ignore_code
        if lock_token is None:
            # no launcher of ours reads the exit codes of these ranks
            newest = partial(newest_step, run_dir, spec)
            token = on_first(comm, lambda: begin(run_dir, lock, newest))
            record = stack.enter_context(Ending(RunLock.held(run_dir, token), me.rank, newest)).record
        timeout = collective_timeout(me, device)
        position = Position(device)
        stack.enter_context(explained(spec, run_dir, position, me))
        stack.enter_context(bounded(position, me, record=record))
        seed_generators(spec.train.seed)
        built = build(spec, mesh=mesh_of(spec, rank=me.rank, device=device, timeout=timeout), position=position)
        is_ours = always if lock is None else lock.is_ours
        run = Run(
            built,
            run_dir,
            Store(run_dir, lock=lock),
            comm,
            prediction=read_prediction(run_dir),
            is_ours=is_ours,
        )
        run.start()
        if me.rank == 0:
            assert lock is not None, "rank 0 without the run's lock"
            sinks = open_sinks(
                spec.log,
                run_dir,
                step=run.step,
                elsewhere=file_elsewhere(spec.checkpoint.fallback_dir, run_dir, METRICS),
                check=lock.check_line,
                builders=builders.sinks,
                close_seconds=partial(patience_with_sinks, spec.launcher.grace_seconds),
            )
            run.emit = Alerts(spec.log.alerts, stack.enter_context(sinks), stop=ask_to_stop)
        if beats.current() is None and me.rank == 0:
            stack.enter_context(
                OwnHeartbeat(run_dir, position, attempt=me.attempt, world_size=me.world_size, is_ours=is_ours)
            )
        run.started = started(spec, run_dir, step=run.step, attempt=me.attempt, why=why)
        run.emit(run.started)
        how = "failed"
        try:
            train_until_stopped(run)
            how = "done"
        except MegaspecError as error:
            how = type(error).__name__
            raise
        finally:
            run.emit(RunEnded(step=run.step, how=how))


def train_until_stopped(run: Run) -> None:
    """Trains. Raises AlertStop in place of Preempted where an alert of this rank asked the run to stop."""
    try:
        run.train()
    except Preempted as error:
        reason = stopped_because()
        if not reason:
            raise
        raise AlertStop(f"{reason}; {error}") from error


def patience_with_sinks(grace_seconds: float) -> float:
    """How long sinks may still send what they have not sent: a rank that was asked to stop is killed after its grace,
    and would then not have ended well."""
    asked = seconds_since_request()
    if asked is None:
        return CLOSE_SECONDS
    left = grace_seconds - asked - _TO_LEAVE
    return min(CLOSE_SECONDS, max(0.0, left))


def seed_generators(seed: int) -> None:
    """Seeds this process's generators, for what a plugin draws: the training step draws from none of them."""
    random.seed(seed)
    torch.manual_seed(seed)


def newest_step(run_dir: Path, spec: Spec) -> int:
    """The step of the run's newest checkpoint that is whole and its own, wherever it was saved; 0: there is none."""
    return newest_anywhere(run_dir, spec.checkpoint.fallback_dir, partial(objections, run=spec)) or 0


def begin(run_dir: Path, lock: RunLock | None, newest: Callable[[], int]) -> int:
    """Rank 0: says in the run folder that a start is under way. -> the lock's token, by which all ranks know it."""
    assert lock is not None, "rank 0 without the run's lock"
    exit_file.begin(run_dir, step=newest())
    return lock.token


class Ending:
    """While entered: how this rank ends goes into the run folder, for who does not see its exit code.

    Nothing is written once the `lock` went to another job. `newest`: the newest step that is saved.
    """

    def __init__(self, lock: RunLock, rank: int, newest: Callable[[], int]):
        self._lock = lock
        self._rank = rank
        self._newest = newest
        self._killed_before = memory_kills()

    def __enter__(self) -> "Ending":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.record(0)
        elif isinstance(error, MegaspecError):
            self.record(error.exit_code)
        else:
            self.record(MegaspecError.exit_code)

    def record(self, code: int) -> None:
        """Writes an end: a failure of any rank, and that all went well from the first."""
        if code in (0, Preempted.exit_code) and self._rank != 0:
            return
        if not self._lock.is_ours():
            return
        now = memory_kills()
        if code == HangError.exit_code and now is not None and now != self._killed_before:
            code = MemoryRunOut.exit_code  # the rank that is missed was killed for it
        exit_file.end(self._lock.run_dir, code, step=self._newest())


@contextmanager
def explained(spec: Spec, run_dir: Path, position: Position, me: RankInfo) -> Iterator[None]:
    """Raises MemoryRunOut in place of torch's or NCCL's error, and WriteError in place of one of a disk's that is full
    or fails."""
    try:
        with disk_failures_told():
            yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # pp is the outermost axis of the ranks
        ranks_per_stage = spec.world_size // spec.parallelism.pp
        raise out_of_memory(
            read_prediction(run_dir),
            rank=f"{me.rank} of {spec.world_size}",
            stage=me.rank // ranks_per_stage,
            where=position.what,
            cause=str(error),
        ) from error


@contextmanager
def bounded(position: Position, me: RankInfo, *, record: Callable[[int], object] = ignore_code) -> Iterator[None]:
    """Ends this rank when it has not got on for a collective's time, and says where every rank stood when one fails.

    `record` gets the exit code of a rank that is ended so. Raises HangError for a collective that failed.
    """
    with watched(position):
        is_started_elsewhere = isinstance(me.store, TcpRendezvous)
        if me.world_size == 1 and not is_started_elsewhere:
            # the launcher watches it; a process that uses this as a library is nobody's to end
            yield
            return
        with _bounded_by_itself(position, me, record):
            yield


@contextmanager
def _bounded_by_itself(position: Position, me: RankInfo, record: Callable[[int], object]) -> Iterator[None]:
    store = None
    if me.world_size > 1:
        store = dist.PrefixStore(f"attempt-{me.attempt}", dist.distributed_c10d._get_default_store())
    seconds = me.timeout_seconds + _GRACE
    if beats.current() is not None:
        seconds += _WATCHER_SECONDS
    watchdog = Watchdog(position, rank=me.rank, world_size=me.world_size, store=store, seconds=seconds, record=record)
    with watchdog:
        try:
            yield
        except RuntimeError as error:
            # gloo raises plain RuntimeErrors when a peer is gone or late
            is_failure = isinstance(error, dist.DistError) or is_collective_failure(error)
            if is_out_of_memory(error) or not is_failure:
                raise
            if not is_told_by_watcher(error):
                watchdog.tell("a collective failed: another rank is gone or late", error)
            raise HangError(f"a collective failed: {str(error).splitlines()[0]}") from error


def started(spec: Spec, run_dir: Path, *, step: int, attempt: int, why: str = "") -> RunStarted:
    """The run's first event, with what speed is measured against."""
    predicted = read_prediction(run_dir)
    return RunStarted(
        step=step,
        steps=spec.train.steps,
        attempt=attempt,
        why=why,
        world_size=spec.world_size,
        flops_per_token_causal=predicted.flops_per_token_causal,
        flops_per_token_full=predicted.flops_per_token_full,
        peak_flops=predicted.peak_flops,
        no_peak=predicted.no_peak,
    )


def leave_world(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
    """Ends the process groups, unless this rank failed: others may then never come, and NCCL would wait for them."""
    if kind is None or issubclass(kind, (Preempted, AlertStop)):
        dist.destroy_process_group()
    return False


def pick_device(spec: Spec, local_rank: int) -> torch.device:
    """This rank's device, made current."""
    if spec.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    leave_room(spec, device)
    return device


def leave_room(spec: Spec, device: torch.device) -> None:
    """Keeps torch's allocator from what NCCL takes: what it caches it gives back for tensors, and not for NCCL, which
    takes memory when a group first sends, at the end of the first backward pass."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    share = 1 - outside_torch(spec.parallelism) / total_bytes
    # what NCCL takes was measured on large GPUs; a small one may have no more than that
    torch.cuda.set_per_process_memory_fraction(max(0.5, share), device)


def collective_timeout(me: RankInfo, device: torch.device) -> timedelta:
    """The bound of a group's collectives. NCCL's own end of a rank says nothing of the others, and takes from them who
    could: it gets longer than who watches needs to tell where every rank stands."""
    seconds = me.timeout_seconds
    if device.type == "cuda":
        seconds += _GRACE + _WATCHER_SECONDS + 5.0
    return timedelta(seconds=seconds)


def join_world(me: RankInfo, device: torch.device) -> None:
    """Makes the default process group."""
    counted.forget()
    timeout = collective_timeout(me, device)
    meeting: dist.Store
    if isinstance(me.store, FileRendezvous):
        meeting = dist.FileStore(me.store.path, me.world_size)
    else:
        meeting = tcp_store(me.store, me, timeout)
    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "nccl"
        device_id = device
    dist.init_process_group(
        backend,
        store=meeting,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timeout,
        device_id=device_id,
    )


def tcp_store(where: TcpRendezvous, me: RankInfo, timeout: timedelta) -> dist.Store:
    """A store on rank 0's host whose keys begin with the attempt's prefix."""
    serves = me.rank == 0 and not where.is_open
    listening = None
    if serves:
        listening = listen_at(where.host, where.port)
    store = dist.TCPStore(
        where.host, where.port, me.world_size, is_master=serves, timeout=timeout, master_listen_fd=listening
    )
    return dist.PrefixStore(where.prefix, store)


def take_lock(run_dir: Path, comm: Comm, token: int | None, stack: ExitStack) -> RunLock | None:
    """The run's lock on rank 0, the launcher's where it holds one; None on the other ranks."""
    if token is not None:
        return RunLock.held(run_dir, token) if comm.rank == 0 else None
    lock = RunLock(run_dir)

    def acquire() -> None:
        stack.enter_context(lock)

    # a lock that another job holds is every rank's error
    on_first(comm, acquire)
    return lock if comm.rank == 0 else None
