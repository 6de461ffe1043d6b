"""A service that is slow or hangs while a run is asked to stop: the run is saved in its grace, with exit code 75."""

import json
import signal
import time

import pytest

from megaspec.estimate.target import Target
from megaspec.log.jsonl import read_metrics
from megaspec.recipe import Recipe
from tests.faults.runs import go, make_run, newest, recipe
from tests.faults.test_stop import sent_when_there

TARGET = Target(cores=2, versions={"wandb": "0.31.0"})
GRACE = 10.0


def stopped(tmp_path, factory, seconds):
    """A run with a service that needs `seconds` for an event, asked to stop in its sixth step. -> its folder."""
    content = json.loads(recipe().model_dump_json())
    content["log"]["sinks"] = [{"kind": "wandb"}]
    content["launcher"]["grace_seconds"] = GRACE
    run = make_run(tmp_path / "run", Recipe.model_validate_json(json.dumps(content)), target=TARGET)
    mark = tmp_path / "here"
    fault = {"rank": 0, "kind": "mark", "mark": str(mark), "point": "step", "count": 6, "service": seconds}
    start = time.monotonic()
    with sent_when_there(mark, signal.SIGTERM):
        assert go(run, factory, fault=fault, grace_seconds=GRACE) == 75
    assert time.monotonic() - start < 120
    assert newest(run)[0] >= 1
    assert read_metrics(run / "metrics.jsonl")[-1]["how"] == "Preempted"
    return run


def test_a_slow_service_has_everything_up_to_the_end(tmp_path, factory, capfd):
    run = stopped(tmp_path, factory, 0.1)
    taken = (run / "service.txt").read_text().splitlines()
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"]
    assert [line for line in taken if line.startswith("StepDone")] == [f"StepDone {step}" for step in steps]
    assert taken[-2:] == [f"RunEnded {steps[-1]}", "closed"]
    assert "log.sinks" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_service_that_hangs_costs_a_message(tmp_path, factory, capfd):
    run = stopped(tmp_path, factory, 600.0)
    assert not (run / "service.txt").exists()
    lines = len(read_metrics(run / "metrics.jsonl"))
    assert f"log.sinks.0: it did not end in time; {lines} events were not taken" in capfd.readouterr().err
