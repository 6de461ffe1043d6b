"""A newcomer's first hour is run as its page has it: every block in order, by the shell, in a folder of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from megaspec.cli import main
from tests.test_readme import ENVIRONMENT, FIRST_HOUR, ROOT, Command, assert_shown
from tests.warm import warm_program

MAKE_TRAIN = (
    "data.split=[1,0,0]",
    "data.seq_len=16",
    "train.steps=2",
    "train.eval_every=0",
    "optim.schedule.warmup_steps=1",
    "launcher.ranks=1",
    "log.console=quiet",
)


def steps(page: Path) -> Iterator[Command]:
    """The ```bash blocks of a page, each with the lines of the ```text block that follows it."""
    fenced = re.findall(r"^```(bash|text)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [*fenced, ("bash", "")]
    for (language, body), (next_language, shown) in pairwise(blocks):
        if language == "text":
            continue
        if next_language == "text":
            yield Command(body, tuple(shown.splitlines()))
        else:
            yield Command(body)


@pytest.fixture
def program() -> Iterator[str]:
    """Commands of the page are in processes of their own, which need not load everything first."""
    with warm_program() as command:
        yield command


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_launches: None, program: str) -> Path:
    """A folder as `make train` leaves it, with less text and fewer steps: .venv, data/hello, runs/hello."""
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    (programs / "megaspec").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (programs / "megaspec").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    (tmp_path / "hello.txt").write_text((ROOT / "README.md").read_text() * 2)
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["data", "prepare", "hello.txt", "--out", "data/hello", "--tokenizer", "byte"]) == 0
    assert main(["train", "recipe=hello", *MAKE_TRAIN]) == 0
    return tmp_path


def shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env=ENVIRONMENT | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.timeout(900)
def test_a_newcomers_first_hour(clone):
    # what a block exports holds in those that follow it, as in a terminal
    exported = ""
    for step in steps(FIRST_HOUR):
        done = shell(clone, exported + step.line)
        assert done.returncode == 0, f"{step.line}\n{done.stdout}"
        if step.shown is not None:
            assert_shown(step, done.stdout)
        for line in step.line.splitlines():
            if line.startswith(("export ", ". ")):
                exported += f"{line}\n"
    assert (clone / "runs/streamed/spec.json").exists()
    assert os.listdir(clone / "sweeps") == ["rates"]
