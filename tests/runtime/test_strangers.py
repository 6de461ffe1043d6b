"""Who reaches the store of a job can't tell its ranks what to do."""

import json
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megaspec.launcher.rendezvous import TcpRendezvous
from megaspec.launcher.run_secret import RunSecret
from megaspec.runtime import join as joining
from megaspec.runtime.join import join
from tests.runtime.specs import make_run

SECRET = RunSecret(b"of this job, and of nobody else")


@pytest.fixture
def store():
    """What torchrun's agent serves: it outlives attempts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def place(store: dist.TCPStore, attempt: int) -> TcpRendezvous:
    return TcpRendezvous(host="127.0.0.1", port=store.port, prefix=f"megaspec/job/{attempt}", is_open=True)


def attempt(
    store: dist.TCPStore, number: int, folder: Path, *, secrets=(SECRET, SECRET), local_ranks=(0, 1)
) -> tuple[list[int], list[str]]:
    """One attempt of two ranks, as threads. -> their exit codes, and the folders that they were sent to."""
    codes = [-1, -1]
    trained: list[str] = []

    def train(run_dir: str, **_: object) -> int:
        trained.append(run_dir)
        return 0

    def rank_main(rank: int) -> None:
        codes[rank] = join(
            lambda: str(folder),
            rank=rank,
            world_size=2,
            local_rank=local_ranks[rank],
            attempt=number,
            store=place(store, number),
            secret=secrets[rank],
            entry=train,
        )

    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=60)
    return codes, trained


def keys_of(store: dist.TCPStore, ending: str) -> list[str]:
    return [key for key in store.list_keys() if key.endswith(ending)]


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """The run's, and one that a stranger would like it to train in."""
    return make_run(tmp_path / "run", {}), make_run(tmp_path / "elsewhere", {})


def test_a_job_that_nobody_disturbs_finds_its_run_again(store, folders):
    mine, _ = folders
    assert attempt(store, 0, mine) == ([0, 0], [str(mine)] * 2)
    assert attempt(store, 1, mine) == ([0, 0], [str(mine)] * 2)


def test_a_stranger_who_moves_the_run_before_a_restart_is_refused(store, folders, capfd):
    """It went to the stranger's folder, with exit code 0."""
    mine, elsewhere = folders
    attempt(store, 0, mine)
    key = shared_key(store)
    store.set(key, str(elsewhere))
    codes, trained = attempt(store, 1, mine)
    assert codes == [64, 64]
    assert trained == []
    assert "was not written by a rank of this job" in capfd.readouterr().err


def shared_key(store: dist.TCPStore) -> str:
    """The key that outlives attempts: `megaspec/job/TOKEN/run`."""
    found = [key for key in keys_of(store, "/run") if "/0/" not in key]
    assert len(found) == 1, found
    return found[0]


def test_the_old_key_that_could_be_guessed_is_read_by_nobody(store, folders):
    mine, elsewhere = folders
    for key in ("megaspec/job/run", "megaspec/job/0/run", "megaspec/job/1/run"):
        store.set(key, str(elsewhere))
    for number in (0, 1):
        assert attempt(store, number, mine) == ([0, 0], [str(mine)] * 2)


def test_what_was_signed_for_another_place_moves_nothing(store, folders, capfd):
    """A stranger who heard the network replays what a rank has signed."""
    mine, _ = folders
    attempt(store, 0, mine)
    (answer,) = [key for key in keys_of(store, "/run") if "/0/" in key]
    store.set(shared_key(store), store.get(answer))
    codes, trained = attempt(store, 1, mine)
    assert codes == [64, 64]
    assert trained == []
    assert "was not written by a rank of this job" in capfd.readouterr().err


def test_a_spec_that_was_changed_since_it_was_prepared_is_not_trained(store, folders, capfd):
    mine, _ = folders
    assert attempt(store, 0, mine)[0] == [0, 0]
    spec = json.loads((mine / "spec.json").read_text())
    spec["optim"]["lr"] *= 10
    (mine / "spec.json").write_text(json.dumps(spec))
    codes, trained = attempt(store, 1, mine)
    assert codes == [64, 64]
    assert trained == []
    assert "somebody changed it" in capfd.readouterr().err


def test_ranks_with_different_secrets_do_not_meet(store, folders, monkeypatch, capfd):
    monkeypatch.setattr(joining, "JOIN_SECONDS", 2.0)
    mine, _ = folders
    codes, trained = attempt(store, 0, mine, secrets=(SECRET, RunSecret(b"that of another job, or none")))
    assert codes == [74, 74]
    assert trained == []
    assert "ranks that have different secrets don't find each other" in capfd.readouterr().err
