"""A search with Optuna: what it asks for, what it is told, and that it goes on where it was."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import optuna
import pytest

from megaspec.cli import main
from megaspec.estimate.target import Target
from megaspec.sweep import search
from megaspec.sweep.points import Checker
from megaspec.sweep.results import RunResult
from megaspec.sweep.search import OptunaSearch
from megaspec.sweep.spec import SweepSpec
from megaspec.sweep.state import Axis, Point, SweepHead
from tests.sweep.conftest import TINY, lives, points, states, sweep

LR = "optim.lr=tag(log,interval(1e-4,1e-1))"


def make(**fields):
    head = SweepHead(
        name="s",
        spec=SweepSpec(kind="optuna", **fields),
        plain=(*TINY, "train.steps=9"),
        config_dirs=(),
        axes=(Axis(key="optim.lr", bounds=(1e-4, 1e-1), is_log=True),),
        metric="loss",
        direction="minimize",
        launcher="megaspec",
    )
    return OptunaSearch(head, Path("sweeps/s"), Checker(Target(cores=2)), {})


def losses(*values):
    return RunResult(steps=9, loss=dict(enumerate(values, 1)))


@pytest.mark.usefixtures("stubbed")
def test_the_best_point_of_a_search_is_near_the_optimum(capsys):
    """The loss of the stand-in is the learning rate, so the least of the interval is best."""
    assert sweep(LR, "hydra/sweeper=optuna", "sweep.trials=20", "sweep.seed=1", "sweep.slots=2") == 0
    found = points()
    assert len(found) == 20
    assert all(len(one) == 1 for one in lives().values())
    rates = [json.loads(Path("sweeps/s", p.folder, "recipe.json").read_text())["optim"]["lr"] for p in found.values()]
    assert min(rates) < 1.5e-4
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    best = rates.index(min(rates)) + 1
    assert f"best loss: point {best}," in capsys.readouterr().out


@pytest.mark.usefixtures("stubbed")
def test_points_that_no_rule_allows_are_counted_and_never_started(capsys):
    words = ("sweep.kind=optuna", "sweep.trials=6", "train.micro_batch=range(1,4)")
    assert sweep(*words, "about.purpose=ok,slow") == 0
    found = points()
    assert len(found) == 6
    for number, point in found.items():
        value = next(w for w in point.overrides if w.startswith("train.micro_batch"))
        if value == "train.micro_batch=3":
            assert point.state == "invalid"
            assert "train.global_batch=2 must be" in point.reason
        assert (len(lives()[number]) == 1) == (point.state == "done")
    # the same values again are not run again
    runs = [p.overrides for p in found.values() if p.state == "done"]
    assert len(set(runs)) == len(runs)
    assert {"invalid", "repeated", "done"} >= set(states())
    assert sweep(*words, "about.purpose=ok,slow") == 0
    assert len(points()) == 6


@pytest.mark.usefixtures("stubbed")
def test_points_that_fall_behind_are_stopped_and_never_run_again(capsys):
    """The loss of the stand-in is the learning rate from its first step on, so it is known who falls behind."""
    words = ("optim.lr=interval(0.1,0.9)", "sweep.kind=optuna", "sweep.trials=8", "about.purpose=slow", "sweep.seed=2")
    assert sweep(*words, "sweep.pruner=median", "sweep.pruner_points=2", "sweep.slots=2", steps=60) == 0
    found = points()
    assert set(states()) == {"done", "pruned"}
    rate = {n: p.params["optim.lr"] for n, p in found.items()}
    pruned = [n for n, p in found.items() if p.state == "pruned"]
    assert min(rate[n] for n in pruned) > min(rate[n] for n, p in found.items() if p.state == "done")
    for number in pruned:
        path = Path("sweeps/s", found[number].folder, "metrics.jsonl")
        assert path.read_text().count('"step",') < 60
    before = lives()
    assert main(["sweep", "resume", "sweeps/s"]) == 0
    assert lives() == before


def test_a_search_none_of_whose_points_can_run_is_refused(capsys):
    assert sweep("optim.lrr=interval(0,1)", "sweep.kind=optuna") == 64
    assert "lrr is no key" in capsys.readouterr().err
    assert not Path("sweeps").exists()


@pytest.mark.usefixtures("stubbed")
def test_a_stopped_search_goes_on_and_can_be_made_longer():
    def stop():
        while not any(b'"step"' in f.read_bytes() for f in Path("sweeps").glob("s/03*/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    words = (LR, "sweep.kind=optuna", "about.purpose=slow")
    thread = threading.Thread(target=stop)
    thread.start()
    assert sweep(*words, "sweep.trials=4", steps=15) == 75
    thread.join()
    before = {n: p.overrides for n, p in points().items()}
    assert states() == ["done", "done", "interrupted"]
    assert main(["sweep", "resume", "sweeps/s", "sweep.trials=5"]) == 0
    assert states() == ["done"] * 5
    assert {n: points()[n].overrides for n in before} == before
    assert [len(one) for one in lives().values()] == [1, 1, 2, 1, 1]
    assert len({p.overrides for p in points().values()}) == 5


def test_a_search_is_the_same_for_the_same_seed():
    def asked(seed):
        one = make(trials=4, seed=seed)
        return [one.next().overrides for _ in range(4)]

    assert asked(3) == asked(3) != asked(4)


def test_a_point_that_is_worse_than_the_median_is_hopeless():
    one = make(trials=9, pruner="median", pruner_points=3, pruner_steps=2)
    for level in (1.0, 2.0, 3.0):
        point = one.next()
        one.tell(point.to("done", code=0), losses(*[level] * 9))
    bad, good = one.next(), one.next()
    assert not one.is_hopeless(bad, losses(9.0))  # within pruner_steps
    assert not one.is_hopeless(bad, losses(9.0))  # nothing new
    assert one.is_hopeless(bad, losses(9.0, 9.0, 9.0))
    assert not one.is_hopeless(good, losses(9.0, 9.0, 1.5))
    one.tell(bad.to("pruned", code=75), losses(9.0, 9.0, 9.0))
    states = [t.state.name for t in one._study.trials]
    assert states == ["COMPLETE"] * 3 + ["PRUNED", "RUNNING"]


def test_what_was_tried_before_is_told_again():
    first = make(trials=5)
    tried = [first.next() for _ in range(3)]
    ended = [tried[0].to("done", code=0), tried[1].to("failed", code=76), tried[2].to("interrupted")]
    again = make(trials=5)
    again.remember(ended, {1: losses(4.0, 3.0), 2: losses(9.0), 3: losses(2.0)})
    assert [t.params for t in again._study.trials] == [p.params for p in tried]
    assert [t.state.name for t in again._study.trials] == ["COMPLETE", "FAIL", "RUNNING"]
    assert again._study.trials[0].value == 3.0
    assert again.next().number == 4


def test_without_optuna_the_way_out_is_told(monkeypatch, capsys):
    monkeypatch.setattr(search, "optuna", None)
    assert sweep(LR, "sweep.kind=optuna") == 64
    assert "pip install 'megaspec[sweep]'" in capsys.readouterr().err
    assert not Path("sweeps").exists()


@pytest.mark.parametrize(
    ("axis", "kind"),
    [
        (Axis(key="a", bounds=(1, 8)), optuna.distributions.IntDistribution(1, 8)),
        (Axis(key="a", bounds=(1.0, 8.0)), optuna.distributions.FloatDistribution(1.0, 8.0)),
        (Axis(key="a", bounds=(1, 8), is_log=True), optuna.distributions.IntDistribution(1, 8, log=True)),
        (Axis(key="a", words=("a=1", "a=3"), is_range=True), optuna.distributions.IntDistribution(0, 1)),
        (Axis(key="a", words=("a=x", "a=y")), optuna.distributions.CategoricalDistribution(("a=x", "a=y"))),
    ],
)
def test_how_a_key_is_drawn(axis, kind):
    assert search._distribution(axis) == kind
    assert search._distribution(Axis.model_validate_json(axis.model_dump_json())) == kind


def test_a_point_keeps_what_it_was_asked_with():
    point = make(trials=3).next()
    assert Point.model_validate_json(point.model_dump_json()) == point
    assert point.overrides == (f"optim.lr={point.params['optim.lr']:.6g}",)
