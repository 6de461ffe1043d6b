"""`megaspec checkpoint list` and `verify`: a table, exit code 66 when something is bad, and nothing is changed."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.checkpoint import examine
from megaspec.checkpoint.store import Store
from megaspec.commands.checkpoint import add_parser, run
from megaspec.core.errors import CheckpointError
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO, save

ROOT = Path(__file__).parents[2]


def command(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["checkpoint", *map(str, words)]))


@pytest.fixture
def store(tmp_path) -> Store:
    made = Store(tmp_path, chunk_bytes=CHUNK)
    for step in (1, 2, 3):
        save(made, step)
    return made


def flip(store: Store, step: int) -> None:
    file = store.folder / f"step-{step:08d}" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_good_ones(store, tmp_path, capsys) -> None:
    assert command("list", tmp_path) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["step", "generation", "tensors", "files", "MB", "state"]
    assert [r[:4] + r[5:] for r in rows[1:]] == [[str(s), str(s), "5", "1", "whole"] for s in (3, 2, 1)]
    assert command("verify", tmp_path) == 0
    assert capsys.readouterr().out.count("good") == 3


def test_bad_ones(store, tmp_path, capsys) -> None:
    flip(store, 2)
    before = sorted(tmp_path.rglob("*"))
    assert command("list", tmp_path) == 0, "a list looks at sizes only"
    assert command("verify", tmp_path, "--step", 3) == 0
    capsys.readouterr()
    assert command("verify", tmp_path) == 66
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["good", "BAD", "good"]
    assert "step-00000002/rank-00000.safetensors: bytes" in out
    assert "crc32 expected" in out
    (store.folder / "step-00000001" / "manifest.json").unlink()
    assert command("list", tmp_path) == 66
    assert "step-00000001/manifest.json: missing" in capsys.readouterr().out
    before.remove(store.folder / "step-00000001" / "manifest.json")
    assert sorted(tmp_path.rglob("*")) == before


def test_quarantine_is_listed_with_its_reason(store, tmp_path, capsys) -> None:
    flip(store, 3)
    store.newest_good(SOLO).close()
    assert command("list", tmp_path) == 0
    assert "in quarantine: step-00000003-1: " in capsys.readouterr().out


def test_one_that_is_removed_while_it_is_verified(store, tmp_path, capsys, monkeypatch) -> None:
    real = examine.open_folder

    def remove(path: Path) -> int:
        if path.name == "step-00000002" and sys._getframe(1).f_code.co_name == "find_damage":
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(examine, "open_folder", remove)
    assert command("verify", tmp_path) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["3", "1"]


def test_nothing_to_show(store, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"step=9 has no checkpoint in .*; there are 1, 2, 3"):
        command("verify", tmp_path, "--step", 9)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        command("list", tmp_path / "nowhere")


def test_it_never_loads_torch(store, tmp_path) -> None:
    code = (
        "import argparse, sys\n"
        "from megaspec.commands.checkpoint import add_parser, run\n"
        "from megaspec.checkpoint.lock import RunLock\n"
        "p = argparse.ArgumentParser(); add_parser(p.add_subparsers())\n"
        "assert run(p.parse_args(['checkpoint', 'verify', sys.argv[1]])) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
