"""A rank that takes longer than the others is named, with its host and what it loses its time in."""

import pytest

from megaspec.log.jsonl import read_metrics
from tests.faults.runs import go, make_run, recipe


def slow_lines(run):
    return [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == "slow"]


def test_a_real_rank_that_works_longer_is_named_with_its_host(tmp_path, factory):
    run = make_run(tmp_path / "run", recipe(steps=130, save_every=130))
    fault = {"rank": 1, "kind": "slow", "point": "forward", "count": 61, "seconds": 0.02}
    assert go(run, factory, fault=fault) == 0
    first, *_ = slow_lines(run)
    assert (first["rank"], first["phase"], first["device"]) == (1, "forward", "cpu")
    assert first["host"]
    assert 60 < first["step"] <= 110
    # less than all of it, where it is named while some of the steps that are looked back on are from before
    assert 0 < first["seconds"] < 0.03
    lines = read_metrics(run / "metrics.jsonl")
    paces = [line for line in lines if line["event"] == "pace"]
    assert [line["step"] for line in paces] == [50, 100]
    assert paces[1]["phases"]["forward"]["rank"] == 1
    assert paces[1]["phases"]["forward"]["slowest"] > 0.02


@pytest.mark.slow
def test_no_real_rank_is_named_in_a_thousand_steps(tmp_path, factory):
    """Two ranks on two cores, with the machine's own noise."""
    run = make_run(tmp_path / "run", recipe(steps=1000, save_every=200))
    assert go(run, factory) == 0
    assert slow_lines(run) == []
