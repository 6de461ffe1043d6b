"""`megaspec recipes`: a line each, with size, GPUs, purpose and provenance."""

import json

import pytest

from megaspec.cli import main
from megaspec.compose.search_path import SearchPath


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_table(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("mixtral_8x7b ")]
    purpose, source = lines[lines.index(row) + 1 : lines.index(row) + 3]
    assert row.split()[1:7] == ["46.7B,", "12.9B", "active", "64", "x", "H100"]
    assert "Mixtral 8x7B from scratch" in purpose
    assert "Jiang et al. 2024" in source
    assert {line.split()[0] for line in lines if line.strip()} >= set(SearchPath().choices("recipe"))


def test_the_json(capsys):
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == SearchPath().choices("recipe")
    assert found["deepseek_v3"]["gpus"] == 256
    assert found["deepseek_v3"]["hardware"] == "H100"
    assert found["deepseek_v3"]["active"] == pytest.approx(37e9, rel=0.02)
    assert found["hello"]["gpus"] is None
    assert all(one["purpose"] and (one["source"] or name == "hello") for name, one in found.items())


def test_a_wrong_recipe_is_listed_with_what_is_wrong(capsys, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults:\n  - hello\ntrain: {stepss: 1}\n")
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "did you mean steps or skip_steps?" in found["mine"]["wrong"]
    assert main(["recipes"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("mine")] == ["wrong"]
