"""An operating system's error while a checkpoint is read says nothing of its bytes: nothing is put aside, no older one
is taken, and a disk or file server that is away for a moment costs a moment."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from megaspec.checkpoint import store as store_module
from megaspec.checkpoint.examine import newest_whole, no_objections, whole_steps
from megaspec.checkpoint.fallback import NOTE, saved_anywhere
from megaspec.checkpoint.files import DiskError, UnreadableError
from megaspec.checkpoint.format import MANIFEST
from megaspec.checkpoint.opening import open_saved
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import Store
from megaspec.commands.checkpoint_table import show
from megaspec.core.errors import CheckpointError, NonFiniteError
from megaspec.runtime.roll_back import open_before
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, no_rank_failed, on_ranks, save, values

AWAY = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN]
FOUND_DAMAGED = [errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ]
FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


class Disk:
    """Operations on files of step 3 that fail: by the name of the operation and that of the file."""

    def __init__(self, monkeypatch):
        self.code = errno.EIO
        self.failing: set[tuple[str, str]] = set()
        self.times = -1
        """How often one still fails; -1: always."""
        self.failed = 0
        for name in ("preadv", "fstat", "open", "stat", "lstat", "listdir"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, function):
        def call(what, *args, **keywords):
            path = self._path(what, keywords.get("dir_fd"))
            if (name, path.name) in self.failing and "step-00000003" in str(path) and self.times != 0:
                self.times -= 1
                self.failed += 1
                raise OSError(self.code, os.strerror(self.code))
            return function(what, *args, **keywords)

        return call

    def _path(self, what, dir_fd) -> Path:
        if isinstance(what, int):
            return Path(os.readlink(f"/proc/self/fd/{what}"))
        if dir_fd is not None:
            return Path(os.readlink(f"/proc/self/fd/{dir_fd}"), what)
        return Path(what)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run with the steps 1, 2 and 3, saved by two ranks."""
    monkeypatch.setattr(store_module, "READ_WAITS_SECONDS", (0.0, 0.0))
    store = Store(tmp_path / "run", chunk_bytes=CHUNK)
    for step in (1, 2, 3):
        no_rank_failed(on_ranks(2, lambda c, s=step: save(store, s, c)))
    return tmp_path / "run"


@pytest.fixture
def disk(run, monkeypatch) -> Disk:
    return Disk(monkeypatch)


def assert_untouched(run: Path, disk: Disk) -> None:
    """All three are where they were, and once the disk is back the newest is taken."""
    disk.times = 0
    assert Store(run).steps() == [1, 2, 3]
    assert not (run / "checkpoints" / "quarantine").exists()
    with Store(run).newest_good(SOLO) as reader:
        assert_holds(reader, 3)


@pytest.mark.parametrize("code", AWAY, ids=errno.errorcode.get)
def test_bytes_that_one_rank_cannot_read_are_no_damage_on_any(run, disk, code) -> None:
    # two ranks share the work: the second file is read by the second alone
    disk.failing = {("preadv", SECOND)}
    disk.code = code
    for result in on_ranks(2, lambda c: Store(run).newest_good(c)):
        assert type(result) is DiskError
        assert result.exit_code == 73
        assert str(result).startswith("rank 1: ")
        assert "start again when the disk answers" in str(result)
        assert SECOND in str(result)
    assert disk.failed
    assert_untouched(run, disk)


@pytest.mark.parametrize(
    "operation",
    [
        ("open", MANIFEST),
        ("open", FIRST),
        ("open", "step-00000003"),
        ("fstat", MANIFEST),
        ("fstat", FIRST),
        ("stat", "step-00000003"),
        ("preadv", FIRST),
    ],
    ids=" ".join,
)
def test_whatever_operation_it_is(run, disk, operation) -> None:
    disk.failing = {operation}
    with pytest.raises(DiskError):
        Store(run).newest_good(SOLO)
    assert disk.failed > 0
    assert_untouched(run, disk)


@pytest.mark.parametrize("code", [errno.ENXIO, errno.ENODEV], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "operations",
    [
        [("open", MANIFEST)],
        [("open", FIRST)],
        [("open", "step-00000003")],
        [("stat", "step-00000003")],
        # nothing is known of it any more, its kind neither
        [("open", FIRST), ("stat", FIRST)],
        [("preadv", FIRST)],
    ],
    ids=str,
)
def test_a_device_that_is_gone_is_no_damage(run, disk, code, operations) -> None:
    disk.failing = set(operations)
    disk.code = code
    with pytest.raises(DiskError):
        Store(run).newest_good(SOLO)
    assert disk.failed > 0
    assert_untouched(run, disk)


def test_a_moment_is_waited_for_on_all_ranks(run, disk, capfd) -> None:
    disk.failing = {("preadv", SECOND)}
    disk.times = 1
    for reader in no_rank_failed(on_ranks(2, lambda c: Store(run).newest_good(c))):
        assert_holds(reader, 3)
        reader.close()
    assert disk.failed == 1
    err = capfd.readouterr().err
    assert err.count("tried again") == 1, err
    assert_untouched(run, disk)


def test_damage_on_one_rank_waits_while_another_cannot_read(run, disk) -> None:
    path = run / "checkpoints" / "step-00000003" / FIRST
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    disk.failing = {("preadv", SECOND)}
    for result in on_ranks(2, lambda c: Store(run).newest_good(c)):
        assert type(result) is DiskError
    assert Store(run).steps() == [1, 2, 3]
    disk.times = 0
    for reader in no_rank_failed(on_ranks(2, lambda c: Store(run).newest_good(c))):
        assert_holds(reader, 2)
        reader.close()
    assert Store(run).steps() == [1, 2]


@pytest.mark.parametrize("code", FOUND_DAMAGED, ids=errno.errorcode.get)
def test_what_the_file_system_itself_finds_damaged_is_put_aside(run, disk, code) -> None:
    disk.failing = {("preadv", SECOND)}
    disk.code = code
    for reader in no_rank_failed(on_ranks(2, lambda c: Store(run).newest_good(c))):
        assert_holds(reader, 2)
        reader.close()
    reason = (run / "checkpoints" / "quarantine" / "step-00000003-1.txt").read_text()
    assert "its file system found it damaged" in reason


def test_a_read_behind_the_verification(run, disk) -> None:
    with Store(run).open(3, SOLO) as reader:
        disk.failing = {("preadv", SECOND)}
        with pytest.raises(DiskError, match="cannot be read now"):
            [reader.read(name) for name in values(3)]
    assert_untouched(run, disk)


def test_who_only_reads_takes_no_older_one(run, disk) -> None:
    disk.failing = {("open", MANIFEST)}
    look_without_bytes = [
        lambda: newest_whole(run / "checkpoints", no_objections),
        lambda: whole_steps(run / "checkpoints", no_objections),
        lambda: open_saved(run, None, SOLO, step=None, inspect=no_objections),
        lambda: open_saved(run, None, SOLO, step=3, inspect=no_objections),
        lambda: Reader(run / "checkpoints" / "step-00000003"),
    ]
    for look in look_without_bytes:
        with pytest.raises(DiskError):
            look()


def test_what_is_not_read_stays_when_others_are_removed(run, disk) -> None:
    disk.failing = {("open", MANIFEST)}
    store = Store(run)
    store.prune(1)
    assert store.steps() == [2, 3]


def test_a_table_says_so(run, disk, capsys) -> None:
    disk.failing = {("preadv", FIRST)}
    assert show(run, deep=True) == DiskError.exit_code
    out = capsys.readouterr().out
    assert out.count("can't be read now") == 1
    assert "BAD" not in out
    path = run / "checkpoints" / "step-00000001" / FIRST
    path.write_bytes(path.read_bytes()[:-1])
    # what is wrong for good comes first
    assert show(run, deep=True) == CheckpointError.exit_code


def test_a_run_that_goes_back_does_not_give_up(run, disk) -> None:
    disk.failing = {("preadv", FIRST)}

    class Back:
        class verdict:
            window = None

    with pytest.raises(DiskError) as told:
        open_before(Store(run), SOLO, Back, None, inspect=no_objections)
    assert not isinstance(told.value, NonFiniteError)
    assert_untouched(run, disk)


def test_a_note_of_another_place_that_cannot_be_read(run, tmp_path, monkeypatch) -> None:
    other = tmp_path / "other"
    shutil.move(run / "checkpoints" / "step-00000003", other / "step-00000003")
    note = run / "checkpoints" / NOTE
    note.write_text(f"{other / 'step-00000003'}\n")
    assert saved_anywhere(run, None).steps == [1, 2, 3]
    opened = os.open

    def failing(path, *args, **keywords):
        if path == NOTE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return opened(path, *args, **keywords)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(DiskError, match="cannot be read now"):
        saved_anywhere(run, None)


def test_another_place_that_is_away_ends_as_a_disk_does(run, tmp_path, monkeypatch) -> None:
    other = tmp_path / "other"
    shutil.move(run / "checkpoints" / "step-00000003", other / "step-00000003")
    (run / "checkpoints" / NOTE).write_text(f"{other / 'step-00000003'}\n")
    listed = os.listdir

    def failing(path):
        if Path(path) == other:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return listed(path)

    monkeypatch.setattr(os, "listdir", failing)
    with pytest.raises(DiskError, match="cannot be listed now"):
        saved_anywhere(run, None).refuse_unseen_newest()


def test_a_file_that_this_user_may_not_read_is_no_disks_error(run, disk) -> None:
    disk.failing = {("open", FIRST)}
    disk.code = errno.EACCES
    with pytest.raises(UnreadableError) as told:
        Store(run).newest_good(SOLO)
    assert told.value.exit_code == 66
    assert_untouched(run, disk)
