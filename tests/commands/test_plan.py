"""`megaspec plan` as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.cli import main
from tests.pace import within

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)


def as_json(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_a_gpu_it_takes_what_the_source_names(capsys):
    content = as_json(capsys, "recipe=llama2_7b")
    assert (content["hardware"]["name"], content["hardware"]["gpus"]) == ("A100-80", 8)
    content = as_json(capsys, "recipe=hello")
    assert content["hardware"]["name"] == "H100"


def test_hardware_and_gpus_stand_anywhere_on_the_line(capsys):
    content = as_json(capsys, "gpus=16", "recipe=hello", "hardware=b200", "train.global_batch=64")
    assert (content["hardware"]["name"], content["hardware"]["gpus"], content["mesh"]["world"]) == ("B200", 16, 16)
    assert content["memory"]["capacity"] > 170 * 2**30


def test_it_names_the_change_that_would_save_most(capsys):
    words = ("recipe=llama3_1_405b", "gpus=16384", "parallelism.pp=16", "parallelism.cp=1")
    now = as_json(capsys, *words)
    change = now["change"]
    assert change["saves"] > 0.3
    then = as_json(capsys, *words, *change["overrides"])
    assert then["step_time"]["seconds"] == pytest.approx(change["seconds"])
    assert then["memory"]["fits"]
    assert main(["plan", *words]) == 0
    assert f"\n  {' '.join(change['overrides'])}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=llama3_70b", "gpus=128"], ""),
        (
            ["recipe=llama3_70b", "gpus=128", "launcher.ranks=64"],
            "64 of 128 GPUs idle: launcher.ranks=64   (command line)",
        ),
        (["recipe=hello", "hardware=H100", "gpus=20"], "12 of 20 GPUs idle: launcher.ranks=8   (one per GPU"),
        (["recipe=llama3_70b", "gpus=64"], ""),
        (["recipe=hello", "hardware=cpu"], ""),
    ],
)
def test_gpus_without_a_rank_are_told(words, says, capsys):
    assert main(["plan", *words]) == 0
    err = capsys.readouterr().err
    assert says in err
    assert ("idle" in err) == bool(says)


def test_the_cpu_is_planned_as_train_would_take_it(capsys):
    content = as_json(capsys, "recipe=hello", "hardware=cpu")
    assert content["hardware"]["name"] == "cpu"
    assert (content["mesh"]["world"], content["mesh"]["tp"]) == (2, 2)
    assert content["step_time"] is None
    assert content["memory"]["fits"] is True


def test_ranks(capsys):
    content = as_json(capsys, "recipe=llama3_70b", "--ranks", "0,63")
    assert [rank["rank"] for rank in content["ranks"]] == [0, 63]
    assert content["ranks"][1]["groups"]["tp"] == [60, 61, 62, 63]
    assert main(["plan", "recipe=llama3_70b", "--ranks", "0"]) == 0
    assert "its tp group" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "64"), "--ranks 64 must be ranks from 0 to 63"),
        (("--ranks", "x"), "--ranks x must be ranks"),
        (("hardware=H300",), "H300"),
        (("gpus=0",), "gpus=0 must be a whole number from 1"),
        (("throughput=nowhere.json",), "throughput=nowhere.json is no file"),
    ],
)
def test_mistakes(words, says, capsys):
    assert main(["plan", "recipe=llama3_70b", *words]) == 64
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("recipe", ["hello", "llama3_1_405b", "deepseek_v3"])
def test_plans_are_fast_and_load_neither_torch_nor_numpy(recipe, tmp_path):
    program = (
        f"import sys; from megaspec.cli import main; main(['plan', 'recipe={recipe}']);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    with within(1.5, recipe, children=True):
        subprocess.run(
            [sys.executable, "-P", "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": PATH},
            capture_output=True,
            check=True,
        )
