"""Full disks, quotas and I/O errors: every rank learns it, by path and need, and the last good checkpoint stays."""

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megaspec.checkpoint import files, publish
from megaspec.checkpoint.publish import FAULT_POINTS
from megaspec.checkpoint.shard import SavedPiece
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import WriteError
from tests.checkpoint.checkpoint_cases import CHUNK, FORKS, SOLO, assert_holds, no_rank_failed, on_ranks, save
from tests.small_disks import small_disk


@pytest.fixture(autouse=True)
def _no_fault_stays():
    yield
    faults.disarm()


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as place:
        yield place


def save_large(store: Store, step: int, comm, megabytes: int = 3) -> Path:
    """Each rank saves its share of a tensor of that many MiB."""
    rows = megabytes * 1024 // comm.size
    piece = SavedPiece("big", (rows * comm.size, 256), (rows * comm.rank, 0), torch.ones(rows, 256))
    return store.save(step, [piece], spec={}, state={}, comm=comm)


def assert_kept(store: Store) -> None:
    """Step 1 is as it was and nothing else is left."""
    assert sorted(os.listdir(store.folder)) == ["step-00000001"]
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 1)


@pytest.mark.parametrize("told_beforehand", [True, False])
def test_full_disk(disk, monkeypatch, told_beforehand) -> None:
    store = Store(disk)
    no_rank_failed(on_ranks(2, lambda c: save(store, 1, c)))
    if not told_beforehand:
        monkeypatch.setattr(publish, "free_bytes", lambda path: 1 << 60)
    for _ in range(2):
        results = on_ranks(2, lambda c: save_large(store, 2, c))
        assert [type(r) for r in results] == [WriteError, WriteError]
        assert str(results[0]) == str(results[1])
        text = str(results[0])
        assert results[0].exit_code == 73
        assert str(store.folder) in text
        assert re.search(r"need [0-9,]{9}", text), text
        assert re.search(r"[0-9,]+ bytes are free", text), text
        assert ("No space left on device" in text) == (not told_beforehand)
        assert_kept(store)
    no_rank_failed(on_ranks(2, lambda c: save(store, 2, c)))
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 2)


def test_a_full_disk_does_not_keep_a_bad_checkpoint_from_being_put_aside(disk) -> None:
    store = Store(disk)
    save(store, 1)
    save(store, 2)
    (store.folder / "step-00000002" / "manifest.json").write_bytes(b"")
    with pytest.raises(OSError, match="No space"):
        (disk / "filler").write_bytes(bytes(4 << 20))
    assert files.free_bytes(disk) == 0
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 1)
    assert store.steps() == [1]


def limited(run: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        save_large(Store(run), 2, SOLO)
    except WriteError as error:
        Path(run, "said").write_text(str(error))


def test_file_size_limit(tmp_path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    child = FORKS.Process(target=limited, args=(str(tmp_path),))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert "rank-00000.safetensors: File too large; need 3,1" in said
    assert_kept(store)


@pytest.mark.parametrize("step", [1, 2], ids=["re-save", "save"])
@pytest.mark.parametrize("point", [p for p in FAULT_POINTS if not p.startswith("mid_") and "set_aside" not in p])
def test_io_error_at_every_point_of_a_save(tmp_path, point, step) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = Store(tmp_path, chunk_bytes=CHUNK)
    no_rank_failed(on_ranks(2, lambda c: save(store, 1, c)))
    faults.arm(point, fail, count=2 if point == "before_chunk_write" else 1)
    results = on_ranks(2, lambda c: save(store, step, c, salt=4))
    faults.disarm()
    assert [type(r) for r in results] == [WriteError, WriteError]
    assert "Input/output error" in str(results[0])
    if FAULT_POINTS.index(point) < FAULT_POINTS.index("after_publish"):
        assert_kept(store)
    else:
        with store.newest_good(SOLO) as reader:
            assert_holds(reader, step, 4)
    no_rank_failed(on_ranks(2, lambda c: save(store, 2, c, salt=6)))
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 2, 6)


def test_a_re_save_that_fails_between_its_renames_gives_the_old_one_its_name_back(tmp_path) -> None:
    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    store = Store(tmp_path, chunk_bytes=CHUNK)
    save(store, 1)
    faults.arm("after_set_aside", fail)
    with pytest.raises(WriteError, match="Read-only file system; make it writable or set another run_dir"):
        save(store, 1, salt=4)
    assert_kept(store)


def test_one_ranks_other_error_reaches_all_ranks(tmp_path) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    store = Store(tmp_path, chunk_bytes=CHUNK)
    no_rank_failed(on_ranks(2, lambda c: save(store, 1, c)))
    faults.arm("after_shard_sync", fail, count=2)
    results = on_ranks(2, lambda c: save(store, 2, c))
    assert sorted(type(r).__name__ for r in results) == ["MegaspecError", "MemoryError"]
    assert_kept(store)


def test_a_folder_that_cannot_be_made(tmp_path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(WriteError, match=r"cannot write .*checkpoints.*; set another run_dir$"):
        save(Store(tmp_path), 1)


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(files.os, "pwrite", lambda fd, view, offset: real(fd, view[:7], offset))
    store = Store(tmp_path, chunk_bytes=CHUNK)
    save(store, 1)
    monkeypatch.undo()
    assert_kept(store)
