"""What `plan` and `resume` say of the numbers of a run that was stopped and goes on."""

import json

import pytest

from megaspec.cli import main
from megaspec.commands import starting
from megaspec.plan.promise import promise, promise_of_change
from megaspec.resolve.resolver import resolve
from megaspec.rules.examples import CPU, H200
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec
from tests.resolve.planned import RANDOM
from tests.test_cli import tiny

TO_THE_BIT = "goes on to the bit as if it had never stopped, on the same layout, machine and versions"
DRIFTS = "numbers drift apart; train.deterministic=true goes on to the bit"
SAME_STATE = "the same data, weights and optimizer state, sums in another order from then on"


def spec(*overrides: str, target=H200) -> Spec:
    from megaspec.compose.compose import compose

    return resolve(compose("hello", (*RANDOM, "data.vocab_size=257", *overrides)).recipe, target, Facts(run_dir="r"))


def test_only_a_gpu_without_deterministic_operations_drifts() -> None:
    assert promise(spec(target=CPU)) == TO_THE_BIT
    assert promise(spec("train.deterministic=true")) == TO_THE_BIT
    assert promise(spec()) == f"goes on with {SAME_STATE}: {DRIFTS}"


def test_another_layout_takes_sums_in_another_order() -> None:
    one, two = spec("parallelism.tp=1", target=CPU), spec("parallelism.tp=2", target=CPU)
    assert promise_of_change(one, two) == f"goes on with {SAME_STATE}: parallelism.tp and 3 more changed"
    assert promise_of_change(one, one) == TO_THE_BIT
    assert promise_of_change(one, spec("parallelism.tp=1")).endswith("more changed")
    exact = spec("train.deterministic=true")
    assert promise_of_change(spec(), exact) == f"goes on with {SAME_STATE}: train.deterministic changed"


@pytest.mark.parametrize("word", ["train.steps=400", "checkpoint.every=7", "log.console=quiet", "train.eval_every=0"])
def test_what_is_only_longer_or_reports_otherwise_takes_the_same_sums(word: str) -> None:
    one = spec("optim.schedule.decay_steps=240", target=CPU)
    assert promise_of_change(one, spec("optim.schedule.decay_steps=240", word, target=CPU)) == TO_THE_BIT


@pytest.fixture
def started(tmp_path, monkeypatch) -> None:
    """A run of one CPU rank with a checkpoint, whose ranks are never started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(starting, "launch", lambda *_, **__: 0)
    assert main(["train", *tiny("run_dir=runs/one", "train.steps=9")]) == 0
    # as if a checkpoint were there: what makes one whole is tested with the store
    monkeypatch.setattr(starting, "newest_step", lambda folder: 3)


def test_resume_says_it_in_a_line(started, capsys) -> None:
    capsys.readouterr()
    assert main(["resume", "runs/one"]) == 0
    assert f"runs/one after step 3 {TO_THE_BIT}\n" in capsys.readouterr().out
    assert main(["train", *tiny("run_dir=runs/one", "train.steps=9"), "resume=auto"]) == 0
    assert f"runs/one after step 3 {TO_THE_BIT}\n" in capsys.readouterr().out
    assert main(["resume", "runs/one", "parallelism.tp=2", "launcher.ranks=2"]) == 0
    out = capsys.readouterr().out
    assert f"runs/one after step 3 goes on with {SAME_STATE}: parallelism.tp" in out
    assert "changed\n" in out


def test_plan_says_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for words, wanted in (
        (["hardware=cpu"], TO_THE_BIT),
        (["hardware=h100"], DRIFTS),
        (["hardware=h100", "train.deterministic=true"], TO_THE_BIT),
    ):
        assert main(["plan", "recipe=hello", *words]) == 0
        (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("resume ")]
        assert line.rstrip().endswith(wanted)
        assert main(["plan", "recipe=hello", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["resume"].endswith(wanted)
