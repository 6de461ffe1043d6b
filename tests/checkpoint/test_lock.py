"""One writer per run folder: a second is refused by name, a dead one's place is taken, a zombie publishes nothing."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megaspec.checkpoint import lock as lock_module
from megaspec.checkpoint.files import free_bytes
from megaspec.checkpoint.lock import RunLock, decode_holder, process_start
from megaspec.checkpoint.store import Store
from megaspec.core import faults, regular_files
from megaspec.core.errors import MegaspecError, RunLockedError, WriteError
from tests.checkpoint.checkpoint_cases import CHUNK, FORKS, SOLO, assert_holds, counters_read, save
from tests.small_disks import empty, fill, small_disk


@pytest.fixture(autouse=True)
def _no_fault_stays():
    yield
    faults.disarm()


def hold(run: str, told: Connection, *, with_child: bool = False) -> None:
    """Take the lock, say so, and keep it until killed."""
    lock = RunLock(run).acquire()
    child = os.fork() if with_child else 0
    if with_child and child == 0:
        time.sleep(60)
        os._exit(0)
    told.send((lock.token, child))
    time.sleep(60)


def started(run: Path, **options: bool) -> tuple:
    said, told = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=hold, args=(str(run), told), kwargs=options, daemon=False)
    process.start()
    assert said.poll(30)
    return process, *said.recv()


def seconds(action) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def refused(run: Path, **options: float) -> str:
    with pytest.raises(RunLockedError) as caught:
        RunLock(run, **options).acquire()
    assert caught.value.exit_code == 78
    return str(caught.value)


@pytest.fixture
def counters() -> Iterator[list[bytes]]:
    with counters_read() as seen:
        yield seen


def test_a_second_job_is_refused_at_once_and_the_dead_are_followed_at_once(tmp_path, counters) -> None:
    process, token, _ = started(tmp_path)
    text = refused(tmp_path)
    assert not counters
    assert f"run_dir={tmp_path} is in use by pid {process.pid} on host {os.uname().nodename} since 20" in text
    assert "set another run_dir" in text
    os.kill(process.pid, signal.SIGKILL)
    while process_start(process.pid):
        time.sleep(0.001)
    lock = RunLock(tmp_path).acquire()
    assert not counters, "not reaped yet, and taken over all the same, without a wait of 30 s"
    assert lock.token == token + 1
    process.join()
    lock.release()


def test_a_process_that_ended_and_was_not_waited_for_is_gone() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert os.path.exists(f"/proc/{process.pid}")
    assert process_start(process.pid) is None
    process.wait()
    assert process_start(os.getpid()) == process_start(os.getpid()) != process_start(1)


def test_orphans_that_inherited_the_files_do_not_hold_the_lock(tmp_path) -> None:
    process, _, orphan = started(tmp_path, with_child=True)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        assert process_start(orphan)
        with RunLock(tmp_path) as lock:
            assert lock.token == 2
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_released_lock_is_free_and_tokens_only_grow(tmp_path) -> None:
    for token in (1, 2, 3):
        lock = RunLock(tmp_path)
        assert lock.token == 0
        with lock:
            assert lock.token == token
            lock.check()
            refused(tmp_path)
        assert lock.token == 0
        lock.release()
    left = sorted(path.name for path in (tmp_path / "lock").iterdir())
    assert left == ["00000003.beat", "00000003.released", "flock", "spare"]


def test_a_rank_asks_after_the_lock_that_its_launcher_holds(tmp_path) -> None:
    launcher = RunLock(tmp_path).acquire()
    lent = RunLock.held(tmp_path, launcher.token)
    store = Store(tmp_path, lock=lent, chunk_bytes=CHUNK)
    save(store, 1)
    with store.newest_good(SOLO) as reader:
        assert reader.manifest.token == launcher.token == 1
    lent.release()
    launcher.check()
    launcher.release()
    with pytest.raises(RunLockedError):
        save(store, 2)
    with RunLock(tmp_path), pytest.raises(RunLockedError, match="took it over"):
        save(store, 2)
    assert store.steps() == [1]
    with pytest.raises(RunLockedError):
        RunLock.held(tmp_path, 1).check()


def another_host(monkeypatch, *, space: str = "elsewhere", boot: str = "elsewhere") -> None:
    """Locks that are acquired until `monkeypatch.undo` look as if another machine or container held them."""
    monkeypatch.setattr(lock_module, "boot_id", lambda: boot)
    monkeypatch.setattr(lock_module, "pid_space", lambda: space)


def die(lock: RunLock) -> None:
    """What is left of a holder that was killed: no beats, no flock."""
    lock._stop.set()
    lock._thread.join()
    lock._drop_flock()


def test_another_hosts_live_lock_is_refused_as_soon_as_it_beats(tmp_path, monkeypatch, counters) -> None:
    with monkeypatch.context() as elsewhere:
        another_host(elsewhere)
        live = RunLock(tmp_path).acquire()
    refused(tmp_path)
    live.release()
    *before, moved = counters
    assert set(before) == {before[0]}
    assert moved != before[0]


def test_another_hosts_dead_lock_is_taken_over_after_missed_beats(tmp_path, monkeypatch, counters) -> None:
    with monkeypatch.context() as elsewhere:
        another_host(elsewhere)
        dead = RunLock(tmp_path).acquire()
    die(dead)
    # Clocks that jump by a day change nothing.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    os.utime(tmp_path / "lock" / "00000001.beat", (2**33, 2**33))
    lock = RunLock(tmp_path, stale_seconds=0.4)
    assert seconds(lock.acquire) > 0.3
    # looked at ten times in what it may take, and never again
    assert set(counters) == {counters[0]}
    assert len(counters) <= 1 + 10
    with pytest.raises(RunLockedError, match=r"took it over .lock token 2, this job's was 1.; nothing"):
        dead.check()
    dead.release()
    lock.check()
    lock.release()


@pytest.mark.parametrize("what", ["json", "beat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_lock_that_can_not_be_read_is_not_taken_over(tmp_path, monkeypatch, what: str, number: int) -> None:
    with monkeypatch.context() as elsewhere:
        another_host(elsewhere)
        live = RunLock(tmp_path).acquire()
    real = regular_files.open_regular

    def failing(name: str, *flags: int, **options: int) -> int:
        if name.endswith(what):
            raise OSError(number, os.strerror(number))
        return real(name, *flags, **options)

    with monkeypatch.context() as away:
        away.setattr(regular_files, "open_regular", failing)
        with pytest.raises(
            WriteError, match=r"whether another job writes to run_dir=.* can't be told: .* cannot be read"
        ):
            RunLock(tmp_path, stale_seconds=0.3).acquire()
    # its holder goes on, and others are told of it
    live.check()
    refused(tmp_path)
    live.release()


def test_a_counter_that_is_away_for_a_moment_is_watched_on(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as elsewhere:
        another_host(elsewhere)
        dead = RunLock(tmp_path).acquire()
    die(dead)
    real = regular_files.open_regular
    failures = [OSError(errno.EIO, "Input/output error")]

    def failing(name: str, *flags: int, **options: int) -> int:
        if failures and name.endswith("beat"):
            raise failures.pop()
        return real(name, *flags, **options)

    monkeypatch.setattr(regular_files, "open_regular", failing)
    with RunLock(tmp_path, stale_seconds=0.4) as lock:
        assert lock.token == 2
    assert not failures


def test_in_another_container_of_this_host_the_kernel_says_who_is_dead(tmp_path, monkeypatch, counters) -> None:
    with monkeypatch.context() as elsewhere:
        another_host(elsewhere, boot=lock_module.boot_id())
        other = RunLock(tmp_path).acquire()
    refused(tmp_path)
    die(other)
    RunLock(tmp_path).acquire().release()
    assert not counters


def test_without_flock_and_without_hard_links(tmp_path, monkeypatch) -> None:
    def no_flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def no_link(one: str, other: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    for name in ("links", "none"):
        if name == "none":
            monkeypatch.setattr(os, "link", no_link)
        with RunLock(tmp_path / name) as lock:
            assert lock.token == 1
            assert not decode_holder((tmp_path / name / "lock" / "00000001.json").read_bytes()).flock
            refused(tmp_path / name)
        with RunLock(tmp_path / name) as lock:
            assert lock.token == 2


def test_of_many_that_find_a_dead_holder_one_wins(tmp_path, monkeypatch) -> None:
    another_host(monkeypatch)
    die(RunLock(tmp_path).acquire())
    monkeypatch.undo()
    start, won, lost = threading.Barrier(8), [], []

    def contend() -> None:
        lock = RunLock(tmp_path, stale_seconds=0.3)
        start.wait()
        try:
            won.append(lock.acquire())
        except RunLockedError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert len(lost) == 7
    assert won[0].token == 2
    assert all(f"pid {os.getpid()}" in text for text in lost)
    won[0].release()


@pytest.mark.parametrize("record", [b"", b"{}", b"[1]", b"\x80\x04.", b"[" * 4000, b'{"host": 1}'])
def test_a_damaged_record_counts_as_a_holder_that_cannot_be_asked(tmp_path, record) -> None:
    lock = RunLock(tmp_path).acquire()
    (tmp_path / "lock" / "00000001.json").write_bytes(record)
    assert "an unknown job" in refused(tmp_path)
    with pytest.raises(RunLockedError):
        lock.check()
    die(lock)
    with RunLock(tmp_path, stale_seconds=0.2) as next_one:
        assert next_one.token == 2


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "400k") as place:
        yield place


def test_a_full_disk_keeps_nobody_from_the_lock(disk) -> None:
    """However often: each holder keeps the room of the one before it, whether that let go or was killed."""
    run = disk / "run"
    RunLock(run).acquire().release()
    fill(disk)
    for token in range(2, 6):
        lock = RunLock(run).acquire()
        assert lock.token == token
        refused(run)
        assert (run / "lock" / f"{token:08d}.beat").stat().st_size > 0
        if token % 2:
            lock.release()
        else:
            dead = lock._record.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 0')
            die(lock)
            (run / "lock" / f"{token:08d}.json").write_bytes(dead)
    assert free_bytes(disk) == 0
    assert [path for path in (run / "lock").iterdir() if path.name.startswith(".claim")] == []


def test_of_many_on_a_full_disk_one_wins(disk) -> None:
    run = disk / "run"
    RunLock(run).acquire().release()
    fill(disk)
    start, won, lost = threading.Barrier(8), [], []

    def contend() -> None:
        start.wait()
        try:
            won.append(RunLock(run).acquire())
        except RunLockedError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 7
    won[0].release()
    with RunLock(run) as after:
        assert after.token == 3


def test_a_lock_that_has_no_room_leaves_nothing(disk) -> None:
    """A folder of an earlier version, which kept no spare: not even half a lock keeps the next start away."""
    run = disk / "run"
    RunLock(run).acquire().release()
    (run / "lock" / "spare").unlink()
    for room in (0, 4096):
        fill(disk, but=room)
        # of 4,096 bytes the record takes all, and the counter is the one before's
        if room:
            RunLock(run).acquire().release()
            continue
        lock = RunLock(run)
        with pytest.raises(WriteError, match="No space left on device; make room there"):
            lock.acquire()
        assert lock.token == 0
        assert sorted(path.name for path in (run / "lock").iterdir()) == ["00000001.beat", "00000001.released", "flock"]


def test_a_counter_that_has_no_room_gives_the_lock_back(disk) -> None:
    run = disk / "run"
    RunLock(run).acquire().release()
    (run / "lock" / "00000001.beat").unlink()
    fill(disk)
    with pytest.raises(WriteError, match="No space left on device"):
        RunLock(run).acquire()
    # a record of this process, which lives, would keep the next start away
    empty(disk)
    with RunLock(run) as lock:
        assert lock.token == 3


def test_a_folder_that_was_copied_by_hard_links_shares_no_lock(disk) -> None:
    first, copy = disk / "run", disk / "copy"
    for _ in range(2):
        RunLock(first).acquire().release()
    subprocess.run(["cp", "-al", str(first), str(copy)], check=True)
    with RunLock(first) as mine:
        fill(disk)
        with pytest.raises(WriteError, match="No space left on device"):
            RunLock(copy).acquire()
        mine.check()
        empty(disk)
        with RunLock(copy) as theirs:
            inodes = [path.stat().st_ino for path in (first / "lock").iterdir() if path.name != "flock"]
            for path in (copy / "lock").iterdir():
                assert path.name == "flock" or path.stat().st_ino not in inodes
            mine.check()
            theirs.check()


def test_when_the_lock_folder_was_removed_the_old_holder_stops(tmp_path) -> None:
    old = RunLock(tmp_path).acquire()
    for p in (tmp_path / "lock").iterdir():
        p.unlink()
    (tmp_path / "lock").rmdir()
    with RunLock(tmp_path) as new:
        assert new.token == old.token == 1
        with pytest.raises(RunLockedError):
            old.check()
        old.release()
        new.check()


def test_one_read_says_whether_the_run_is_still_this_jobs(tmp_path, monkeypatch) -> None:
    another_host(monkeypatch)
    old = RunLock(tmp_path).acquire()
    assert old.is_ours()
    old.check_line()
    monkeypatch.setattr(lock_module, "read_inside", no_answer)
    old.check_line()  # a file system that is away for a moment says nothing
    monkeypatch.undo()
    die(old)
    with RunLock(tmp_path, stale_seconds=0.1) as new:
        assert not old.is_ours()
        assert new.is_ours()
        with pytest.raises(RunLockedError, match="took it over"):
            old.check_line()
    assert not new.is_ours()


def no_answer(*_: object, **__: object) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("operation", ["listdir", "rename"])
def test_a_process_that_lives_on_lets_go_through_a_disk_that_fails_for_a_moment(
    tmp_path, monkeypatch, operation
) -> None:
    lock = RunLock(tmp_path).acquire()
    real = getattr(os, operation)
    failures = [OSError(errno.EIO, "Input/output error")]

    def failing(*arguments):
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(os, operation, failing)
    lock.release()
    assert not failures
    RunLock(tmp_path).acquire().release()


def test_a_disk_that_tells_nothing_keeps_no_process_that_lives_on(tmp_path, monkeypatch) -> None:
    lock = RunLock(tmp_path).acquire()

    def failing(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr(lock_module, "RELEASE_WAITS_SECONDS", (0.0,))
        for operation in ("listdir", "stat", "lstat"):
            away.setattr(os, operation, failing)
        lock.release()
    assert lock.token == 0
    # the record stays, and this process lives
    refused(tmp_path)


@pytest.mark.parametrize("what", ["moved", "removed", "its lock folder alone"])
def test_a_folder_that_is_gone_is_told_as_such(tmp_path, what) -> None:
    run = tmp_path / "run"
    lock = RunLock(run).acquire()
    match what:
        case "moved":
            run.rename(tmp_path / "elsewhere")
        case "removed":
            shutil.rmtree(run)
        case _:
            (run / "lock").rename(tmp_path / "lock")
    for ask in (lock.check, lock.check_line):
        with pytest.raises(WriteError, match="was moved or removed while the run was under way") as caught:
            ask()
        assert caught.value.exit_code == 73
    lock.release()


TAKEN_OVER_AT = (
    "save_started",
    "after_shard_write",
    "after_shard_sync",
    "after_manifest",
    "before_set_aside",
    "after_set_aside",
)


@pytest.mark.parametrize("point", TAKEN_OVER_AT)
@pytest.mark.parametrize("step", [1, 2], ids=["re-save", "save"])
def test_a_zombie_publishes_nothing(tmp_path, monkeypatch, point, step) -> None:
    """A job that lost its lock in the middle of a save: whatever it does next, the new holder's checkpoints stay."""
    another_host(monkeypatch)
    zombie_lock = RunLock(tmp_path).acquire()
    monkeypatch.undo()
    zombie = Store(tmp_path, lock=zombie_lock, chunk_bytes=CHUNK)
    save(zombie, 1)
    new: list[Store] = []

    def take_over() -> None:
        die(zombie_lock)
        lock = RunLock(tmp_path, stale_seconds=0.1).acquire()
        new.append(Store(tmp_path, lock=lock, chunk_bytes=CHUNK))
        faults.disarm()

    faults.arm(point, take_over)
    happens = step == 1 or "set_aside" not in point
    if not happens:
        take_over()
    with pytest.raises(MegaspecError) as caught:
        save(zombie, step, salt=66)
    if "set_aside" not in point:
        assert isinstance(caught.value, RunLockedError), caught.value
        assert f"pid {os.getpid()}" in str(caught.value)
    assert new
    with new[0].newest_good(SOLO) as reader:
        assert_holds(reader, 1, 0)
    save(new[0], step, salt=7)
    for again in (1, 2):
        with pytest.raises(RunLockedError):
            save(zombie, again, salt=66)
    with pytest.raises(RunLockedError):
        zombie.prune(1)
    with new[0].newest_good(SOLO) as reader:
        assert_holds(reader, step, 7)
        assert reader.manifest.token == 2
    new[0].lock.release()


def test_a_lock_in_a_forked_child_is_inert(tmp_path) -> None:
    process, _, orphan = started(tmp_path, with_child=True)
    os.kill(orphan, signal.SIGTERM)
    assert f"pid {process.pid}" in refused(tmp_path)
    process.kill()
    process.join()
