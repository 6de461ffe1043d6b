"""By what points are compared: one that each comes to have, and another where none of those that are done has it."""

import json
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.compose.search_path import SearchPath
from megaspec.compose.words import compose_words
from megaspec.sweep.metric import never_has, shown_metric
from megaspec.sweep.results import RunResult
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import HEAD, Axis, Point, SweepFolder, SweepHead
from tests.sweep.conftest import TINY, points, states, sweep

LR = "optim.lr=tag(log,interval(1e-4,1e-1))"


def metric(name: str = "s") -> str:
    return SweepFolder(Path("sweeps", name)).head().metric


@pytest.mark.parametrize("every", range(5))
@pytest.mark.parametrize("steps", range(1, 5))
def test_a_run_evaluates_where_its_loop_does(every, steps):
    plain = [word for word in TINY if not word.startswith("train.eval_every")]
    words = [*plain, f"train.eval_every={every}", f"train.steps={steps}"]
    recipe = compose_words(words, SearchPath()).recipe
    assert bool(never_has("valid_loss", recipe)) == (every == 0)
    assert never_has("loss", recipe) == never_has("tokens_per_second", recipe) == ""


@pytest.mark.usefixtures("stubbed")
@pytest.mark.parametrize(
    ("every", "chosen"), [("2", "valid_loss"), ("3", "valid_loss"), ("0,3", "loss"), ("0", "loss")]
)
def test_a_grid_is_compared_by_the_validation_loss_only_where_each_point_evaluates(every, chosen):
    sweep(f"train.eval_every={every}", "data.seed=1,2", steps=2)
    assert metric() == chosen


@pytest.mark.usefixtures("stubbed")
def test_a_search_that_evaluates_never_is_compared_by_the_loss(capsys):
    assert sweep(LR, "sweep.kind=optuna", "sweep.trials=3", "train.eval_every=0", steps=6) == 0
    assert metric() == "loss"
    printed = capsys.readouterr().out
    assert "best loss: point" in printed
    assert printed.count("not evaluated") == 3


def test_a_number_that_can_not_occur_is_refused_before_anything_starts(capsys):
    asked = ("train.eval_every=0", "sweep.metric=valid_loss")
    assert sweep(LR, "sweep.kind=optuna", *asked, steps=6) == 64
    rule = "train.eval_every=0 never evaluates; set train.eval_every=6"
    assert rule in capsys.readouterr().err
    assert sweep("train.eval_every=0,80", asked[1], steps=6) == 64
    assert f"1 points, such as (train.eval_every=0): sweep.metric=valid_loss: {rule}" in capsys.readouterr().err
    assert not Path("sweeps").exists()


@pytest.mark.usefixtures("stubbed")
def test_a_trial_that_never_has_the_number_is_not_run():
    words = ("sweep.kind=optuna", "sweep.trials=12", "sweep.metric=valid_loss")
    sweep("train.eval_every=1,0,2,3", *words, steps=6)  # probed at both ends and in the middle: 1, 2 and 3
    found = {p.overrides[0]: p for p in points().values() if p.state != "repeated"}
    assert set(found) == {f"train.eval_every={every}" for every in (1, 0, 2, 3)}
    assert found["train.eval_every=0"].state == "invalid"
    assert "train.eval_every=0 never evaluates" in found["train.eval_every=0"].reason
    assert found["train.eval_every=2"].state == "done"


@pytest.mark.usefixtures("stubbed")
def test_a_search_that_saw_no_value_has_failed_and_says_why(capsys):
    """The stand-in writes no evaluations."""
    words = (LR, "sweep.kind=optuna", "sweep.trials=2", "train.eval_every=2")
    assert sweep(*words, steps=6) == 64
    assert states() == ["done", "done"]
    shown = capsys.readouterr()
    assert "none of the 2 trials gave a value of sweep.metric=valid_loss: nothing was searched" in shown.err
    assert "compared by loss instead" in shown.out
    assert SweepFolder(Path("sweeps/s")).head().state == "failed"
    assert main(["sweep", "resume", "sweeps/s"]) == 64
    # as it was made when the steps were not asked about
    path = Path("sweeps/s", HEAD)
    head = json.loads(path.read_text())
    path.write_text(json.dumps(head | {"metric": "tokens_per_second", "direction": "maximize"}))
    assert main(["sweep", "resume", "sweeps/s"]) == 0


def test_the_table_and_the_page_fall_back_to_a_number_that_points_have():
    spec = SweepSpec()
    head = SweepHead(
        name="s", spec=spec, plain=(), config_dirs=(), axes=(Axis(key="a"),), metric="valid_loss",
        direction="minimize", launcher="megaspec",
    )  # fmt: skip
    some = [
        Point(number=n, overrides=(f"a={n}",), folder=f"{n}", fingerprint="f", state=state)
        for n, state in enumerate(("done", "done", "failed"), 1)
    ]
    loss, valid, speed = RunResult(loss={1: 3.0}), RunResult(valid_loss={1: 3.0}), RunResult(speed={1: 9.0})
    nothing, nan = RunResult(), RunResult(valid_loss={1: float("nan")}, loss={1: 2.0})

    def shown(*results):
        one = shown_metric(head, some, dict(enumerate(results, 1)))
        return one.metric, one.direction, bool(one.note)

    assert shown(valid, loss, nothing) == ("valid_loss", "minimize", False)
    assert shown(loss, nothing, valid) == ("loss", "minimize", True)  # the third is not done
    assert shown(nan, nan, valid) == ("loss", "minimize", True)
    assert shown(speed, nothing, nothing) == ("tokens_per_second", "maximize", True)
    assert shown(nothing, nothing, loss) == ("valid_loss", "minimize", False)
