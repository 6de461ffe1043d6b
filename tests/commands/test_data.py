import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.commands import data
from megaspec.core.errors import DataError
from megaspec.data.indexed import IndexedFile

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
    assert "left out: 1 line, wrong type" in out
    assert run(*words) == 0
    assert "was already prepared" in capsys.readouterr().out
    assert run("inspect", tmp_path / "d") == 0
    out = capsys.readouterr().out
    assert "some words" in out
    assert "every checksum" in out


def test_bad_lines_stop_it(source, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:3: wrong type"):
        run("prepare", source, "--out", tmp_path / "d", "--workers", "1")


def test_skip_bad_without_a_number_leaves_all_out_and_says_where(source, tmp_path, capsys):
    assert run("prepare", source, "--out", tmp_path / "d", "--workers", "1", "--skip-bad") == 0
    out = capsys.readouterr().out
    assert "left out: 1 line, wrong type" in out
    assert f"listed with their reasons: {tmp_path}/d.bad-lines.txt" in out
    listed = (tmp_path / "d.bad-lines.txt").read_text()
    assert listed == f'{source}:3: wrong type: "text" must be a string, found a number (1)\n'


def test_skip_bad_in_front_of_an_input_is_told(source, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("prepare", "--out", tmp_path / "d", "--skip-bad", source)
    assert "name INPUT before --skip-bad" in capsys.readouterr().err


@pytest.fixture
def articles(tmp_path):
    (tmp_path / "articles.jsonl").write_text('{"title": "A", "body": "one"}\n{"title": "B", "body": "two"}\n')
    return tmp_path / "articles.jsonl"


def test_several_keys_are_joined(articles, tmp_path, capsys):
    words = ["prepare", articles, "--key", "title", "--key", "body", "--workers", "1"]
    assert run(*words, "--out", tmp_path / "d") == 0
    assert run(*words, "--out", tmp_path / "e", "--join", r": \t") == 0
    assert [bytes(IndexedFile(tmp_path / name).read(1)[:-1].tolist()) for name in "de"] == [b"B\n\ntwo", b"B: \ttwo"]


def test_a_data_set_for_each_key(articles, tmp_path, capsys):
    words = ["prepare", articles, "--key", "title", "--key", "body", "--workers", "1", "--per-key"]
    assert run(*words, "--out", tmp_path / "d") == 0
    for key, text in (("title", b"B"), ("body", b"two")):
        assert bytes(IndexedFile(tmp_path / f"d_{key}_document").read(1)[:-1].tolist()) == text
    assert not (tmp_path / "d.bin").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--key", "a", "--key", "a"], "names one key twice"),
        (["--key", "a", "--join", " "], "--key a is one"),
        (["--key", "a", "--key", "b", "--join", " ", "--per-key"], "drop one"),
        (["--key", "a", "--key", "b", "--per-key", "--tokenizer", "bpe:300"], r"--tokenizer .*/d\.tokenizer\.json"),
    ],
)
def test_keys_that_do_not_go_together(articles, tmp_path, words, told):
    with pytest.raises(DataError, match=told):
        run("prepare", articles, "--out", tmp_path / "d", *words)


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
