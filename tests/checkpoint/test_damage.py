"""Whatever happens to a checkpoint's bytes is seen before a tensor is used, named and put aside; the last good one is
taken."""

import os
import pickle
import random
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch

from megaspec.checkpoint import examine
from megaspec.checkpoint import store as store_module
from megaspec.checkpoint.files import UnreadableError
from megaspec.checkpoint.format import MANIFEST, Manifest
from megaspec.checkpoint.reader import Reader
from megaspec.checkpoint.store import Store
from megaspec.core.errors import CheckpointError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, no_rank_failed, on_ranks, save, values
from tests.checkpoint.test_format import inner, seal

FILES = ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """A run with the steps 1, 2 and 3, saved by two ranks."""
    run = tmp_path_factory.mktemp("three")
    store = Store(run, chunk_bytes=CHUNK)
    for step in (1, 2, 3):
        no_rank_failed(on_ranks(2, lambda c, s=step: save(store, s, c)))
    return run


@pytest.fixture
def run(three_steps, tmp_path) -> Path:
    return Path(shutil.copytree(three_steps, tmp_path / "run"))


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def assert_falls_back(run: Path, *, to: int, named: str, said: str) -> None:
    """Step 3 is refused with `said` about the file `named` and put aside; step `to` is taken, and the run goes on."""
    store = Store(run, chunk_bytes=CHUNK)
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, to)
    reasons = [p for p in (run / "checkpoints" / "quarantine").iterdir() if p.suffix == ".txt"]
    assert [p.name for p in reasons] == [f"step-0000000{s}-1.txt" for s in range(3, to, -1)][::-1]
    text = (run / "checkpoints" / "quarantine" / "step-00000003-1.txt").read_text()
    assert named in text
    assert re.search(said, text), text
    assert store.steps() == list(range(1, to + 1))
    save(store, 3, salt=9)
    with store.newest_good(SOLO) as reader:
        assert_holds(reader, 3, 9)


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_random_flipped_bits(count, three_steps, tmp_path) -> None:
    rnd = random.Random(1)
    for i in range(count):
        run = Path(shutil.copytree(three_steps, tmp_path / "run"))
        file = folder(run, 3) / rnd.choice(FILES)
        data = bytearray(file.read_bytes())
        data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
        file.write_bytes(data)
        ranks = 1 + i % 3
        store = Store(run, chunk_bytes=CHUNK)
        readers = no_rank_failed(on_ranks(ranks, lambda c, s=store: s.newest_good(c)))
        for reader in readers:
            assert_holds(reader, 2)
            reader.close()
        reason = (run / "checkpoints" / "quarantine" / "step-00000003-1.txt").read_text()
        assert str(file) in reason
        assert "expected" in reason
        assert "found" in reason
        shutil.rmtree(run)


def test_a_bit_that_flips_after_the_verification_is_seen_by_the_read(run) -> None:
    rnd = random.Random(2)
    truth, seen = values(3), 0
    whole = {name: (folder(run, 3) / name).read_bytes() for name in FILES[:2]}
    for _ in range(60):
        reader = Store(run, chunk_bytes=CHUNK).open(3, SOLO)
        name = rnd.choice(FILES[:2])
        data = bytearray(whole[name])
        data[rnd.randrange(len(data))] ^= 1 << rnd.randrange(8)
        (folder(run, 3) / name).write_bytes(data)
        for tensor, t in truth.items():
            told = None
            try:
                assert torch.equal(reader.read(tensor), t)
            except CheckpointError as error:
                told = str(error)
            if told:
                assert re.search(rf"{name}: bytes \d+ to \d+: crc32 expected [0-9a-f]{{8}}, found [0-9a-f]{{8}}", told)
                seen += 1
        reader.close()
        (folder(run, 3) / name).write_bytes(whole[name])
    assert seen > 20


@pytest.mark.parametrize("name", FILES)
def test_truncated_extended_holed_missing(three_steps, tmp_path, name) -> None:
    rnd = random.Random(3)
    size = (folder(three_steps, 3) / name).stat().st_size

    def fresh() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return Path(shutil.copytree(three_steps, tmp_path / "run"))

    for length in [0, 1, size - 1, *(rnd.randrange(size) for _ in range(10))]:
        run = fresh()
        os.truncate(folder(run, 3) / name, length)
        wrong_size = rf"expected {size} bytes, found {length}$"
        said = "expected a manifest, found" if name == MANIFEST else wrong_size
        assert_falls_back(run, to=2, named=name, said=said)
    run = fresh()
    with open(folder(run, 3) / name, "ab") as file:
        file.write(b"\0")
    assert_falls_back(run, to=2, named=name, said="found")
    run = fresh()
    data = (folder(run, 3) / name).read_bytes()
    (folder(run, 3) / name).write_bytes(data[: size // 2] + bytes(16) + data[size // 2 + 16 :])
    assert_falls_back(run, to=2, named=name, said="found")
    run = fresh()
    (folder(run, 3) / name).unlink()
    assert_falls_back(run, to=2, named=name, said="missing")


def test_files_swapped_between_ranks_and_steps(three_steps, tmp_path) -> None:
    def swap(one: Path, other: Path) -> None:
        one.rename(one.with_name("x"))
        other.rename(one)
        one.with_name("x").rename(other)

    run = Path(shutil.copytree(three_steps, tmp_path / "ranks"))
    swap(folder(run, 3) / FILES[0], folder(run, 3) / FILES[1])
    assert_falls_back(run, to=2, named=FILES[0], said="expected .* found")
    for name in FILES:
        run = Path(shutil.copytree(three_steps, tmp_path / f"steps-{name}"))
        swap(folder(run, 3) / name, folder(run, 2) / name)
        assert_falls_back(run, to=1, named=name, said="expected .* found")


def test_files_of_another_save_of_the_same_values(tmp_path) -> None:
    for name in ("one", "other"):
        save(Store(tmp_path / name, chunk_bytes=CHUNK), 3)
    shutil.copy(folder(tmp_path / "other", 3) / FILES[0], folder(tmp_path / "one", 3) / FILES[0])
    with pytest.raises(CheckpointError, match="crc32 expected"):
        Store(tmp_path / "one").newest_good(SOLO)


def test_a_folder_of_another_step(run) -> None:
    shutil.rmtree(folder(run, 3))
    shutil.copytree(folder(run, 1), folder(run, 3))
    assert_falls_back(run, to=2, named=MANIFEST, said="expected step 3, found step 1")


def test_none_left_says_what_was_found_in_each_again_and_again(run) -> None:
    for step in (1, 2, 3):
        os.truncate(folder(run, step) / FILES[1], 10 + step)
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            Store(run).newest_good(SOLO)
        assert caught.value.exit_code == 66
        text = str(caught.value)
        assert "no good checkpoint is left" in text
        for step in (1, 2, 3):
            assert re.search(rf"step-0000000{step}.*\n.*{FILES[1]}: expected \d+ bytes, found {10 + step}", text), text


def test_what_the_run_objects_to_gives_way_to_an_earlier_save_of_the_same_step(run) -> None:
    """A kill between two renames had left that, and somebody copied another run's checkpoint to where it was."""
    folder(run, 3).rename(run / "checkpoints" / ".replaced-00000003-4")
    save(Store(run.parent / "other", chunk_bytes=CHUNK), 3, salt=7)
    shutil.copytree(folder(run.parent / "other", 3), folder(run, 3))

    def inspect(manifest: Manifest) -> list[str]:
        return ["it is another run's"] if manifest.state["salt"] == 7 else []

    with Store(run).newest_good(SOLO, repair=False, inspect=inspect) as reader:
        assert_holds(reader, 3, 0)
    with Store(run).newest_good(SOLO, inspect=inspect) as reader:
        assert_holds(reader, 3, 0)
        assert reader.path == folder(run, 3)
    assert "it is another run's" in (run / "checkpoints" / "quarantine" / "step-00000003-1.txt").read_text()


def remove_when(monkeypatch, module, name: str, *folders: Path, before: bool) -> None:
    """From the first call of `module.name` on, `folders` are gone: `before` it or after it has done its work."""
    real = getattr(module, name)

    def watched(*args, **keywords):
        result = None if before else real(*args, **keywords)
        for one in folders:
            shutil.rmtree(one, ignore_errors=True)
        return real(*args, **keywords) if before else result

    monkeypatch.setattr(module, name, watched)


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(
    ("module", "name", "before"),
    [
        (store_module, "read_manifest", True),
        (store_module, "find_damage", True),
        (examine, "open_stored", True),
        (store_module, "find_damage", False),
        (store_module, "Reader", True),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_is_removed_while_it_is_verified(run, monkeypatch, module, name, before, ranks, repair):
    """By a user, or by a clean-up job: it was told as 73, "cannot write", and the one before it was not taken."""
    remove_when(monkeypatch, module, name, folder(run, 3), before=before)
    store = Store(run, chunk_bytes=CHUNK)
    for reader in no_rank_failed(on_ranks(ranks, lambda c: store.newest_good(c, repair=repair))):
        assert_holds(reader, 2)
        (told,) = reader.passed_over
        assert "step-00000003" in told
        assert "missing" in told
        reader.close()
    assert store.steps() == [1, 2]
    assert not (run / "checkpoints" / "quarantine").exists() or not any((run / "checkpoints/quarantine").iterdir())


def test_all_checkpoints_are_removed_while_they_are_verified(run, monkeypatch) -> None:
    remove_when(monkeypatch, examine, "open_stored", *(folder(run, s) for s in (1, 2, 3)), before=True)
    with pytest.raises(CheckpointError, match="no good checkpoint is left") as caught:
        Store(run).newest_good(SOLO)
    assert caught.value.exit_code == 66


def test_an_earlier_save_that_is_removed_while_it_gets_its_name_back(run, monkeypatch) -> None:
    replaced = folder(run, 3).rename(run / "checkpoints" / ".replaced-00000003-4")
    remove_when(monkeypatch, store_module, "rename_durably", replaced, before=True)
    with Store(run).newest_good(SOLO) as reader:
        assert_holds(reader, 2)
        assert "removed after it was verified" in reader.passed_over[0]


def test_looking_without_the_right_to_repair_moves_nothing(run) -> None:
    (folder(run, 3) / FILES[0]).unlink()
    before = sorted(run.rglob("*"))
    with Store(run).newest_good(SOLO, repair=False) as reader:
        assert_holds(reader, 2)
    with pytest.raises(CheckpointError, match=f"{FILES[0]}: missing, expected"):
        Store(run).open(3, SOLO)
    assert sorted(run.rglob("*")) == before


def test_a_run_without_checkpoints_is_no_error(tmp_path) -> None:
    assert Store(tmp_path).newest_good(SOLO) is None
    assert Store(tmp_path).steps() == []


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_any_file_executes_nothing(run, tmp_path, name, protocol) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary), protocol=protocol)
    pickle.loads(payload)
    assert canary.exists(), "the payload works"
    canary.unlink()
    (folder(run, 3) / name).write_bytes(payload)
    for extra in (".metadata", "state.pt", "x.pkl"):
        (folder(run, 2) / extra).write_bytes(payload)
    assert_falls_back(run, to=2, named=name, said="expected")
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "manifest", "device", "pipe", "socket", "outside"])
def test_links_and_devices_are_refused(run, tmp_path, kind, monkeypatch) -> None:
    where = folder(run, 3)
    if kind == "folder":
        where.rename(tmp_path / "elsewhere")
        where.symlink_to(tmp_path / "elsewhere")
    else:
        name = where / (MANIFEST if kind == "manifest" else FILES[0])
        name.rename(tmp_path / "elsewhere")
        if kind == "pipe":
            os.mkfifo(name)
        elif kind == "socket":
            # its path is too long for an address
            monkeypatch.chdir(where)
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(name.name)
        elif kind == "device":
            name.symlink_to("/dev/zero")
        elif kind == "outside":
            name.symlink_to("/etc/passwd")
        else:
            name.symlink_to(tmp_path / "elsewhere")
    assert_falls_back(run, to=2, named="step-00000003", said="expected a (regular )?file")
    assert (tmp_path / "elsewhere").exists()


def test_a_manifest_that_names_files_elsewhere_is_refused(run) -> None:
    body = inner() | {"step": 3}
    body["files"][0][0] = f"../step-00000002/{FILES[0]}"
    (folder(run, 3) / MANIFEST).write_bytes(seal(body))
    assert_falls_back(run, to=2, named=MANIFEST, said="expected a file as .*, found")


@pytest.mark.parametrize("trouble", ["another version", "permission"])
def test_what_this_machine_cannot_read_is_left_where_it_is(run, monkeypatch, trouble) -> None:
    if trouble == "another version":
        (folder(run, 3) / MANIFEST).write_bytes(seal({"version": 1}))
    else:

        def refuse(fd: int, view: memoryview, offset: int) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(examine, "pread_into", refuse)
    with pytest.raises(UnreadableError, match="step-00000003"):
        Store(run).newest_good(SOLO)
    assert Store(run).steps() == [1, 2, 3]


def test_reader_of_a_renamed_checkpoint_still_reads(run) -> None:
    with Reader(folder(run, 3)) as reader:
        folder(run, 3).rename(run / "moved")
        assert_holds(reader, 3)
