"""The record of what a run was made with, and that no secret gets into it."""

import json
import subprocess

import pytest

from megaspec.core.errors import WriteError
from megaspec.log.environment import HIDDEN, commit, harmless, write_environment

CANARY = "c4n4ry-t0k3n"
SECTIONS = {"optim", "data", "recipe"}
WORDS = {"train", "resume", "--config-dir", "runs/mine"}


def test_record(tmp_path):
    path = write_environment(tmp_path, command=["/usr/bin/megaspec", "train"], words=WORDS, sections=SECTIONS)
    record = json.loads(path.read_text())
    assert path == tmp_path / "environment.json"
    assert record["command"] == ["megaspec", "train"]
    assert record["versions"]["torch"].split(".")[0].isdigit()
    assert record["python"].startswith("3.")
    assert record["cores"] >= 1
    assert isinstance(record["gpus"], list)
    assert [p.name for p in tmp_path.iterdir()] == ["environment.json"]


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("optim.lr=3e-4", "optim.lr=3e-4"),
        ("recipe=hello", "recipe=hello"),
        ("runs/mine", "runs/mine"),
        ("--config-dir", "--config-dir"),
        (f"--config-dir={CANARY}", f"--config-dir={HIDDEN}"),
        (CANARY, HIDDEN),
        (f"--token={CANARY}", HIDDEN),
        (f"token={CANARY}", HIDDEN),
        (f"WANDB_API_KEY={CANARY}", HIDDEN),
        (f"data.path=s3://me:{CANARY}@bucket/x", "data.path=s3://bucket/x"),
        (f"data.path=https://{CANARY}@host/x", "data.path=https://host/x"),
        (f"data.path=https://host/x?sig={CANARY}", "data.path=https://host/x"),
    ],
)
def test_words_of_the_command_line(word, kept):
    assert harmless(["megaspec", "train", word], words=WORDS, sections=SECTIONS)[2] == kept


def test_no_secret_of_the_environment_is_written(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MEGASPEC_SECRET", "HOME_PAGE"):
        monkeypatch.setenv(name, CANARY)
    command = ["megaspec", "train", "--key", CANARY, f"--password={CANARY}"]
    path = write_environment(tmp_path, command=command, words=WORDS, sections=SECTIONS)
    assert CANARY not in path.read_text()


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_commit(tmp_path, monkeypatch):
    assert commit(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "m")
    (tmp_path / "untracked").touch()
    found = commit(tmp_path / "a")
    assert len(found["commit"]) == 40
    assert found["changed"] is False
    assert commit(tmp_path / "untracked") is None
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path)["changed"] is True
    monkeypatch.setenv("PATH", "")
    assert commit(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(WriteError, match=r"nowhere/environment\.json"):
        write_environment(tmp_path / "nowhere", command=["m"], words=(), sections=())


def test_it_is_not_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for name in ("environment.json", "environment.new"):
        (tmp_path / name).symlink_to(precious)
    path = write_environment(tmp_path, command=["megaspec"], words=(), sections=())
    assert path.is_file()
    assert not path.is_symlink()
    assert precious.read_bytes() == b"precious"
