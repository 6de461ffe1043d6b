"""Copies in an object store that fails now and then: whole or not there, verified by our checksums, no secret told."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.checkpoint import remote as remote_module
from megaspec.checkpoint.copier import Copier
from megaspec.checkpoint.remote import OWNER, Owner, Remote
from megaspec.checkpoint.store import Store
from megaspec.core import faults
from megaspec.core.errors import CheckpointError, UsageError, WriteError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, assert_holds, save
from tests.checkpoint.s3 import SECRET, StandIn, environment, server

OURS = Owner("case", "runs/case", "1" * 64)
ANOTHERS = Owner("other", "runs/other", "2" * 64)

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with server() as address:
        yield address


@pytest.fixture
def store(moto, monkeypatch, request) -> Iterator[StandIn]:
    """A bucket for each test, and the way to it."""
    stand_in = StandIn(moto)
    for name, value in environment(stand_in.url).items():
        monkeypatch.setenv(name, value)
    stand_in.bucket = "b" + str(abs(hash(request.node.name)))
    import s3fs

    # its own retries would hide what ours do
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    # with the address and credentials of another test
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(stand_in.bucket)
    stand_in.requests.clear()
    yield stand_in
    stand_in.close()


def remote_of(store: StandIn, **options: object) -> Remote:
    return Remote(f"s3://{store.bucket}/run", owner=OURS, wait_seconds=0.01, **options)


def saved(run: Path, step: int = 1) -> Path:
    return save(Store(run, chunk_bytes=CHUNK), step)


def nothing_is_refused(found) -> None:
    assert found == []


def assert_copied(store: StandIn, tmp_path: Path, step: int = 1) -> None:
    """What comes back is what was saved."""
    store.fault = lambda number, method, path: None
    remote_of(store).download(tmp_path / "back", step)
    with Store(tmp_path / "back").newest_good(SOLO) as reader:
        assert_holds(reader, step, 0)


def test_there_and_back(store, tmp_path) -> None:
    path = saved(tmp_path / "run")
    (tmp_path / "run" / "spec.json").write_text("{}")
    remote = remote_of(store)
    remote.check()
    assert remote.steps() == []
    assert remote.upload(path, 1, run_dir=tmp_path / "run") > 0
    # the same again costs nothing
    n_requests = len(store.requests)
    assert remote.upload(path, 1, run_dir=tmp_path / "run") == 0
    assert len(store.requests) - n_requests <= 2
    assert remote.steps() == [1]
    assert remote.identity(1).spec == {"name": "case"}
    assert remote.identity(2) is None
    assert_copied(store, tmp_path)
    assert (tmp_path / "back" / "spec.json").read_text() == "{}"
    remote.remove(1)
    assert remote.steps() == []
    assert not any("step-00000001" in name for name in remote.fs.find(remote.root))


def test_a_half_in_a_store_says_whose_it_is(store, tmp_path) -> None:
    remote = remote_of(store)
    path = saved(tmp_path / "run")
    for point, act in (
        ("mid_remote_copy", lambda: remote.upload(path, 1, run_dir=tmp_path / "run")),
        ("mid_remote_delete", lambda: remote.remove(1)),
    ):
        faults.arm(point, interrupt)
        with pytest.raises(KeyboardInterrupt):
            act()
        faults.disarm()
        assert (remote.found().whole, remote.found().partial) == ([], [1])
        assert remote.identity(1).spec == {"name": "case"}
        # begun anew, and made whole
        remote.upload(path, 1, run_dir=tmp_path / "run")
        assert (remote.found().whole, remote.found().partial) == ([1], [])
    remote.remove(1)
    assert remote.fs.find(f"{remote.root}/checkpoints") == []


def test_a_file_of_the_run_is_whole_there_whenever_the_copier_is_killed(tmp_path, monkeypatch) -> None:
    """In a folder, which has no uploads that are put in place at their end."""
    path = saved(tmp_path / "run")
    spec = tmp_path / "run" / "spec.json"
    remote = Remote(f"file://{tmp_path}/copies", owner=OURS)
    spec.write_text('{"before": 1}')
    remote.upload(path, 1, run_dir=tmp_path / "run")
    spec.write_text('{"after": 2}')
    pipe_file = remote.fs.pipe_file

    def half(there: str, data: bytes) -> None:
        if "spec.json" not in there:
            pipe_file(there, data)
            return
        pipe_file(there, data[: len(data) // 2])
        raise KeyboardInterrupt

    later = saved(tmp_path / "run", 2)
    with monkeypatch.context() as patch:
        patch.setattr(remote.fs, "pipe_file", half)
        with pytest.raises(KeyboardInterrupt):
            remote.upload(later, 2, run_dir=tmp_path / "run")
    assert (tmp_path / "copies" / "spec.json").read_text() == '{"before": 1}'
    remote.upload(later, 2, run_dir=tmp_path / "run")
    assert (tmp_path / "copies" / "spec.json").read_text() == '{"after": 2}'
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["checkpoints", OWNER, "spec.json"]


def test_what_another_run_copied_is_neither_written_over_nor_deleted(store, tmp_path, capfd) -> None:
    """Both started at the same moment: each had looked before the other had copied anything."""
    first = remote_of(store)
    first.claim()
    second = Remote(first.url, owner=ANOTHERS, wait_seconds=0.01)
    assert not second.is_claimed()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_text('{"whose": "first"}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "spec.json").write_text('{"whose": "second"}')
    first.upload(saved(tmp_path / "run", 1), 1, run_dir=tmp_path / "run")
    there = {path: first.fs.cat_file(path) for path in first.fs.find(first.root)}
    path = saved(tmp_path / "other", 1)
    for act in (lambda: second.upload(path, 1, run_dir=tmp_path / "other"), lambda: second.remove(1)):
        with pytest.raises(WriteError) as raised:
            act()
        text = f"checkpoint.copy_to={first.url}: another run, case (runs/case), copies there"
        assert text in str(raised.value)
        assert f"checkpoint.copy_to={first.url}/other, or another URL" in str(raised.value)
    assert {path: first.fs.cat_file(path) for path in first.fs.find(first.root)} == there


def test_a_place_is_claimed_when_nothing_is_said_against_it(tmp_path) -> None:
    url = f"file://{tmp_path}/copies"
    remote = Remote(url, owner=OURS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_text('{"whose": "first"}')
    remote.upload(saved(tmp_path / "run", 1), 1, run_dir=tmp_path / "run")
    copier = Copier(url, tmp_path / "other", owner=ANOTHERS, wait_seconds=0.01)
    seen = []

    def refuse(found) -> None:
        seen.extend((one.step, one.spec) for one in found)
        raise WriteError("no")

    with pytest.raises(WriteError, match="no"):
        copier.check(refuse)
    assert seen == [(1, {"name": "case"}), (None, {"whose": "first"})]
    assert remote.is_claimed()
    copier.check(lambda found: None)
    copier.close()
    assert not remote.is_claimed()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_files_of_several_parts(store, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megaspec.core.remote_files.PART_BYTES", 5 << 20)
    import torch

    from megaspec.checkpoint.shard import SavedPiece

    run = Store(tmp_path / "run")
    tensor = torch.arange(3_200_000, dtype=torch.float32)
    path = run.save(1, [SavedPiece("x", tuple(tensor.shape), (0,), tensor)], spec={}, state={}, comm=SOLO)
    remote_of(store).upload(path, 1, run_dir=tmp_path / "run")
    parts = [one for one in store.requests if one[0] == "PUT" and "partNumber" in one[1]]
    assert len(parts) == 3
    remote_of(store).download(tmp_path / "back", 1)
    with Store(tmp_path / "back").open(1, SOLO) as reader:
        assert torch.equal(reader.read("x"), tensor)


@pytest.mark.parametrize("fault", [503, "cut"])
def test_every_third_request_fails(store, tmp_path, fault) -> None:
    store.fault = lambda number, method, path: fault if number % 3 == 0 else None
    remote_of(store).upload(saved(tmp_path / "run"), 1, run_dir=tmp_path / "run")
    assert store.faults > 3
    assert_copied(store, tmp_path)


def test_a_bit_that_flips_on_the_way_is_found_and_sent_again(store, tmp_path) -> None:
    flips = []

    def once(number: int, method: str, path: str) -> str | None:
        if method == "PUT" and "safetensors" in path and not flips:
            flips.append(path)
            return "flip"
        return None

    store.fault = once
    remote_of(store).upload(saved(tmp_path / "run"), 1, run_dir=tmp_path / "run")
    assert len(flips) == 1
    puts = [path for method, path in store.requests if method == "PUT" and "safetensors" in path]
    assert len(puts) == 2
    assert_copied(store, tmp_path)


def test_a_store_that_always_damages_publishes_nothing(store, tmp_path) -> None:
    store.fault = lambda number, method, path: "flip" if method == "PUT" and "safetensors" in path else None
    with pytest.raises(WriteError, match=r"rank-00000\.safetensors: chunk 0 came back with other bytes") as raised:
        remote_of(store).upload(saved(tmp_path / "run"), 1, run_dir=tmp_path / "run")
    assert raised.value.exit_code == 73
    store.fault = lambda number, method, path: None
    assert remote_of(store).steps() == []


def test_tries_are_bounded(store, tmp_path) -> None:
    store.fault = lambda number, method, path: 503
    with pytest.raises(WriteError, match=r"checkpoint.copy_to=s3://b\d+/run: .*: "):
        remote_of(store).check()
    assert remote_module.TRIES <= len(store.requests) <= 3 * remote_module.TRIES


def test_a_copy_that_was_damaged_there_is_not_taken(store, tmp_path) -> None:
    remote = remote_of(store)
    for step in (1, 2):
        remote.upload(saved(tmp_path / "run", step), step, run_dir=tmp_path / "run")
    name = f"{remote.root}/checkpoints/step-00000002/rank-00000.safetensors"
    data = bytearray(remote.fs.cat_file(name))
    data[-1] ^= 1
    remote.fs.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        remote.download(tmp_path / "back", 2)
    assert cli.main(["checkpoint", "fetch", f"s3://{store.bucket}/run", "--out", str(tmp_path / "new")]) == 0
    assert Store(tmp_path / "new").steps() == [1]
    assert cli.main(["checkpoint", "fetch", f"s3://{store.bucket}/none", "--out", str(tmp_path / "none")]) == 66


@pytest.mark.parametrize("case", ["bad credentials", "no bucket", "no credentials", "nobody there"])
def test_what_fails_before_training_is_told_without_a_secret(store, tmp_path, monkeypatch, capfd, case) -> None:
    url = f"s3://{store.bucket}/run"
    match case:
        case "bad credentials":
            store.fault = lambda number, method, path: 403
            said = "access is denied: the credentials are wrong"
        case "no bucket":
            url = "s3://no-such-bucket/run"
            said = "there is no such bucket"
        case "no credentials":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
            said = "no credentials were found; set AWS_ACCESS_KEY_ID"
        case "nobody there":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            said = "can't be reached"
    copier = Copier(url, tmp_path, owner=OURS, wait_seconds=0.01)
    with pytest.raises(WriteError) as raised:
        copier.check(nothing_is_refused)
    copier.close()
    out, err = capfd.readouterr()
    assert raised.value.exit_code == 73
    assert said in str(raised.value)
    assert f"checkpoint.copy_to={url}" in str(raised.value)
    for text in (str(raised.value), out, err):
        assert SECRET not in text
        assert "canary-key" not in text


def test_a_scheme_that_nobody_knows(tmp_path) -> None:
    with pytest.raises(UsageError, match="needs a package that is not installed, or is no scheme"):
        Remote("nowhere://bucket/run")


def test_the_copier_tells_a_failure_and_goes_on(store, tmp_path, capfd) -> None:
    copier = Copier(f"file://{tmp_path}/copies", tmp_path / "run", owner=OURS, wait_seconds=0.01)
    copier.check(nothing_is_refused)
    first = saved(tmp_path / "run", 1)
    (tmp_path / "copies" / "checkpoints").write_text("a file is in the way")
    copier.copy(first, 1)
    with pytest.raises(WriteError, match="Not a directory"):
        copier.finish()
    assert "step 1 was not copied" in capfd.readouterr().err
    (tmp_path / "copies" / "checkpoints").unlink()
    # the second is under way, so that the third waits, until the fourth comes
    paths = {step: saved(tmp_path / "run", step) for step in (2, 3, 4)}
    # however long this process is kept from its core
    os.kill(copier._process.pid, signal.SIGSTOP)
    for step, path in paths.items():
        copier.copy(path, step)
    os.kill(copier._process.pid, signal.SIGCONT)
    copier.drop(2)
    copier.finish()
    assert "step 3 is not copied" in capfd.readouterr().err
    copier.close()
    assert Remote(f"file://{tmp_path}/copies").steps() == [4]


def test_a_copier_that_is_killed_begins_anew(tmp_path) -> None:
    copier = Copier(f"file://{tmp_path}/copies", tmp_path / "run", owner=OURS, wait_seconds=0.01)
    copier.check(nothing_is_refused)
    os.kill(copier._process.pid, 9)
    copier.copy(saved(tmp_path / "run", 1), 1)
    copier.finish()
    copier.close()
    assert Remote(f"file://{tmp_path}/copies").steps() == [1]


class Slow(Copier):
    """Whose store takes a while, and which tells what was there whenever something came or went."""

    def __init__(self, folder: Path):
        super().__init__(f"file://{folder}/copies", folder / "run", owner=OURS, wait_seconds=0.01)
        self.history: list[list[int]] = []
        self._remote = Remote(f"file://{folder}/copies")

    def _done(self, answer: dict) -> None:
        self.history.append(self._remote.steps())
        super()._done(answer)


def test_nothing_is_deleted_before_the_newer_one_is_there(tmp_path) -> None:
    copier = Slow(tmp_path)
    copier.copy(saved(tmp_path / "run", 1), 1)
    copier.finish()
    # with checkpoint.keep=1 the earlier one is deleted before the newer is copied
    path = saved(tmp_path / "run", 2)
    copier.drop(1)
    copier.copy(path, 2)
    copier.finish()
    copier.close()
    assert copier.history == [[1], [1, 2], [2]]


def test_nothing_is_deleted_while_no_copy_arrives(tmp_path, capfd) -> None:
    copier = Copier(f"file://{tmp_path}/copies", tmp_path / "run", owner=OURS, wait_seconds=0.01)
    copier.copy(saved(tmp_path / "run", 1), 1)
    copier.finish()
    path = saved(tmp_path / "run", 2)
    copies = tmp_path / "copies" / "checkpoints"
    (copies / "step-00000002").write_text("a file is in the way")
    copier.drop(1)
    copier.copy(path, 2)
    with pytest.raises(WriteError, match="Not a directory"):
        copier.finish()
    assert Remote(f"file://{tmp_path}/copies").steps() == [1]
    (copies / "step-00000002").unlink()
    copier.copy(saved(tmp_path / "run", 3), 3)
    copier.finish()
    copier.close()
    assert Remote(f"file://{tmp_path}/copies").steps() == [3]


def test_a_newest_copy_that_has_to_go_gives_way_to_another(tmp_path) -> None:
    """The run went back: what it goes on from is copied first."""
    copier = Slow(tmp_path)
    first = saved(tmp_path / "run", 1)
    copier.copy(saved(tmp_path / "run", 2), 2)
    copier.finish()
    copier.drop(2)
    copier.finish()
    copier.copy(first, 1)
    copier.finish()
    copier.close()
    assert copier.history == [[2], [1, 2], [1]]


def test_a_damaged_checkpoint_that_is_not_copied_is_no_success(tmp_path, capfd) -> None:
    copier = Copier(f"file://{tmp_path}/copies", tmp_path / "run", owner=OURS, wait_seconds=0.01)
    path = saved(tmp_path / "run", 1)
    (path / "manifest.json").write_bytes(b"{")
    copier.copy(path, 1)
    with pytest.raises(WriteError, match="manifest"):
        copier.finish()
    copier.close()


def test_what_was_saved_elsewhere_is_copied_with_the_files_of_its_run(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.json").write_text("{}")
    copier = Copier(f"file://{tmp_path}/copies", run, owner=OURS, wait_seconds=0.01)
    copier.copy(saved(tmp_path / "other" / "run-1234", 1), 1)
    copier.finish()
    copier.close()
    assert (tmp_path / "copies" / "spec.json").read_text() == "{}"
