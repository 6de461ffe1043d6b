import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.commands import data
from megaspec.core.errors import DataError

ROOT = Path(__file__).parents[2]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, words)])
    return data.run(args)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n{"text": "and more"}\n{"text": 1}\n')
    return tmp_path / "a.jsonl"


def test_prepare_then_inspect(source, tmp_path, capsys):
    words = ["prepare", source, "--out", tmp_path / "d", "--workers", "1", "--skip-bad", "1"]
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "prepared: 2 documents, 20 tokens of uint16, tokenizer byte (257 ids)" in out
    assert "left out: 1 lines, wrong type" in out
    assert run(*words) == 0
    assert "was already prepared" in capsys.readouterr().out
    assert run("inspect", tmp_path / "d") == 0
    out = capsys.readouterr().out
    assert "some words" in out
    assert "every checksum" in out


def test_bad_lines_stop_it(source, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:3: wrong type"):
        run("prepare", source, "--out", tmp_path / "d", "--workers", "1")


def test_no_eod(source, tmp_path, capsys):
    assert run("prepare", source, "--out", tmp_path / "d", "--eod", "none", "--skip-bad", "1") == 0
    assert "18 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--workers", "0"], ["--workers", "x"], ["--skip-bad", "-1"], ["--nonsense"]])
def test_wrong_flags(source, tmp_path, words):
    with pytest.raises(SystemExit) as stop:
        run("prepare", source, "--out", tmp_path / "d", *words)
    assert stop.value.code == 2


def test_no_torch(tmp_path):
    """The commands, and the facts that a plan needs, leave torch and the tokenizer library alone."""
    code = (
        "import sys, megaspec.commands.data, megaspec.data.facts\n"
        "assert 'tokenizers' not in sys.modules\n"
        "import megaspec.data.prepare, megaspec.data.inspect, megaspec.data.order, megaspec.data.indexed_source\n"
        "import megaspec.data.synthetic, megaspec.data.random, megaspec.data.progress\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
