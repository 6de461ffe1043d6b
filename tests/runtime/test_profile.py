"""profile.steps in a run, and `megaspec bench step`: what they write, and that nothing that is trained changes."""

import gzip
import json

import pytest

from megaspec.cli import main
from megaspec.log.events import NAMES, StepsProfiled
from megaspec.log.jsonl import read_metrics
from megaspec.nn.range_names import OPTIMIZER, WINDOW
from megaspec.profiling.kinds import KINDS

pytestmark = pytest.mark.usefixtures("warm_launches")

PROFILE = NAMES[StepsProfiled]
TINY = (
    "recipe=hello",
    "data=random",
    "data.seq_len=128",
    "data.vocab_size=257",
    "~data.blend",
    "model.n_layers=2",
    "train.global_batch=4",
    "train.eval_every=0",
    "train.sample=null",
    "optim.schedule.warmup_steps=0",
    "log.console=plain",
    "log.tensorboard=false",
    "launcher.ranks=1",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def with_tiny(*words):
    """TINY, with `words` in place of what it says of the same keys."""
    said = {word.partition("=")[0] for word in words}
    return [*(word for word in TINY if word.partition("=")[0] not in said), *words]


def train(*words):
    return main(["train", *with_tiny(*words)])


def trained(run):
    """What a run computed, to the bit."""
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_metrics(f"runs/{run}/metrics.jsonl")
        if line["event"] == "step"
    ]


def profiles(run):
    return [line for line in read_metrics(f"runs/{run}/metrics.jsonl") if line["event"] == PROFILE]


def test_a_run_with_a_profile_trains_the_same_to_the_bit_and_says_where_the_time_went(place, capfd):
    words = ("train.steps=5", "train.eval_every=3", "checkpoint.every=3")
    assert train("name=plain", *words) == 0
    assert train("name=seen", *words, "profile.steps=[2,4]") == 0
    out = capfd.readouterr().out
    assert trained("seen") == trained("plain")
    assert len(trained("seen")) == 5
    (event,) = profiles("seen")
    assert (event["step"], event["first_step"], event["rank"]) == (4, 2, 0)
    assert event["accounted"] >= 0.97
    kinds = event["kinds"]
    assert tuple(kinds) == KINDS
    assert sum(one["seconds"] for one in kinds.values()) == pytest.approx(event["seconds"])
    for kind in ("matrix products", "attention", "element-wise", "optimizer"):
        assert kinds[kind]["seconds"] > 0, kind
    assert event["no_plan"] == "of CPUs no speeds are known"
    assert event["no_clock"] == "there is no GPU"
    assert "steps 2 to 4 of rank 0 on cpu" in out
    assert "matrix products" in out
    # three steps of four sequences: 6 FLOPs a weight and token, with a vocabulary padded to a multiple of 128
    weights = 384 * 128 + 2 * (128 * 128 + 2 * 64 * 128 + 128 * 128 + 3 * 320 * 128)
    assert kinds["matrix products"]["flops"] == 3 * 4 * 128 * 6 * weights
    stem = "profiles/steps-2-4-rank-0"
    assert event["files"] == [f"{stem}.trace.json.gz", f"{stem}.json"]
    run = place / "runs/seen"
    written = json.loads((run / f"{stem}.json").read_text())
    assert written == {name: event[name] for name in written}
    trace = json.loads(gzip.decompress((run / f"{stem}.trace.json.gz").read_bytes()))
    names = [one.get("name") for one in trace["traceEvents"]]
    assert names.count(WINDOW) == 1
    # of each step the norms of gradients, behind the last backward pass, and the update
    assert names.count(OPTIMIZER) == 2 * 3
    # evaluating and saving behind step 3 is no part of them
    steps = [line["seconds"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"]
    assert event["seconds"] < 1.5 * sum(steps[1:4])


def test_a_profile_of_the_first_and_of_the_last_step(place):
    assert train("name=whole", "train.steps=2", "profile.steps=[1,2]", "profile.memory=false") == 0
    (event,) = profiles("whole")
    assert (event["first_step"], event["step"]) == (1, 2)


def test_a_run_that_goes_on_profiles_what_is_left_and_refuses_what_is_done(place, capfd):
    assert train("name=on", "train.steps=2", "checkpoint.every=2") == 0
    assert main(["resume", "runs/on", "train.steps=4", "profile.steps=[2,3]"]) == 64
    told = capfd.readouterr().err
    assert (
        "profile.steps=[2, 3]: 2 steps are done, and can't be profiled any more; take later ones, such as [3, 4]"
        in told
    )
    # every way out is taken: within the steps that are left, or with more of them
    assert main(["resume", "runs/on", "train.steps=4", "profile.steps=[1,9]"]) == 64
    assert "take later ones, such as [3, 4]   (" in capfd.readouterr().err
    assert main(["resume", "runs/on", "profile.steps=[1,2]"]) == 64
    assert "take later ones, such as [3, 4] with train.steps=4" in capfd.readouterr().err
    assert main(["resume", "runs/on", "train.steps=4", "profile.steps=[3,9]"]) == 64
    assert "must end by train.steps=4; try [3, 4]" in capfd.readouterr().err
    assert main(["resume", "runs/on", "train.steps=4", "profile.steps=[3,4]", "profile.memory=false"]) == 0
    (event,) = profiles("on")
    assert (event["first_step"], event["step"]) == (3, 4)
    capfd.readouterr()
    # the run keeps the setting, and says that it is behind it
    assert main(["resume", "runs/on", "train.steps=5"]) == 0
    assert "profile.steps=[3, 4]: 4 steps are done; nothing is profiled" in capfd.readouterr().err
    assert len(profiles("on")) == 1


def test_a_run_that_stopped_in_its_profile_goes_on_with_the_rest_of_it(place, capfd):
    assert train("name=half", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=all", "profile.steps=[2,3]") == 0
    # as after a kill behind step 2
    for path in sorted((place / "runs/half/checkpoints/step-00000004").iterdir()):
        path.unlink()
    (place / "runs/half/checkpoints/step-00000004").rmdir()
    before = trained("half")
    capfd.readouterr()
    assert main(["resume", "runs/half"]) == 0
    assert "profile.steps=[2, 3]: 2 steps are done; steps 3 to 3 are profiled" in capfd.readouterr().err
    assert trained("half") == before
    (event,) = profiles("half")
    assert (event["first_step"], event["step"]) == (3, 3)


def test_several_ranks_are_profiled_at_once_and_told_by_the_first(place):
    words = ("launcher.ranks=2", "train.steps=3", "profile.ranks=[0,1]", "profile.memory=false")
    assert train("name=two", *words, "profile.steps=[2,3]") == 0
    found = profiles("two")
    assert [event["rank"] for event in found] == [0, 1]
    for event in found:
        messages = event["kinds"]["exposed communication"]
        assert 0 < messages["seconds"] <= messages["busy_seconds"] <= event["seconds"]
        assert event["accounted"] >= 0.97
    names = {path.name for path in (place / "runs/two/profiles").iterdir()}
    assert names == {f"steps-2-3-rank-{rank}.{kind}" for rank in (0, 1) for kind in ("json", "trace.json.gz")}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("profile.steps=[3,2]",), "profile.steps=[3, 2] must name the first step and then the last; write [2, 3]"),
        (("profile.steps=[3,9]",), "profile.steps=[3, 9] must end by train.steps=4; try [3, 4]"),
        (("profile.steps=[7,9]",), "profile.steps=[7, 9] must end by train.steps=4; try [4, 4]"),
        (("profile.steps=[2,3]", "profile.ranks=[1]"), "profile.ranks=[1] must name ranks below launcher.ranks=1"),
        (("profile.memory=false",), "profile.memory=false needs profile.steps, which is null"),
        (("profile.steps=[0,3]",), "profile.steps"),
        (("profile.steps=[-1,3]",), "profile.steps"),
        (("profile.steps=[]",), "profile.steps"),
        (("profile.steps=[2]",), "profile.steps"),
        (("profile.steps=[2,3]", "profile.ranks=[]"), "profile.ranks"),
        (("profile.stops=[2,3]",), "profile.st"),
    ],
)
def test_what_can_not_be_profiled_is_refused_before_anything_is_made(words, told, place, capfd):
    assert train("name=bad", "train.steps=4", *words) == 64
    assert told in capfd.readouterr().err
    assert not (place / "runs").exists()


def test_a_profile_that_can_not_be_written_costs_no_run(place, capfd):
    assert train("name=first", "train.steps=1") == 0
    # a folder where a file has to be: as little can be written there as on a full disk
    (place / "runs/first/profiles").mkdir()
    (place / "runs/first/profiles/steps-2-2-rank-0.trace.json.gz").mkdir()
    assert main(["resume", "runs/first", "train.steps=3", "profile.steps=[2,2]"]) == 0
    assert "steps-2-2-rank-0.trace.json.gz can't be written" in capfd.readouterr().err
    (event,) = profiles("first")
    assert event["files"] == []
    assert [path.suffix for path in (place / "runs/first/profiles").iterdir()] == [".gz"], "a file that is not whole"
    assert len(trained("first")) == 3


def test_bench_step_prints_a_table_and_writes_a_line(place, capfd):
    words = with_tiny("launcher.ranks=2")
    flags = ["--warm", "1", "--steps", "2", "--rank", "0", "--rank", "1", "--out", "step.jsonl"]
    assert main(["bench", "step", *words, *flags]) == 0
    out = capfd.readouterr().out
    assert "steps 4 to 5 of rank 0 on cpu" in out
    assert "steps 4 to 5 of rank 1 on cpu" in out
    assert "a step without the profiler took" in out
    assert "written: step.jsonl" in out
    lines = [json.loads(line) for line in (place / "step.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in lines] == [0, 1]
    for line in lines:
        assert line["accounted"] >= 0.97
        assert sum(one["seconds"] for one in line["kinds"].values()) == pytest.approx(line["seconds"])
        assert line["step_seconds"] == pytest.approx(line["seconds"] / 2)
        assert line["unprofiled_seconds"] > 0
        assert line["kinds"]["exposed communication"]["seconds"] > 0
        assert line["world_size"] == 2
    assert not (place / "runs").exists()


def test_bench_step_balances_experts(place, capfd):
    experts = "model.moe={n_experts: 4, top_k: 2, d_expert: 64}"
    words = [*TINY, experts, "--balanced", "--warm", "0", "--steps", "1", "--out", "step.jsonl"]
    assert main(["bench", "step", *words]) == 0
    (line,) = [json.loads(line) for line in (place / "step.jsonl").read_text().splitlines()]
    assert line["accounted"] >= 0.97
    assert line["kinds"]["matrix products"]["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("train.steps=4", "--steps", "3"), 64, "train.steps=4 must be at least the 11 steps"),
        (("--rank", "1"), 64, "--rank 1 must be below launcher.ranks=1; try 0"),
        (("--steps", "51"), 64, "--steps 51"),
        (("--steps", "0"), 64, "no whole number from 1 on"),
        (("--out", "absent/step.jsonl"), 73, "absent/step.jsonl can't be written"),
        (("model.n_kv_heads=3",), 64, "model.n_kv_heads"),
        (("throughput=absent.json",), 64, "absent.json"),
        (("throughput=a.json", "throughput=b.json"), 64, "throughput= is given more than once"),
        (("throughput=",), 64, "throughput= is empty"),
        (("memory=ignore", "memory=check"), 64, "memory is set twice, memory=ignore and memory=check; keep one"),
        (("--balanced",), 64, "--balanced is for experts, and model.moe=null: there are none; drop it"),
        (("profile.steps=[1,2]",), 64, "profile.steps=[1, 2] is of train and resume; drop it, bench step takes --warm"),
        (("profile={steps: [1,2], ranks: [0]}",), 64, "profile.ranks=[0] is of train and resume; drop it, bench"),
    ],
)
def test_bench_step_refuses_before_it_starts_ranks(words, code, told, place, capfd):
    assert main(["bench", "step", *with_tiny(*words)]) == code
    assert told in capfd.readouterr().err
