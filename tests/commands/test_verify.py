"""`megaspec verify`: layouts are equal to one rank, and one with a bug is told by parameter, layer and rank."""

import json
from functools import partial
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.commands import verify
from megaspec.estimate.target import detect_target
from tests.resolve.test_fuzz import NAMES
from tests.source_patch import Patch, check
from tests.warm import WarmFactory

ROOT = Path(__file__).parents[2]
# Of gradients of norms, whose tokens tp ranks share out, rank 1 gets more than the sum.
ONE_RANK = Patch(
    "megaspec.parallelism.tensor",
    "part.copy_(summed.view_as(part))",
    "part.copy_(summed.view_as(part) * (1 + 1e-6 * dist.get_rank()))",
)
# No rank gets the sum.
NO_SUM = Patch("megaspec.parallelism.tensor", "part.copy_(summed.view_as(part))", "pass")
DIES = Patch(
    "megaspec.parallelism.tensor", "part.copy_(summed.view_as(part))", "assert dist.get_rank() != 1, 'planted'"
)
# A rank's routers count its own tokens alone.
OWN_LOADS = Patch(
    "megaspec.parallelism.expert", "            counted.all_reduce(sums, group=group)\n", "            pass\n"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def plant(monkeypatch: pytest.MonkeyPatch, patch: Patch) -> None:
    """From now on ranks are started with a bug."""
    check(patch)
    monkeypatch.setattr(verify, "RankFactory", partial(WarmFactory, patches=(patch,)))


@pytest.mark.usefixtures("warm_launches")
@pytest.mark.parametrize(
    "words",
    [
        ["hardware=cpu", "parallelism.tp=2"],
        pytest.param(["gpus=4", "parallelism.tp=2", "data.document_mask=true"], marks=pytest.mark.slow),
        ["gpus=16", "parallelism.tp=2", "parallelism.pp=2", "parallelism.dp_strategy=zero1", "train.global_batch=32"],
    ],
)
def test_a_layout_is_equal(capsys, words):
    assert main(["verify", "recipe=hello", *words]) == 0
    out = capsys.readouterr().out
    assert "equal: 3 steps, 14 parameters, worst margin " in out
    assert "differs" not in out
    assert "gradient norm at step" in out


@pytest.mark.usefixtures("warm_launches")
def test_json_is_one_line_that_says_everything(capsys):
    words = ["recipe=hello", "gpus=2", "parallelism=dp", "optim=sgd", "optim.lr=0.1", "--steps", "2", "--json"]
    assert main(["verify", *words]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)
    assert out.count("\n") == 1
    assert told["equal"] is True
    assert (told["steps"], told["world_size"], told["degrees"]["dp_replicate"]) == (2, [2, 2], [2, 2])
    assert 0 <= told["worst_margin"] < 1
    assert told["wrong"] == []
    assert told["spec"]["optim"]["kind"] == "sgd"


def test_one_rank_has_nothing_to_compare(capsys):
    assert main(["verify", "recipe=hello", "gpus=1"]) == 0
    assert "one rank, there is nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["recipe=hello", "optim.lrr=3"], "did you mean lr?"),
        (["recipe=hello", "gpus=3", "parallelism.tp=3"], "must divide model.n_heads=4"),
        (["recipe=hello", "--steps", "0"], "--steps 0 must be from 1"),
        (["recipe=hello", "--ranks", "1"], "--ranks 1 must be from 2"),
        (["recipe=llama3_70b", "--ranks", "8"], "on 16 ranks at least"),
    ],
)
def test_what_is_refused(capsys, words, told):
    assert main(["verify", *words]) == 64
    assert told in capsys.readouterr().err


def test_torchrun_is_refused(capsys, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "recipe=hello"]) == 64
    assert "without torchrun" in capsys.readouterr().err


def test_a_bug_is_told_by_parameter_layer_and_rank(capsys, monkeypatch):
    plant(monkeypatch, ONE_RANK)
    assert main(["verify", "recipe=hello", "gpus=2", "parallelism.tp=2"]) == verify.NOT_EQUAL
    out = capsys.readouterr().out
    assert "not equal: 3 steps, 14 parameters; off: 5 gradients" in out
    assert "gradient of layers.1.norm2.weight (layer 1): off by " in out
    assert "on rank 1 (tp 1)" in out
    assert "differs" in out


def test_a_bug_in_json(capsys, monkeypatch):
    plant(monkeypatch, NO_SUM)
    assert main(["verify", "recipe=hello", "gpus=2", "parallelism.tp=2", "--json"]) == verify.NOT_EQUAL
    told = json.loads(capsys.readouterr().out)
    gradients = {one["name"]: one for one in told["wrong"] if one["kind"] == "gradient"}
    assert told["equal"] is False
    assert {*gradients} == {"norm.weight", *(f"layers.{i}.norm{n}.weight" for i in (0, 1) for n in (1, 2))}
    assert gradients["layers.1.norm1.weight"]["layer"] == "layer 1"
    assert gradients["layers.1.norm1.weight"]["ranks"] == [0, 1]
    assert max(one["margin"] for one in told["findings"] if one["margin"] is not None) > 1e6


def test_what_routers_count_is_compared(capsys, monkeypatch):
    words = ["verify", "recipe=qwen3_30b_a3b", "gpus=2", "parallelism=dp", "parallelism.ep=2", "--steps", "1", "--json"]
    plant(monkeypatch, OWN_LOADS)
    assert main(words) == verify.NOT_EQUAL
    told = json.loads(capsys.readouterr().out)
    assert next(one["what"] for one in told["findings"] if not one["passed"]).startswith(
        ("layers.", "copies of router")
    )
    assert told["wrong"] == []


def test_ranks_that_fail_end_it(capfd, monkeypatch):
    plant(monkeypatch, DIES)
    code = main(["verify", "recipe=hello", "gpus=2", "parallelism.tp=2", "--json"])
    told = capfd.readouterr()
    assert code not in (0, 64)
    assert json.loads(told.out) == {"name": "hello", "world_size": 2, "equal": False, "exit_code": code}
    assert "planted" in told.err
    assert "its files stay in" in told.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_that_can_be_trained(capsys, name):
    code = main(["verify", f"recipe={name}"])
    told = capsys.readouterr()
    assert code == 0 or (code == 64 and "can be planned, not trained" in told.err)
    assert code == 64 or "equal: 3 steps" in told.out


@pytest.mark.gpu
def test_on_the_gpus_at_hand(capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if detect_target().gpus < 2:
        pytest.skip("needs 2 GPUs")
    assert main(["verify", "recipe=hello", "gpus=2", "parallelism.tp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cuda"
