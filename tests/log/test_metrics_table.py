"""The table in megaspec/log/README.md is what a real run writes, key by key."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megaspec.log.events import NAMES, TIMED, RunStarted, StepDone
from megaspec.log.jsonl import read_metrics
from megaspec.log.speed import Speed, speed_of
from tests.faults.runs import go, make_run, recipe
from tests.warm import WarmFactory

README = Path(__file__).parents[2] / "megaspec/log/README.md"
EVERY = {"event", "time", "step"}


def table():
    """Event -> the keys of its lines."""
    _, _, text = README.read_text().partition("## metrics.jsonl")
    keys: dict[str, set[str]] = {}
    current = ""
    for event, key in re.findall(r"^\| (\w*) ?\| `(\w+)` \|", text, re.MULTILINE):
        current = event or current
        keys.setdefault(current, set()).add(key)
    return keys


def test_the_table_has_every_key_of_every_event():
    told = table()
    assert told.pop("all") == EVERY
    assert told == {name: {f.name for f in fields(kind)} - EVERY for kind, name in NAMES.items()}


def test_timed_keys_are_keys_of_the_table():
    assert set(TIMED) - EVERY <= table()["step"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("metrics") / "run", recipe(steps=6))
    with WarmFactory(("torch", "tests.faults.entry")) as factory:
        assert go(run, factory) == 0
    return read_metrics(run / "metrics.jsonl")


def test_a_run_writes_what_the_table_says(lines):
    told = table()
    assert {line["event"] for line in lines} == {"start", "step", "memory", "eval", "checkpoint", "end"}
    for line in lines:
        assert set(line) == told["all"] | told[line["event"]]


def test_numbers_of_a_real_step_agree_with_each_other(lines):
    start = lines[0]
    assert start["peak_flops"] is None
    assert start["no_peak"] == "the run is on CPUs, of which no peak is known"
    assert start["flops_per_token_causal"] < start["flops_per_token_full"]
    for line in lines:
        if line["event"] != "step":
            continue
        assert line["tokens_per_second"] == pytest.approx(line["sequence_tokens"] / line["seconds"])
        assert line["tokens_per_second_per_gpu"] == pytest.approx(line["tokens_per_second"] / 2)
        flops = line["tokens_per_second_per_gpu"] * start["flops_per_token_full"]
        assert line["tflops_per_gpu_full"] == pytest.approx(flops / 1e12)
        # never 0 where it is not known
        assert line["mfu_causal"] is None
        assert line["mfu_full"] is None
        phases = ("data", "forward_backward", "reduce_gradients", "optimizer")
        spent = [line[f"{phase}_seconds"] for phase in phases]
        assert min(spent) > 0
        assert max(spent) == line["forward_backward_seconds"] or line["step"] == 1
        assert sum(spent) <= line["seconds"]


def test_both_ways_of_mfu():
    run = RunStarted(
        step=0, steps=1, world_size=4, flops_per_token_causal=3e9, flops_per_token_full=4e9, peak_flops=5e12
    )
    # 8,000 tokens in 2 s on 4 GPUs are 1,000 tokens/s of each
    assert speed_of(8000, 2.0, run) == Speed(4000.0, 1000.0, 3.0, 4.0, 0.6, 0.8)


def test_a_step_has_the_fields_of_speed():
    names = [f.name for f in fields(StepDone)]
    at = names.index("tokens_per_second")
    speed = [f.name for f in fields(Speed)]
    assert names[at : at + len(speed)] == speed
