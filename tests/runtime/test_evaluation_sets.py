"""Evaluation sets by name: what training says of them, what a stop in the midst of them leaves, and `megaspec eval`."""

import json
import signal
from argparse import Namespace

import pytest

from megaspec.cli import main
from megaspec.commands.evaluate import evaluation_spec
from megaspec.core import faults
from megaspec.launcher import stop
from megaspec.log.jsonl import read_metrics
from megaspec.resolve.gather import gather_facts
from megaspec.resolve.resolver import resolve
from megaspec.run_folder import SavedRun
from megaspec.spec import Spec
from tests.data.helpers import write_texts
from tests.runtime import lives
from tests.runtime.specs import TARGET, make_run, recipe, spec

SETS = {"plain": {"noise": 0.0}, "other": {"kind": "random", "vocab_size": 37}}
CHANGES = {"train.steps": 7, "train.eval_every": 3, "train.eval_samples": 5, "data.valid": SETS}
# What a step takes in grows, so that scales of one step are not those of the next.
DELAYED = {
    **CHANGES,
    "precision": {"kind": "fp8", "recipe": "delayed", "amax_history": 2, "outside": "fp64", "first_layers_bf16": 1},
    "model.n_layers": 3,
    "model.d_head": 16,
    "model.d_ffn": 64,
    "optim.lr": 0.1,
}


def test_a_set_follows_the_training_data_and_stays_as_it_was_written():
    data = recipe({"data.valid": SETS | {"web": "data/web"}, "data.seq_len": 24}).data
    plain, other, web = data.valid.values()
    assert (plain.kind, plain.seq_len, plain.masked, plain.noise) == ("synthetic", 24, 0.2, 0.0)
    assert (other.kind, other.seq_len) == ("random", 24)
    assert (web.kind, web.blend[0].prefix, web.split) == ("indexed", "data/web", (0.0, 1.0, 0.0))
    assert data.model_dump(mode="json")["valid"]["plain"] == {"noise": 0.0}
    made = spec({"data.valid": SETS})
    assert {one.seed for one in made.data.valid.values()} == {made.data.seed}
    assert Spec.model_validate_json(made.model_dump_json()) == made


def cut_life(rank, text, folder, at):
    """A life that is asked to stop in pass `at` of an evaluation, and the next one to the end."""

    def ask():
        if rank == 0:
            stop._note(signal.SIGTERM, None)

    arm = faults.arm
    faults.arm("evaluate_pass", ask, count=at)
    lives.faults.arm = lambda name, action, **more: arm(name, action, **more)
    try:
        first = lives.live(rank, text, folder, stop_after=10**6)
    finally:
        lives.faults.arm = arm
    return first, lives.live(rank, text, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallelism.dp_replicate": 2, "train.micro_batch": 1},
        DELAYED,
    ],
    ids=["one rank", "dp2", "delayed scales"],
)
def test_an_evaluation_that_is_cut_is_made_up_for(changes, tmp_path, pool):
    made = spec({**CHANGES, "train.micro_batch": 1, **changes})
    text = made.model_dump_json()
    whole = pool.run(lives.live, text, str(tmp_path / "whole"), ranks=made.world_size)[0]
    assert [one["step"] for one in whole if "sets" in one] == [3, 6, 7]
    first, second = pool.run(cut_life, text, str(tmp_path / "cut"), 2, ranks=made.world_size)[0]
    assert first == whole[:3]  # three steps, and the first evaluation was left
    assert second == whole[3:]


@pytest.mark.usefixtures("warm_launches")
@pytest.mark.parametrize("changes", [CHANGES, DELAYED], ids=["plain", "delayed scales"])
def test_eval_gives_what_training_said_on_any_layout(changes, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", changes)
    assert main(["eval", "run"]) == 66
    assert main(["resume", "run"]) == 0
    said = [one for one in read_metrics("run/metrics.jsonl") if one["event"] == "eval"][-1]
    assert said["step"] == 7
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    for words, is_same in (([], True), (["parallelism.tp=2", "launcher.ranks=2"], False)):
        capfd.readouterr()
        assert main(["eval", "run", "--json", *words]) == 0
        found = json.loads(capfd.readouterr().out)
        losses = {name: one["loss"] for name, one in found["sets"].items()}
        assert losses == (said["sets"] if is_same else pytest.approx(said["sets"], rel=1e-10, abs=0))
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    assert main(["eval", "run", "--step", "3"]) == 66
    assert "run has checkpoints of 7" in capfd.readouterr().err
    assert main(["eval", "run", "--data", "web=nothing"]) == 65
    assert "data.valid.web.blend.0.prefix=nothing" in capfd.readouterr().err
    assert main(["eval", "run", "--data", "web"]) == 64
    assert main(["eval", "nowhere"]) == 64


def test_eval_on_own_sets_needs_no_training_data(tmp_path):
    trained_on = write_texts(tmp_path / "a.jsonl", 10)
    held_out = write_texts(tmp_path / "v.jsonl", 10)
    sets = {"v": {"files": [{"path": str(held_out)}]}}
    data = {"kind": "stream", "files": [{"path": str(trained_on)}], "tokenizer": "byte", "seq_len": 16, "valid": sets}
    made = recipe({"model.vocab_size": 257, "data": data, "train.eval_every": 3})
    run = SavedRun(tmp_path, made.model_dump(mode="json"), resolve(made, TARGET, gather_facts(made)))
    assert run.spec.data_fingerprint
    asked = Namespace(run=tmp_path, words=[], data=[], config_dir=[])
    trained_on.write_text('{"text": "changed since"}\n')
    assert list(evaluation_spec(run, asked, TARGET).data.valid) == ["v"]
    trained_on.unlink()
    assert list(evaluation_spec(run, asked, TARGET).data.valid) == ["v"]
