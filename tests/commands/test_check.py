"""`megaspec check`: every recipe on its GPUs, without data and without torch; all that is wrong at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.commands.check import check
from megaspec.commands.stated import stated
from megaspec.compose.search_path import SearchPath
from megaspec.core.units import count_in_words
from megaspec.estimate.memory import fullest, memory_of

ROOT = Path(__file__).parents[2]
WRONG = """defaults:
  - llama3_8b
parallelism: {tp: 3, cp: 5}
optim: {schedule: {min_lr: 1.0}}
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_all_shipped_recipes_are_right_quickly_and_without_torch(tmp_path):
    code = "import sys; from megaspec.cli import main; rc = main(['check', '--json']); "
    code += "print('torch' in sys.modules, file=sys.stderr); sys.exit(rc)"
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert time.monotonic() - start < 10
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "False"
    found = json.loads(done.stdout)
    assert set(found) == {p.stem for p in (ROOT / "recipes").glob("*.yaml")}
    assert all(one["ok"] and one["fits"] for one in found.values()), found


# As the papers and model cards count them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2_7b", 6.74),
        ("llama2_13b", 13.02),
        ("llama3_8b", 8.03),
        ("llama3_70b", 70.55),
        ("llama3_1_405b", 405.85),
        ("gpt3_175b", 174.6),
        ("mixtral_8x7b", 46.70),
        ("qwen3_30b_a3b", 30.53),
        ("deepseek_v3", 671.0),
    ],
)
def test_published_parameters(name, billions):
    assert check(name).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_everything_wrong_with_a_file_is_told_with_its_line(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(WRONG)
    assert main(["check", "mine.yaml", "hello"]) == 64
    out = capsys.readouterr().out
    for text in (
        "mine.yaml: parallelism.tp=3 must divide model.n_heads=32; try 1, 2, 4, 8, 16 or 32   (mine.yaml:3) [tp-heads]",
        "(recipes/llama3_8b.yaml:9) [cp-seq]",
        "(mine.yaml:4) [lr-min]",
        "2 recipes, 1 wrong",
    ):
        assert text in out, text
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:5] == ["wrong", "mine.yaml", "8", "x", "H100"]
    assert rows[2][:2] == ["ok", "hello"]


def test_local_recipes_are_checked_and_inherit_from_their_neighbours(capsys, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "base.yaml").write_text("defaults:\n  - hello\nmodel: {n_layers: 3}\n")
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults:\n  - base\ntrain: {steps: -1}\n")
    assert main(["check", "--json"]) == 64
    found = json.loads(capsys.readouterr().out)
    assert found["base"]["ok"]
    assert set(SearchPath().choices("recipe")) == set(found)
    (problem,) = found["mine"]["problems"]
    assert (problem["code"], problem["key"], problem["origin"]) == ("key.type", "train.steps", "recipes/mine.yaml:3")
    (tmp_path / "elsewhere").mkdir()
    for name in ("base2", "mine2"):
        text = (tmp_path / "recipes" / f"{name[:-1]}.yaml").read_text().replace("- base", "- base2")
        (tmp_path / "elsewhere" / f"{name}.yaml").write_text(text)
    assert check("elsewhere/base2.yaml").problems == ()
    assert [p.origin for p in check("elsewhere/mine2.yaml").problems] == ["elsewhere/mine2.yaml:3"]


def test_a_recipe_that_is_too_large_is_not_all_right_and_each_remedy_stands_on_a_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "large.yaml").write_text("defaults:\n  - llama3_70b\nparallelism: {pp: 1, tp: 2}\n")
    assert main(["check", "large.yaml", "hello"]) == 64
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["does", "not", "fit", "large.yaml"]
    assert lines[2].split()[:2] == ["ok", "hello"]
    assert lines[-1] == "2 recipes, 1 too large for its GPUs"
    checked = check("large.yaml")
    assert (checked.state, checked.fits, checked.problems) == ("does not fit", False, ())
    assert checked.remedies
    for remedy in checked.remedies:
        assert any(line.startswith(f"  {' '.join(remedy.overrides)}   (") for line in lines), remedy
        if not remedy.overrides[0].startswith("hardware="):
            mended = stated("large.yaml", remedy.overrides)
            assert fullest(memory_of(mended.spec())).total == remedy.total <= mended.hardware.memory
    assert main(["check", "large.yaml", "--json"]) == 64
    found = json.loads(capsys.readouterr().out)["large.yaml"]
    assert (found["ok"], found["fits"], found["problems"]) == (False, False, [])
    assert found["remedies"][0] == {
        "overrides": list(checked.remedies[0].overrides),
        "total": checked.remedies[0].total,
    }


@pytest.mark.parametrize(
    ("word", "text"),
    [("helo", "did you mean hello?"), ("no.yaml", "no such file"), ("bad.yaml", "not valid YAML")],
)
def test_what_is_no_recipe(capsys, tmp_path, word, text):
    (tmp_path / "bad.yaml").write_text("a: [1")
    assert main(["check", word]) == 64
    assert text in capsys.readouterr().out


def test_sizes_in_words():
    sizes = (7, 722_176, 124_439_808, 6_738_415_616, 13_015_864_320, 671_026_419_200)
    assert [count_in_words(n) for n in sizes] == ["7", "722k", "124M", "6.74B", "13.0B", "671B"]
