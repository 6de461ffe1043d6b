"""An alert that stops a run: it saves, ends with 76, and says why; the webhook is told."""

import json

import pytest

from megaspec.launcher.heartbeat import read_heartbeat
from megaspec.log.jsonl import read_metrics
from tests.faults.runs import go, make_run, newest, recipe
from tests.log.test_webhook import server


def with_log(made, **log):
    plain = json.loads(made.model_dump_json(exclude_unset=True))
    plain["log"] |= log
    return type(made).model_validate_json(json.dumps(plain))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_alert_stops_the_run_and_what_was_trained_is_saved(tmp_path, factory, capfd, monkeypatch, ranks):
    stop = {"metric": "grad_norm", "comparison": "above", "value": 0.0, "for_steps": 7, "action": "stop"}
    made = with_log(recipe(ranks=ranks, tp=ranks), alerts=[stop], webhook={"url_variable": "TEST_HOOK"})
    run = make_run(tmp_path / "run", made)
    with server([200]) as (address, got):
        # the warm server of the tests has an environment of its own
        fault = {"rank": 0, "kind": "environment", "point": "TEST_HOOK", "mark": address}
        assert go(run, factory, fault=fault, writes_heartbeat=True) == 76
    said = capfd.readouterr().err
    assert "warning: grad_norm=" in said
    assert "was above 0 for 7 in a row (log.alerts.0); stopped after step" in said
    lines = read_metrics(run / "metrics.jsonl")
    (alert,) = [line for line in lines if line["event"] == "alert"]
    assert alert["step"] == 7
    assert (lines[-1]["event"], lines[-1]["how"]) == ("end", "AlertStop")
    step, _, _ = newest(run)
    # the others hear of it in the step that is under way
    assert 7 <= step <= 9
    assert [one["body"]["event"] for one in got] == ["alert", "end"]
    beat = read_heartbeat(run)
    assert (beat.state, beat.step, beat.by) == ("failed", step, "launcher")
    assert not beat.is_missed(now=beat.time + 1e6)


def test_a_variable_that_is_not_set_is_told_and_nothing_is_trained(tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", with_log(recipe(), webhook={"url_variable": "NO_SUCH_HOOK"}))
    assert go(run, factory) == 64
    assert "NO_SUCH_HOOK names an environment variable that is not set" in capfd.readouterr().err
