"""Saves beside training: the same bytes as of a save that is waited for, and nothing lost when one fails."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megaspec.checkpoint import publish, saver
from megaspec.checkpoint.comm import Comm
from megaspec.checkpoint.fallback import adopt, fallback_folder
from megaspec.checkpoint.lock import RunLock
from megaspec.checkpoint.saver import AsyncSaver, BlockingSaver, Saved, Saver, Tries
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.shared_buffer import SharedBuffer
from megaspec.checkpoint.spec import CheckpointSpec
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import MemoryRunOut, RunLockedError, WriteError
from tests.checkpoint.checkpoint_cases import (
    CHUNK,
    SOLO,
    ThreadComm,
    assert_holds,
    no_rank_failed,
    on_ranks,
    own_pieces,
    values,
)

CPU = torch.device("cpu")
LONGEST_SECONDS = 30


@pytest.fixture(autouse=True)
def _no_fault_stays(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(saver, "RETRY_SECONDS", 0.01)
    yield
    faults.disarm()


def tries_in(folder: Path, *, fallback: Path | None = None, retries: int = 1, lock: RunLock | None = None) -> Tries:
    elsewhere = (
        None if fallback is None else Store(fallback_folder(str(fallback), folder), lock=lock, chunk_bytes=CHUNK)
    )
    return Tries(Store(folder, lock=lock, chunk_bytes=CHUNK), elsewhere, retries)


def save(how: Saver, step: int, comm: Comm = SOLO, *, salt: int = 0) -> list[Saved]:
    return how.save(
        step,
        own_pieces(values(step, salt), comm.rank, comm.size),
        spec={"name": "case"},
        state={"step": step, "salt": salt},
        is_steady=lambda piece: True,
    )


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def settled(how: Saver) -> list[Saved]:
    """What a loop does, as long as ranks say nothing."""
    deadline = time.monotonic() + LONGEST_SECONDS
    found: list[Saved] = []
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        if how.word() >= 1:
            found = how.settle()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_the_bytes_are_those_of_a_save_that_is_waited_for(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(publish.secrets, "token_hex", lambda n: "0" * 2 * n)

    def run(kind: str, comm: Comm) -> list[int]:
        tries = tries_in(tmp_path / kind)
        how = BlockingSaver(tries, comm) if kind == "blocking" else AsyncSaver(tries, comm, device=CPU)
        steps = []
        # the last one is saved anew
        for salt, step in enumerate((1, 2, 3, 3)):
            steps += [saved.step for saved in save(how, step, comm, salt=salt)]
        steps += [saved.step for saved in how.finish()]
        how.close()
        return steps

    for kind in ("blocking", "async"):
        assert no_rank_failed(on_ranks(size, lambda comm, kind=kind: run(kind, comm))) == [[1, 2, 3, 3]] * size
    blocking = tree(tmp_path / "blocking")
    assert len(blocking) == 3 * (size + 1)
    assert tree(tmp_path / "async") == blocking


def test_what_changes_after_the_copy_is_not_saved(tmp_path) -> None:
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    tensors = values(1)
    pieces = own_pieces(tensors, 0, 1)
    assert how.save(1, pieces, spec={"name": "case"}, state={"step": 1, "salt": 0}, is_steady=lambda piece: True) == []
    how.before_update()
    for tensor in tensors.values():
        tensor.zero_()
    (saved,) = settled(how)
    assert (saved.step, saved.path) == (1, tmp_path / "checkpoints" / "step-00000001")
    assert 0 < saved.stall_seconds < saved.seconds
    with Store(tmp_path).open(1, SOLO) as reader:
        assert_holds(reader, 1, 0)
    how.close()


def test_one_buffer_serves_every_save(tmp_path, capfd) -> None:
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    how.prepare(own_pieces(values(1), 0, 1))
    place = how._buffer.bytes.data_ptr()
    steps = []
    for step in range(1, 6):
        steps += [saved.step for saved in save(how, step)]
        assert how._buffer.bytes.data_ptr() == place
    steps += [saved.step for saved in how.finish()]
    assert steps == [1, 2, 3, 4, 5]
    for step in steps:
        with Store(tmp_path).open(step, SOLO) as reader:
            assert_holds(reader, step, 0)
    how.close()


def test_a_save_that_waits_for_the_one_before_says_so(tmp_path, capfd, monkeypatch) -> None:
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    save(how, 1)
    wait = how.writer.wait_some

    def slow(seconds: float) -> dict | None:
        time.sleep(1.1)
        return wait(seconds)

    monkeypatch.setattr(how.writer, "wait_some", slow)
    assert [saved.step for saved in save(how, 2)] == [1]
    monkeypatch.undo()
    assert "step 2 waited" in capfd.readouterr().err
    how.finish()
    how.close()


@pytest.mark.parametrize("when", ["at once", "while it writes"])
def test_a_writer_that_is_killed_costs_a_save_another_try(tmp_path, capfd, when) -> None:
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    how.prepare(own_pieces(values(1), 0, 1))
    if when == "at once":
        os.kill(how.writer.pid, signal.SIGKILL)
        save(how, 1)
    else:
        save(how, 1)
        os.kill(how.writer.pid, signal.SIGKILL)
    (saved,) = settled(how)
    assert saved.step == 1
    said = capfd.readouterr().err
    # it may have been done before the signal came
    if when == "at once":
        assert "step 1 was not saved: the process that writes checkpoints was killed by SIGKILL" in said
        assert "trying again in" in said
    with Store(tmp_path).newest_good(SOLO) as reader:
        assert_holds(reader, 1, 0)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    how.close()


def test_one_ranks_failure_is_everybodys(tmp_path, monkeypatch) -> None:
    """Rank 1's writer always dies: both ranks learn it, in as many tries, and the checkpoint before stays."""

    def run(comm: ThreadComm) -> list[int]:
        how = AsyncSaver(tries_in(tmp_path, retries=2), comm, device=CPU)
        save(how, 1, comm)
        how.finish()
        start = how.writer.start

        def start_and_kill() -> None:
            start()
            os.kill(how.writer.pid, signal.SIGKILL)

        if comm.rank == 1:
            how.writer.abandon()
            how.writer.start = start_and_kill
        try:
            save(how, 2, comm)
            how.finish()
        finally:
            how.close()
        return []

    results = on_ranks(2, run)
    assert [type(result) for result in results] == [WriteError, WriteError]
    assert str(results[0]) == str(results[1])
    assert "rank 1: the process that writes checkpoints was killed by SIGKILL" in str(results[0])
    assert "step 2 was not saved, in 3 tries; the run ends here" in str(results[0])
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    with Store(tmp_path).newest_good(SOLO) as reader:
        assert_holds(reader, 1, 0)


@pytest.mark.parametrize("kind", [BlockingSaver, AsyncSaver])
def test_a_run_folder_without_room_has_another_place(tmp_path, monkeypatch, capfd, kind) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "other disk"
    run.mkdir()
    tries = tries_in(run, fallback=elsewhere)
    how = kind(tries, SOLO, device=CPU) if kind is AsyncSaver else kind(tries, SOLO)
    saved = save(how, 1) + how.finish()
    real = publish.free_bytes
    monkeypatch.setattr(publish, "free_bytes", lambda path: 10 if path.is_relative_to(run) else real(path))
    saved += save(how, 2) + how.finish()
    there = fallback_folder(str(elsewhere), run) / "checkpoints" / "step-00000002"
    assert [one.path for one in saved] == [run / "checkpoints" / "step-00000001", there]
    assert f"trying again in {there.parent}" in capfd.readouterr().err
    how.close()
    # the next start moves it home
    adopted = adopt(run, CheckpointSpec(fallback_dir=str(elsewhere)))
    assert adopted.step == 2
    assert adopted.lines == (f"step 2 was saved in {there.parent}, and is in {run / 'checkpoints'} now",)
    assert not there.exists()
    with Store(run).newest_good(SOLO) as reader:
        assert_holds(reader, 2, 0)
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000001", "step-00000002"]
    assert adopt(run, CheckpointSpec(fallback_dir=str(elsewhere))).lines == ()
    # nothing is left of the run there
    assert os.listdir(elsewhere) == []


def test_a_run_that_another_job_took_over_publishes_nothing(tmp_path) -> None:
    """What the writer of rank 0 asks last: the files are there, and the lock is another's."""
    with RunLock(tmp_path) as lock:
        how = AsyncSaver(tries_in(tmp_path, lock=lock), SOLO, device=CPU)
        save(how, 1)
        (record,) = (tmp_path / "lock").glob("*.json")
        (tmp_path / "lock" / f"{int(record.stem) + 1:08d}.json").write_text("{}")
        record.unlink()
        with pytest.raises(RunLockedError, match="no longer this job's"):
            how.finish()
        how.close()
        assert Store(tmp_path).steps() == []


def test_nothing_outlives_a_saver(tmp_path) -> None:
    before = len(psutil.Process().open_files()), psutil.Process().num_fds()
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    save(how, 1)
    pid = how.writer.pid
    how.close()
    assert not psutil.pid_exists(pid)
    assert (len(psutil.Process().open_files()), psutil.Process().num_fds()) == before
    assert [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".")] == []


def test_requests_to_stop_are_not_the_writers(tmp_path) -> None:
    how = AsyncSaver(tries_in(tmp_path), SOLO, device=CPU)
    how.prepare(own_pieces(values(1), 0, 1))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(how.writer.pid, number)
    save(how, 1)
    assert [saved.step for saved in how.finish()] == [1]
    how.close()


def test_a_full_disk_is_told_by_path_and_need(tmp_path, monkeypatch) -> None:
    """The disk is found full by the writer, which has no idea of this process's patches: a file is in its way."""
    how = AsyncSaver(tries_in(tmp_path, retries=0), SOLO, device=CPU)
    begin = how._tries.first.publisher.begin

    def begin_and_block(step: int, need: int) -> publish.BegunSave:
        begun = begin(step, need)
        (how._tries.first.folder / begun.name / "rank-00000.safetensors").mkdir()
        return begun

    monkeypatch.setattr(how._tries.first.publisher, "begin", begin_and_block)
    save(how, 1)
    with pytest.raises(WriteError, match=rf"cannot write .*rank-00000.safetensors: {os.strerror(errno.EEXIST)}"):
        how.finish()
    how.close()


def test_pieces_without_elements_and_ranks_without_pieces(tmp_path) -> None:
    def run(comm: Comm) -> list[Saved]:
        how = AsyncSaver(tries_in(tmp_path), comm, device=CPU)
        pieces = []
        if comm.rank == 0:
            pieces = [SavedPiece("none", (0, 3), (0, 0), torch.empty(0, 3)), SavedPiece("one", (), (), torch.ones(()))]
        how.save(1, pieces, spec={}, state={}, is_steady=lambda piece: True)
        saved = how.finish()
        how.close()
        return saved

    no_rank_failed(on_ranks(2, run))
    with Store(tmp_path).open(1, SOLO) as reader:
        assert reader.read("none").shape == (0, 3)
        assert reader.read("one") == 1


@pytest.mark.parametrize(("number", "error"), [(errno.ENOMEM, MemoryRunOut), (errno.EFBIG, WriteError)])
def test_memory_that_there_is_not_is_told_and_nothing_stays_open(monkeypatch, number, error) -> None:
    """A limit on files may be raised, and ends a run with 73; where there is no memory another start meets that too."""

    def refuse(fd: int, n_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(error, match=r"checkpoint.saving=async: this machine does not give 1.0 GiB of memory"):
        SharedBuffer(1 << 30, device=CPU)
    assert psutil.Process().num_fds() == before
