"""What the README shows exists and runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.cli import main, parse
from megaspec.compose.compose import compose
from megaspec.core.errors import RecipeError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXT = README + (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [body for found, body in fenced if found == language]


def test_the_loop_of_ones_own_is_short_and_trains(tmp_path):
    (program,) = blocks("python")
    assert len(program.splitlines()) <= 40
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


def test_the_recipe_of_ones_own_composes(tmp_path, monkeypatch):
    (text,) = blocks("yaml")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    recipe = compose("mine").recipe
    assert (recipe.parallelism.tp, recipe.train.steps, len(recipe.data.blend)) == (2, 10_000, 2)


def test_commands_can_be_parsed():
    (commands,) = (b for b in blocks("") if "megaspec generate" in b)
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "megaspec":
            parse(words[1:])


def test_mistakes_read_as_shown(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    (shown,) = (b for b in blocks("") if b.startswith("$ megaspec"))
    for example in re.split(r"^\$ megaspec ", shown, flags=re.MULTILINE)[1:]:
        command, _, expected = example.partition("\n")
        assert main(shlex.split(command)) == 64
        assert capsys.readouterr().err == f"megaspec:\n{expected}"


def test_commands_and_targets_exist():
    found = set(re.findall(r"^megaspec ([a-z-]+)", README, re.MULTILINE))
    with pytest.raises(RecipeError, match="choose from") as caught:
        parse(["nothing"])
    known = set(re.findall(r"'([a-z-]+)'", str(caught.value).partition("choose from")[2]))
    assert found == known
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"train", "test", "lint"} <= named <= targets
    assert {"install", "train", "test", "test-gpu", "lint", "format", "bench", "golden"} <= targets


def test_files_and_folders_exist():
    for path in re.findall(r"`((?:megaspec|conf|kernels|launchers|tests|recipes)/[\w/.-]+)`", TEXT):
        if "<" not in path:
            assert (ROOT / path).exists(), path
