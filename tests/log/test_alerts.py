"""Alerts: raised once when a condition has held for as long as it has to, and again when it had not meanwhile."""

import json

import pytest

from megaspec.core.errors import RecipeError
from megaspec.log.alerts import Alerts, alert_text, known_metrics
from megaspec.log.events import AlertRaised, EvalDone
from megaspec.log.jsonl import read_metrics
from megaspec.log.spec import AlertSpec
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from tests.faults.runs import TARGET, recipe
from tests.log.events_for_tests import step_done


def raised(alert: AlertSpec, losses: list[float]) -> list[AlertRaised]:
    told: list[object] = []
    alerts = Alerts((alert,), told.append, stop=lambda _: None)
    for number, loss in enumerate(losses):
        alerts(step_done(number + 1, loss=loss))
    assert len([one for one in told if not isinstance(one, AlertRaised)]) == len(losses)
    return [one for one in told if isinstance(one, AlertRaised)]


def test_one_that_holds_long_enough_is_raised_once():
    alert = AlertSpec(metric="loss", comparison="above", value=5.0, for_steps=3)
    found = raised(alert, [6.0, 6.0, 1.0, 6.0, 6.0, 7.5, 8.0, 8.0])
    assert [(one.step, one.value) for one in found] == [(6, 7.5)]
    assert alert_text(found[0]) == "warning: loss=7.5 was above 5 for 3 in a row (log.alerts.0)"


def test_one_that_did_not_hold_meanwhile_is_raised_again():
    alert = AlertSpec(metric="loss", comparison="below", value=5.0)
    assert [one.step for one in raised(alert, [4.0, 4.0, 5.0, 4.0])] == [1, 4]


def test_numbers_that_are_not_known_count_for_nothing():
    alert = AlertSpec(metric="mfu_causal", comparison="below", value=0.5)
    assert raised(alert, [1.0] * 5) == []


def test_evaluations_are_looked_at_too():
    told: list[object] = []
    alerts = Alerts((AlertSpec(metric="eval/web/loss", comparison="above", value=3.0),), told.append, stop=print)
    alerts(EvalDone(step=7, loss=2.0, sets={"web": 3.5, "code": 0.5}, tokens={"web": 1, "code": 1}, seconds=1.0))
    assert [(one.step, one.value) for one in told if isinstance(one, AlertRaised)] == [(7, 3.5)]


def test_stop_is_asked_for_with_the_reason():
    asked: list[str] = []
    alert = AlertSpec(metric="loss", comparison="above", value=1.0, severity="critical", action="stop")
    Alerts((alert,), lambda _: None, stop=asked.append)(step_done(1, loss=2.0))
    assert asked == ["critical: loss=2 was above 1 (log.alerts.0)"]


def test_every_metric_is_a_number_that_a_step_or_an_evaluation_has():
    assert {"loss", "grad_norm", "seconds", "eval/loss", "mfu_causal", "data_seconds"} <= set(known_metrics())
    assert "step" not in known_metrics()


def problems(alert: dict[str, object], **changes: object) -> str:
    plain = recipe().model_dump(mode="json", exclude_unset=True)
    plain["log"] = {"alerts": [alert], **changes}
    made = Recipe.model_validate_json(json.dumps(plain))
    with pytest.raises(RecipeError) as refused:
        resolve(made, TARGET, Facts(run_dir="runs/mine"))
    return str(refused.value)


def test_what_would_never_be_raised_is_refused_with_the_nearest_name():
    usual = {"comparison": "above", "value": 1.0}
    assert "log.alerts.0.metric=grad_nrom is no number of a run; did you mean grad_norm?" in problems(
        usual | {"metric": "grad_nrom"}
    )
    assert "log.alerts.0.metric=eval/los is no number of a run; did you mean eval/loss" in problems(
        usual | {"metric": "eval/los"}
    )
    assert "is on CPUs; watch tokens_per_second" in problems(usual | {"metric": "mfu_causal"})
    assert "precision=fp16 alone, this is precision.kind=fp32" in problems(usual | {"metric": "loss_scale"})
    assert "needs log.webhook, which is null" in problems(usual | {"metric": "loss", "action": "webhook"})
    with pytest.raises(ValueError, match="comparison"):
        problems({"metric": "loss", "comparison": "over", "value": 1.0})


def test_metrics_keep_alerts_under_their_names(tmp_path):
    from megaspec.log.jsonl import JsonlSink

    sink = JsonlSink(tmp_path / "metrics.jsonl", step=0)
    alert = AlertSpec(metric="loss", comparison="above", value=1.0)
    Alerts((alert,), sink, stop=lambda _: None)(step_done(1, loss=2.0))
    sink.close()
    _, line = read_metrics(tmp_path / "metrics.jsonl")
    assert line["event"] == "alert"
    assert (line["metric"], line["limit"], line["value"], line["action"]) == ("loss", 1.0, 2.0, "log")
