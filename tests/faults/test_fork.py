"""A fork that is cut off while it is made: what it leaves is never taken for a run, and says what to do."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.checkpoint.lock import RunLock
from megaspec.commands import starting
from megaspec.core import faults
from megaspec.run_folder import FORKING, is_run
from tests.faults.runs import go, make_run, recipe
from tests.faults.test_start import ENVIRONMENT

# Where it is killed, and whether spec.json is there by then.
POINTS = {"fork_file_copied": False, "fork_copied": False, "fork_written": True}
MADE_UP = ("data=synthetic", "~data.blend", "train.sample=null")
FORK = ["resume", "run", "--fork", "child", "optim.lr=0.5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, factory):
    """A run of six steps that has ended."""
    run = make_run(tmp_path_factory.mktemp("finished") / "run", recipe(steps=6))
    assert go(run, factory) == 0
    return run


@pytest.fixture
def folder(finished, tmp_path, monkeypatch):
    """A copy of it in the current folder. No rank is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    shutil.copytree(finished, "run")
    yield tmp_path
    faults.disarm()


@pytest.mark.parametrize("point", POINTS)
def test_what_a_killed_fork_leaves_is_no_run(folder, point, capsys):
    command = [sys.executable, "-P", "-m", "megaspec.cli", *FORK]
    killed = subprocess.run(command, env=ENVIRONMENT | {"MEGASPEC_FAULT": point}, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    child = Path("child")
    assert json.loads((child / FORKING).read_text()) == {"source": "run", "step": 6}
    assert (child / "spec.json").exists() == POINTS[point]
    assert not is_run(child)
    before = sorted(child.rglob("*"))
    said = "run_dir=child is no run: a fork of run at step 6 was interrupted while it was made there; "
    commands = [
        ["resume", "child"],
        ["train", "recipe=hello", "run_dir=child", "resume=auto"],
        ["train", "recipe=hello", "run_dir=child", *MADE_UP],
        FORK,
        ["resume", "child", "--fork", "grandchild"],
        ["generate", "child", "text"],
        ["diff", "./child", "run"],
        ["checkpoint", "list", "child"],
        ["checkpoint", "verify", "child"],
    ]
    for words in commands:
        capsys.readouterr()
        assert cli.main(words) == 66, words
        assert f"{said}delete child and fork again: megaspec resume run --fork child" in capsys.readouterr().err, words
    assert sorted(child.rglob("*")) == before
    # the way out
    shutil.rmtree(child)
    assert cli.main(FORK) == 0
    assert is_run(child)
    assert not (child / FORKING).exists()
    assert cli.main(["resume", "child"]) == 0


def test_a_fork_that_is_being_made_is_waited_for(folder, capsys):
    assert cli.main(FORK) == 0
    Path("child", FORKING).write_text(json.dumps({"source": "run", "step": 6}))
    with RunLock("child"):
        for words in (["resume", "child"], FORK):
            capsys.readouterr()
            assert cli.main(words) == 78
            assert "a fork of run at step 6 is being made there; wait until it is" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", "\0", "[" * 3000, '{"source": ["x"], "step": {}}'])
def test_a_marker_that_was_cut_off_counts_all_the_same(folder, content, capsys):
    assert cli.main(FORK) == 0
    Path("child", FORKING).write_text(content)
    assert cli.main(["resume", "child"]) == 66
    assert "was interrupted while it was made there" in capsys.readouterr().err


def test_a_link_in_the_place_of_the_marker_is_not_followed(folder, capsys):
    assert cli.main(FORK) == 0
    Path("precious").write_text(json.dumps({"source": "precious", "step": 6}))
    Path("child", FORKING).symlink_to(Path("precious").resolve())
    assert cli.main(["resume", "child"]) == 66
    assert "precious" not in capsys.readouterr().err


def test_a_fork_that_could_not_be_copied_leaves_a_folder_for_the_next(folder, capsys):
    def disk_is_full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    faults.arm("fork_file_copied", disk_is_full)
    assert cli.main(FORK) == 73
    faults.disarm()
    assert os.listdir("child") == ["lock"]
    assert cli.main(FORK) == 0
