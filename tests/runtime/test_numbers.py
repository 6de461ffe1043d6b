"""NaN, infinities and spikes: an update is skipped, then the run goes back and leaves data out, then it stops."""

import pytest

from megaspec.checkpoint.store import Store
from megaspec.log.jsonl import read_metrics
from tests.runtime import lives, troubles
from tests.runtime.specs import spec

DP, TP = {"parallelism.dp_replicate": 2}, {"parallelism.tp": 2}
FSDP = {"parallelism.dp_shard": 2, "parallelism.dp_strategy": "fsdp"}
LONG = {"train.steps": 16, "checkpoint.every": 4, "model.dropout": 0.1}
BACK = {"skips": 1, "within": 6, "rollbacks": 2}


def told(pool, made, folder, ranks, **fault):
    """What every rank says of a run with a fault; all say the same."""
    results = pool.run(troubles.live_through, made.model_dump_json(), str(folder), fault, ranks=ranks)
    assert all(result["end"] == results[0]["end"] for result in results)
    return results[0]


def lines_of(folder, *names):
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] in names]


NAN, INF = float("nan"), float("inf")
SKIPPED = [("dp2", NAN), ("tp2", INF), ("fsdp2", NAN), ("dp2", INF), ("tp2", NAN), ("fsdp2", INF)]


# each layout and each value by default, all of both in the slow set
@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(*one, marks=[pytest.mark.slow] * (i > 2)) for i, one in enumerate(SKIPPED)]
)
def test_a_skipped_update_changes_nothing_and_is_told(name, value, tmp_path, pool):
    layout = {"dp2": DP, "tp2": TP, "fsdp2": FSDP}[name]
    made = spec({**LONG, **layout, "train.numbers": {"skips": 1, "within": 100}, "checkpoint.every": 1})
    result = told(pool, made, tmp_path, 2, on=1, what="loss:", steps=[7], value=value)
    assert result["end"] == ""
    saved = lives.read_all(tmp_path)
    tensors = {s: {n: d for n, d in found.items() if "rng/" not in n} for s, (found, _) in saved.items()}
    for step in range(2, 17):
        assert (tensors[step] == tensors[step - 1]) == (step == 7), step
    assert saved[16][1]["optimizer_updates"] == 15
    (skip,) = lines_of(tmp_path, "skip")
    assert (skip["step"], skip["kind"], skip["where"]) == (7, "nonfinite", "loss of rank 1 of 2")
    assert (skip["first_sample"], skip["samples"], skip["recent"], skip["allowed"]) == (24, 4, 1, 1)
    steps = lines_of(tmp_path, "step")
    assert [line["step"] for line in steps] == list(range(1, 17))
    assert [line["step"] for line in steps if line["skipped"]] == [7]


@pytest.mark.parametrize(
    "changes",
    [
        # by default as the last of these
        pytest.param({"precision.kind": "bf16", **DP}, marks=pytest.mark.slow),
        {"precision.kind": "fp32", **TP},
        {"precision.kind": "bf16", **FSDP},
        pytest.param({"precision.kind": "fp32"}, marks=pytest.mark.slow),
        # the checkpoint that the run goes back to may still be being written
        {"precision.kind": "bf16", **DP, "checkpoint.saving": "async"},
    ],
    ids=["bf16 dp2", "fp32 tp2", "bf16 fsdp2", "fp32", "async dp2"],
)
def test_going_back_is_to_the_bit_a_run_that_was_told_from_the_start(changes, tmp_path, pool):
    made = spec({**LONG, **changes, "train.numbers": BACK, "train.eval_every": 4, "train.eval_samples": 4})
    ranks = made.world_size
    # steps 9 and 11 are one too many: back to step 8, without the data of 9 to 11
    result = told(pool, made, tmp_path / "back", ranks, on=ranks - 1, what="loss:", steps=[9, 11])
    assert result["end"] == ""
    content = {**LONG, **changes, "train.numbers": BACK, "train.eval_every": 4, "train.eval_samples": 4}
    ahead = spec({**content, "train.skip_steps": [{"first": 9, "last": 11}]})
    assert told(pool, ahead, tmp_path / "told", ranks, on=0, what="loss:", steps=[])["end"] == ""
    back, expected = lives.read_all(tmp_path / "back"), lives.read_all(tmp_path / "told")
    assert back.keys() == expected.keys() == {4, 8, 12, 16}
    for step, (tensors, state) in expected.items():
        assert tensors == back[step][0], step
        numbers = back[step][1]["numbers"]
        if step > 4:
            assert (numbers["windows"], numbers["rollbacks"]) == ([[9, 11]], 1)
        assert {**back[step][1], "numbers": {**numbers, "windows": [], "rollbacks": 0}} == state
    (event,) = lines_of(tmp_path / "back", "rollback")
    assert (event["step"], event["from_step"], event["first_left_out"], event["last_left_out"]) == (8, 11, 9, 11)
    assert (event["first_sample"], event["samples"], event["rollbacks"]) == (32, 12, 1)
    kept = ("event", "step", "loss", "grad_norm", "samples", "first_sample", "tokens", "skipped")
    logged = []
    for folder in ("back", "told"):
        lines = lines_of(tmp_path / folder, "step", "left_out", "eval")
        logged.append([{key: line.get(key) for key in kept} for line in lines])
    assert logged[0] == logged[1]
    steps = [line["step"] for line in logged[0] if line["event"] != "eval"]
    assert steps == list(range(1, 17))


def test_a_resumed_run_leaves_the_same_data_out(tmp_path, pool):
    """Stopped after every step from where it went back to."""
    content = {**LONG, **DP, "precision.kind": "bf16", "train.numbers": BACK}
    made = spec(content)
    result = told(pool, made, tmp_path / "run", 2, on=0, what="loss:", steps=[9, 11], stop_after=12)
    assert result["end"].startswith("Preempted"), result
    for _ in range(6):
        result = told(pool, made, tmp_path / "run", 2, on=0, what="loss:", steps=[], stop_after=1)
    assert result["end"] == ""
    ahead = spec({**content, "train.skip_steps": [{"first": 9, "last": 11}]})
    told(pool, ahead, tmp_path / "told", 2, on=0, what="loss:", steps=[])
    assert lives.read_all(tmp_path / "run")[16][0] == lives.read_all(tmp_path / "told")[16][0]


def test_a_spike_is_skipped_on_all_ranks(tmp_path, pool):
    numbers = {"skips": 2, "within": 100, "spikes": {"window": 8, "threshold": 20.0}}
    made = spec({**LONG, **DP, "precision.kind": "fp32", "train.numbers": numbers, "checkpoint.every": 1})
    result = told(pool, made, tmp_path, 2, on=1, what="loss:", steps=[12], value=50.0)
    assert result["end"] == ""
    (skip,) = lines_of(tmp_path, "skip")
    assert (skip["step"], skip["kind"]) == (12, "spike")
    assert skip["loss"] > skip["loss_limit"] > 0
    assert skip["where"].startswith("gradient of ")
    saved = lives.read_all(tmp_path)
    assert saved[16][1]["optimizer_updates"] == 15
    # no limit is of the spike itself
    assert all(row[0] != 12 for row in saved[16][1]["numbers"]["values"])


def test_the_budget_ends_the_run_with_76(tmp_path, pool):
    made = spec({**LONG, **DP, "train.numbers": {"skips": 1, "within": 10, "rollbacks": 1}})
    result = told(pool, made, tmp_path, 2, on=0, what="loss:", steps=[9, 10, 12, 13])
    assert result["code"] == 76
    assert "step 13: loss=nan is not finite, first seen in the loss of rank 0 of 2" in result["end"]
    assert "as 2 within 10 steps (train.numbers.skips=1), and the run went back 1 times" in result["end"]


def test_a_run_that_ends_in_skipped_updates_ends_with_76(tmp_path, pool):
    """Saved all the same; a start that goes on from it says so again."""
    content = {**LONG, **DP, "train.numbers": {"skips": 2, "within": 10}}
    result = told(pool, spec(content), tmp_path, 2, on=0, what="loss:", steps=[15, 16])
    assert result["code"] == 76
    assert "steps 15 to 16, the last of the run, were all skipped for their numbers" in result["end"]
    assert "train.numbers.skips=2" in result["end"]
    assert Store(tmp_path).steps()[-1] == 16
    again = told(pool, spec(content), tmp_path, 2, on=0, what="loss:", steps=[])
    assert (again["end"], again["code"]) == (result["end"], 76)


def test_a_run_that_trained_nothing_ends_with_76(tmp_path, pool):
    """Fewer steps than may be skipped."""
    made = spec({**LONG, "train.steps": 5, "train.numbers": {"skips": 6, "within": 10}})
    result = told(pool, made, tmp_path, 1, on=0, what="loss:", steps=[1, 2, 3, 4, 5])
    assert result["code"] == 76
    assert "steps 1 to 5: each was skipped or left out, so that nothing was trained" in result["end"]


def test_nothing_to_go_back_to(tmp_path, pool):
    made = spec({**LONG, **DP, "checkpoint.every": 10, "train.numbers": {"rollbacks": 1}})
    result = told(pool, made, tmp_path, 2, on=0, what="loss:", steps=[5])
    assert result["code"] == 76
    assert "step 5: loss=nan" in result["end"]
    assert "no good checkpoint before step 5 is left to go back to; checkpoint.every" in result["end"]


def test_what_learned_from_the_window_goes_into_quarantine(tmp_path, pool):
    made = spec({**LONG, "train.numbers": {"rollbacks": 1, "before": 3}})
    result = told(pool, made, tmp_path, 1, on=0, what="loss:", steps=[10])
    assert result["end"] == ""
    (event,) = lines_of(tmp_path, "rollback")
    # step 8 lies in the window of steps 7 to 10
    assert (event["step"], event["first_left_out"]) == (4, 7)
    reason = (tmp_path / "checkpoints" / "quarantine" / "step-00000008-1.txt").read_text()
    assert "it has learned from the data of steps 7 to 10, which is left out now" in reason
    # who fetches a copy goes on from none that has learned from it
    behind = result["copies"][result["copies"].index(("drop", 8)) :]
    assert behind[:3] == [("drop", 8), ("copy", 4), ("copy", 8)]


def test_what_learned_from_the_window_and_was_saved_elsewhere_does_not_come_back(tmp_path, pool):
    """The disk was full when step 8 was saved. The run goes back to step 4, is stopped behind step 5, and goes on."""
    numbers = {"rollbacks": 1, "before": 3}
    checkpoint = {"every": 4, "keep": "all", "fallback_dir": str(tmp_path / "other")}
    content = {"train.steps": 16, "model.dropout": 0.1, "train.numbers": numbers}
    made = spec({**content, "checkpoint": checkpoint})
    result = told(pool, made, tmp_path / "run", 1, on=0, what="loss:", steps=[10], full=[8], stop_after=11)
    assert result["end"].startswith("Preempted: stopped after step 5"), result
    (there,) = (tmp_path / "other").iterdir()
    reason = (there / "checkpoints" / "quarantine" / "step-00000008-1.txt").read_text()
    assert reason == "the run went back to step 4\n"
    assert ("drop", 8) in result["copies"]
    result = told(pool, made, tmp_path / "run", 1, on=0, what="loss:", steps=[])
    assert result["end"] == ""
    ahead = spec({**content, "checkpoint.every": 4, "train.skip_steps": [{"first": 7, "last": 10}]})
    told(pool, ahead, tmp_path / "told", 1, on=0, what="loss:", steps=[])
    assert lives.read_all(tmp_path / "run")[16][0] == lives.read_all(tmp_path / "told")[16][0]


def test_a_run_goes_back_to_what_was_saved_elsewhere(tmp_path, pool):
    checkpoint = {"every": 4, "keep": "all", "fallback_dir": str(tmp_path / "other")}
    made = spec({"train.steps": 16, "checkpoint": checkpoint, "train.numbers": {"rollbacks": 1}})
    result = told(pool, made, tmp_path / "run", 1, on=0, what="loss:", steps=[10], full=[8])
    assert result["end"] == ""
    (event,) = lines_of(tmp_path / "run", "rollback")
    assert (event["step"], event["first_left_out"]) == (8, 10)
    # right after it went back the disk was still full; the next start takes what was saved there, and not that before
    result = told(pool, made, tmp_path / "run", 1, on=0, what="loss:", steps=[])
    saved = lives.read_all(tmp_path / "run")
    assert list(saved) == [4, 8, 12, 16]
    assert saved[8][1]["numbers"]["windows"] == [[10, 10]]
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("layout", [{}, DP], ids=["1", "dp2"])
def test_a_run_folder_that_stays_full_takes_nothing_and_the_run_goes_back_all_the_same(layout, tmp_path, pool):
    """Steps 4 and 12 lie at home, 8 elsewhere: it goes back to 8, and what learned from the window is put aside. A stop
    behind step 15, which is saved elsewhere as well, and the next start goes on from there."""
    numbers = {"rollbacks": 1, "before": 3}
    checkpoint = {"every": 4, "keep": "all", "fallback_dir": str(tmp_path / "other")}
    content = {"train.steps": 20, "model.dropout": 0.1, "train.numbers": numbers, **layout}
    made = spec({**content, "checkpoint": checkpoint})
    ranks = made.world_size
    # home takes step 12, which learns from the window of 11 to 14
    fault = {"on": 0, "what": "loss:", "full": [8, 15, 16], "stays": True}
    result = told(pool, made, tmp_path / "run", ranks, **fault, steps=[14], stop_after=17)
    assert result["end"].startswith("Preempted: stopped after step 15"), result
    (event,) = lines_of(tmp_path / "run", "rollback")
    assert (event["step"], event["first_left_out"], event["last_left_out"]) == (8, 11, 14)
    home = tmp_path / "run" / "checkpoints"
    assert [path.name for path in (home / "quarantine").glob("step-00000012-?")] == ["step-00000012-1"]
    assert Store(tmp_path / "run").steps() == [4, 12]
    result = told(pool, made, tmp_path / "run", ranks, **fault, steps=[])
    assert result["end"] == ""
    # from step 15 on
    steps = [line["step"] for line in lines_of(tmp_path / "run", "step")]
    assert steps == [*range(1, 11), *range(15, 21)]
    ahead = spec({**content, "checkpoint.every": 4, "train.skip_steps": [{"first": 11, "last": 14}]})
    told(pool, ahead, tmp_path / "told", ranks, on=0, what="loss:", steps=[])
    saved = lives.read_all(tmp_path / "run")
    assert saved[20][0] == lives.read_all(tmp_path / "told")[20][0]


def test_no_more_is_kept_elsewhere_than_at_home(tmp_path, pool):
    checkpoint = {"every": 2, "keep": 2, "keep_every": 8, "fallback_dir": str(tmp_path / "other")}
    made = spec({"train.steps": 16, "checkpoint": checkpoint})
    result = told(pool, made, tmp_path / "run", 1, on=0, what="loss:", steps=[], full=list(range(3, 17)))
    assert result["end"] == ""
    (there,) = (tmp_path / "other").iterdir()
    names = sorted(path.name for path in (there / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000014", "step-00000016"]
