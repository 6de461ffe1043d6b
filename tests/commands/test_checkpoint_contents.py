"""`megaspec checkpoint inspect` and `diff`: what is printed is what was saved."""

import json
import math

import pytest
import torch

from megaspec.checkpoint import contents
from megaspec.checkpoint.store import SavedPiece, Store
from megaspec.cli import main
from tests.checkpoint.checkpoint_cases import CHUNK, SOLO


def made(folder, step=1, **tensors):
    """A checkpoint with these tensors, `_` in their names for a slash and a dot each."""
    pieces = []
    for name, tensor in tensors.items():
        stored = name.replace("__", ".").replace("_", "/")
        half = tensor.shape[0] // 2
        pieces.append(SavedPiece(stored, tuple(tensor.shape), (0,) * tensor.dim(), tensor[:half]))
        pieces.append(SavedPiece(stored, tuple(tensor.shape), (half, *(0 for _ in tensor.shape[1:])), tensor[half:]))
    spec = {"parallelism": {"tp": 2, "pp": 1}}
    state = {"step": step, "tokens": 1000 * step}
    Store(folder, chunk_bytes=CHUNK).save(step, pieces, spec=spec, state=state, comm=SOLO)
    return folder


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(contents, "BLOCK_BYTES", 64)


def printed(capsys, *words) -> str:
    assert main(["checkpoint", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_parts_and_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    weight = torch.arange(24.0).reshape(6, 4)
    bias = torch.tensor([math.nan, 1.0, math.inf, -3.0], dtype=torch.bfloat16)
    run = made(tmp_path / "run", step=7, model_a__weight=weight, model_a__bias=bias, optim_exp__avg_a__weight=weight)
    out = printed(capsys, "inspect", run)
    rows = [line.split() for line in out.splitlines()]
    assert ["saved", "by", "tp", "2"] in rows
    assert ["tokens", "7,000"] in rows
    assert ["model", "2", "28", "0.0", "MiB", "BF16,", "F32"] in rows
    assert ["optim/exp.avg", "1", "24", "0.0", "MiB", "F32"] in rows
    assert "a.weight" not in out
    rows = [line.split() for line in printed(capsys, "inspect", run, "model/*", "--statistics").splitlines()]
    rms = f"{weight.square().mean().sqrt().item():.4g}"
    assert ["model/a.weight", "6", "x", "4", "F32", "0", "23", rms, "1", "0"] in rows
    assert ["model/a.bias", "4", "BF16", "-3", "1", f"{math.sqrt(5):.4g}", "0", "2"] in rows
    told = json.loads(printed(capsys, "inspect", run / "checkpoints/step-00000007", "*", "--json"))
    assert told["tensors"]["model/a.weight"] == {"shape": [6, 4], "dtype": "F32"}
    assert (told["step"], told["layout"], told["state"]["tokens"]) == (7, "tp 2", 7000)


def test_differences(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    weight = torch.arange(1.0, 41.0, dtype=torch.float64).reshape(10, 4)
    other = weight.clone()
    other[9, 3] += 0.5
    same = torch.tensor([math.nan, 2.0])
    a = made(tmp_path / "a", model_w=weight, model_same=same, model_gone=same, model_shape=same, optim_m_w=weight)
    b = made(
        tmp_path / "b", step=2, model_w=other, model_same=same.bfloat16(), model_shape=torch.ones(4), optim_m_w=other
    )
    out = printed(capsys, "diff", a, b)
    rows = [line.split() for line in out.splitlines()]
    relative = 0.5 / weight.norm().item()
    assert ["model/w", "40", "1", "5.000e-01", f"{relative:.3e}"] in rows
    assert "tokens: 1000 in A, 2000 in B" in out
    assert "model/gone: only in A" in out
    assert "model/shape: 2 in A, 4 in B" in out
    assert "optim/m/w" not in out
    assert "1 of 4 tensors are equal; 1 are stored in another format" in out
    assert "optim/m/w" in printed(capsys, "diff", a, b, "*")
    assert "2 of 2 tensors are equal" in printed(capsys, "diff", a, a, "model/w", "model/same", "--all")
    told = json.loads(printed(capsys, "diff", a, b, "--json"))["tensors"]
    assert told["model/w"] == {"differing": 1, "elements": 40, "greatest": 0.5, "relative": pytest.approx(relative)}


def test_a_number_that_is_none_in_one_of_them(tmp_path, capsys):
    a = made(tmp_path / "a", model_w=torch.tensor([1.0, 2.0, 3.0]))
    b = made(tmp_path / "b", model_w=torch.tensor([1.0, math.nan, 3.0]))
    for one, two in ((a, b), (b, a)):
        told = json.loads(printed(capsys, "diff", one, two, "--json"))["tensors"]["model/w"]
        assert told == {"differing": 1, "elements": 3, "greatest": None, "relative": None}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["inspect", "run", "model/nothing"], "model/nothing: names no tensor; they are named as model/w are"),
        (["inspect", "run", "--step", "3"], "--step 3: run has checkpoints of 1"),
        (["inspect", "nowhere"], "nowhere holds no checkpoint"),
        (["inspect", "run/checkpoints/step-00000001", "--step", "1"], "is one checkpoint"),
        (["diff", "run", "run", "optim/*"], "optim/*: names no tensor"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "run", model_w=torch.ones(2))
    assert main(["checkpoint", *words]) == 66
    assert told in capsys.readouterr().err


def test_damage_is_told(tmp_path, capsys):
    run = made(tmp_path / "run", model_w=torch.ones(4, 4))
    (file,) = (run / "checkpoints/step-00000001").glob("rank-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "inspect", str(run), "--statistics"]) == 66
    assert "rank-00000" in capsys.readouterr().err
