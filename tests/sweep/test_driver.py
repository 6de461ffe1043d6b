"""A sweep from its command line to its exit code, its runs stood in for by stub.py."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaspec.checkpoint.lock import RunLock
from megaspec.cli import main
from megaspec.estimate.target import Target
from megaspec.sweep import attempt, multirun
from megaspec.sweep.state import SweepFolder
from tests.sweep.conftest import TINY, lives, points, states, sweep

pytestmark = pytest.mark.usefixtures("stubbed")


def send_when(condition, number=signal.SIGTERM):
    """Signals this process once a condition holds."""

    def wait():
        while not condition():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def has_begun(points, name="s"):
    """Whether so many points have done a step."""
    return sum(b'"step"' in f.read_bytes() for f in Path("sweeps", name).glob("*/metrics.jsonl")) >= points


def test_every_point_runs_once_in_a_folder_of_its_own(capsys):
    assert sweep("optim.lr=1e-3,3e-4", "data.seed=1,2,3", "sweep.slots=2") == 0
    found = points()
    assert [p.overrides for p in found.values()] == [
        (f"optim.lr={lr}", f"data.seed={seed}") for lr in (0.001, 0.0003) for seed in (1, 2, 3)
    ]
    assert {n: len(one) for n, one in lives().items()} == dict.fromkeys(range(1, 7), 1)
    for number, point in found.items():
        recipe = json.loads(Path("sweeps/s", point.folder, "recipe.json").read_text())
        spec = json.loads(Path("sweeps/s", point.folder, "spec.json").read_text())
        assert recipe["name"] == spec["name"] == f"s-{number:02d}"
        assert f"optim.lr={spec['optim']['lr']}" == point.overrides[0]
        assert spec["run_dir"] == f"sweeps/s/{point.folder}"
    out = capsys.readouterr().out
    assert "best loss: point 4, sweeps/s/04-lr-0.0003-seed-1" in out
    assert json.loads(Path("sweeps/s/sweep.json").read_text())["state"] == "done"


def test_the_same_command_again_runs_nothing_and_others_are_refused(capsys):
    assert sweep("optim.lr=1e-3,3e-4") == 0
    assert sweep("optim.lr=3e-4,1e-3", "sweep.slots=3") == 0
    assert {n: len(one) for n, one in lives().items()} == {1: 1, 2: 1}
    capsys.readouterr()
    assert sweep("optim.lr=1e-3,3e-4,1e-4") == 64
    assert "sweeps/s holds 2 other points; give sweep.name=NEW" in capsys.readouterr().err
    assert sweep("optim.lr=1e-3,3e-4", steps=3) == 64
    assert "(optim.lr=0.001) composed from other settings than now" in capsys.readouterr().err
    assert sweep("optim.lr=1e-3,3e-4", "resume=never") == 64
    assert "drop resume=never" in capsys.readouterr().err


def test_an_invalid_point_is_named_and_nothing_starts(capsys):
    assert sweep("model.n_kv_heads=2,3", "train.micro_batch=1,7") == 64
    err = capsys.readouterr().err
    assert "3 of 4 points can't be run; nothing was started" in err
    assert "point 2 (model.n_kv_heads=2 train.micro_batch=7): train.global_batch=2 must be" in err
    both = [line for line in err.splitlines() if line.startswith("point 4 (model.n_kv_heads=3 train.micro_batch=7)")]
    assert len(both) == 2
    assert not Path("sweeps").exists()


def test_keys_that_points_leave_out_are_told_once(capsys):
    tiny = [word for word in TINY if word not in ("~data.blend", "data=synthetic")]
    assert main(["train", "-m", *tiny, "sweep.name=s", "train.steps=2", "data=synthetic", "optim.lr=1e-3,1e-2"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert lines == [
        "left out: data.blend (recipes/hello.yaml:7): no key of data.kind=synthetic",
        "left out: data.prepare (recipes/hello.yaml:8): no key of data.kind=synthetic",
    ]
    words = ("data=synthetic,random", "train.seed=1,2,3,4", "train.batch_ramp=null")
    assert main(["train", "-m", *tiny, "sweep.name=t", "train.steps=2", *words]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    told = []
    for kind in ("synthetic", "random"):
        points = ", ".join(f"data={kind} train.seed={seed}" for seed in (1, 2, 3))
        for key in ("data.blend (recipes/hello.yaml:7)", "data.prepare (recipes/hello.yaml:8)"):
            told.append(f"left out at {points} and 1 more: {key}: no key of data.kind={kind}")
    assert lines == told


def test_what_is_wrong_with_every_point_is_told_once(capsys):
    assert sweep("data.seed=1,2,3", "optim.lrr=3") == 64
    err = capsys.readouterr().err
    assert err.count("optim.lrr=3: lrr is no key") == 1
    assert "every point: optim.lrr" in err


def test_of_many_invalid_points_the_first_are_named(capsys):
    assert sweep("train.micro_batch=range(3,40)", "data.seed=1,2") == 64
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("74 of 74 points can't be run")
    assert sum(line.startswith("point ") for line in lines) == 20
    assert lines[-1] == "... and 54 points more"


def test_points_that_are_the_same_run_once(capsys):
    assert sweep("optim.lr=1e-3,0.001,1e-2") == 0
    assert "optim.lr=0.001 is the same run as optim.lr=0.001: run once" in capsys.readouterr().out
    assert len(lives()) == 2


def test_a_failed_point_stops_no_other_and_gives_the_exit_code(capsys):
    assert sweep("about.purpose=fail,ok,die", "sweep.slots=1") == 76
    assert states() == ["failed", "done", "failed"]
    assert [p.code for p in points().values()] == [76, 0, 70]
    assert [p.reason for p in points().values()] == ["the loss is nan", "", "killed by SIGKILL"]
    assert "failed (76)" in capsys.readouterr().out
    assert SweepFolder(Path("sweeps/s")).head().state == "failed"


def test_a_sweep_stops_at_a_failure_when_it_is_told_to():
    assert sweep("data.seed=1,2,3", "about.purpose=fail", "sweep.slots=1", "sweep.keep_going=false") == 76
    assert states() == ["failed", "waiting", "waiting"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_sweep_goes_on_where_it_was(number, capsys):
    sent = send_when(lambda: has_begun(2), number)
    words = ("data.seed=1,2,3,4", "about.purpose=held", "sweep.slots=2")
    assert sweep(*words, steps=30) == 75
    sent.join()
    assert sorted(states()) == ["interrupted", "interrupted", "waiting", "waiting"]
    assert SweepFolder(Path("sweeps/s")).head().state == "interrupted"
    assert "goes on with: megaspec sweep resume sweeps/s" in capsys.readouterr().out
    Path("go").touch()
    assert sweep(*words, steps=30) == 0
    found = lives()
    assert [len(found[n]) for n in (1, 2, 3, 4)] == [2, 2, 1, 1]
    assert found[1][1]["from"] > 0
    for point in points().values():
        lines = [json.loads(t) for t in Path("sweeps/s", point.folder, "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 31))


def test_a_second_signal_or_the_grace_kills(monkeypatch):
    monkeypatch.setattr(attempt, "MARGIN_SECONDS", 0.2)
    sent = send_when(lambda: has_begun(1))
    words = ("data.seed=1,2", "about.purpose=deaf", "launcher.grace_seconds=0.1")
    # more steps than a day has time for
    assert sweep(*words, steps=5_000_000) == 75
    sent.join()
    assert states() == ["interrupted", "waiting"]


def test_resume_needs_no_recipe_and_changes_only_how(capsys):
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("defaults: [hello]\noptim: {weight_decay: 0.05}\n")
    words = ["recipe=mine", *TINY[1:], "data.seed=1,2", "train.steps=30", "about.purpose=held"]
    sent = send_when(lambda: has_begun(1, "m"))
    assert main(["train", *words, "--multirun", "sweep.name=m"]) == 75
    sent.join()
    Path("go").touch()
    Path("recipes/mine.yaml").write_text("defaults: [hello]\n")
    assert main(["train", *words, "-m", "sweep.name=m"]) == 64
    assert "composed from other settings than now" in capsys.readouterr().err
    assert main(["sweep", "resume", "sweeps/m", "sweep.seed=3"]) == 64
    assert "a sweep that goes on keeps its seed" in capsys.readouterr().err
    assert main(["sweep", "resume", "sweeps/m", "data.seed=3"]) == 64
    assert main(["sweep", "resume", "sweeps/m", "sweep.slots=2"]) == 0
    assert states("m") == ["done", "done"]
    for point in points("m").values():
        assert json.loads(Path("sweeps/m", point.folder, "spec.json").read_text())["optim"]["weight_decay"] == 0.05
    assert main(["sweep", "show", "sweeps/m"]) == 0
    assert main(["sweep", "show", "sweeps"]) == 64
    assert "sweeps holds no sweep (no sweep.json)" in capsys.readouterr().err


def test_failed_points_run_again_when_asked():
    assert sweep("data.seed=1,2", "about.purpose=fail") == 76
    assert sweep("data.seed=1,2", "about.purpose=fail") == 76
    assert [len(one) for one in lives().values()] == [1, 1]
    assert main(["sweep", "resume", "sweeps/s", "sweep.again=failed"]) == 76
    assert [len(one) for one in lives().values()] == [2, 2]


def test_two_processes_never_run_one_sweep(capsys):
    assert sweep("data.seed=1,2") == 0
    with RunLock(Path("sweeps/s")):
        assert sweep("data.seed=1,2") == 78


def test_a_folder_of_something_else_is_left_alone(capsys):
    Path("sweeps/s").mkdir(parents=True)
    Path("sweeps/s/precious").write_text("x")
    assert sweep("data.seed=1,2") == 64
    assert "sweep.folder=sweeps/s exists and is not empty" in capsys.readouterr().err


def test_points_see_gpus_of_their_own(monkeypatch):
    gpus = Target(gpus=4, gpu="NVIDIA H200", sm=90, gpu_memory=140 * 10**9, cores=8)
    monkeypatch.setattr(multirun, "detect_target", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    words = ["launcher.ranks=auto", "parallelism.dp_replicate=1", "parallelism.tp=1,2,4", "data.seed=1,2"]
    tiny = [w for w in TINY[1:] if not w.startswith("launcher.ranks")]
    assert (
        main(["train", "-m", "recipe=hello", *tiny, *words, "train.steps=30", "about.purpose=slow", "sweep.name=s"])
        == 0
    )
    spans = []
    for number, [life] in lives().items():
        last = Path("sweeps/s", points()[number].folder, "metrics.jsonl").stat().st_mtime
        spans.append((life["at"], last, set(life["gpus"].split(","))))
        assert len(spans[-1][2]) == points()[number].ranks == (1, 1, 2, 2, 4, 4)[number - 1]
    for i, (begin, end, mine) in enumerate(spans):
        for other_begin, other_end, others in spans[i + 1 :]:
            assert not (begin < other_end and other_begin < end) or not mine & others
    assert max(sum(b <= begin < e for b, e, _ in spans) for begin, _, _ in spans) >= 3


def test_points_that_do_not_fit_the_memory_are_refused_unless_told(monkeypatch, capsys):
    small = Target(gpus=2, gpu="NVIDIA H200", sm=90, gpu_memory=2**32, cores=8)
    monkeypatch.setattr(multirun, "detect_target", lambda: small)
    words = ("model.d_model=32,4096", "model.n_layers=2", "precision=bf16", "data.seq_len=256")
    tiny = [w for w in TINY if not w.startswith(("model.n_layers", "data.seq_len"))]
    command = ["train", "-m", *tiny, *words, "train.steps=2", "sweep.name=s"]
    assert main(command) == 64
    err = capsys.readouterr().err
    assert "1 of 2 points can't be run" in err
    assert "point 2 (model.d_model=4096): train.micro_batch=" in err
    assert "the fullest rank needs" in err
    assert not Path("sweeps").exists()
    assert main([*command, "memory=ignore"]) == 0
    assert states() == ["done", "done"]


def test_show_asks_who_runs_the_sweep_and_its_points(capsys):
    """Three points that stand as running: of a run that has ended, of one that is held, and of one that is gone."""
    assert sweep("data.seed=1,2,3") == 0
    folder, found = SweepFolder(Path("sweeps/s")), points()
    folder.write_head(folder.head().model_copy(update={"state": "running"}))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for point in found.values():
        folder.append(point.to("running", pid=dead.pid))
    for number in (2, 3):
        metrics = folder.run(found[number]) / "metrics.jsonl"
        metrics.write_text("".join(line for line in metrics.open() if '"end"' not in line))
    before = Path("sweeps/s/points.jsonl").read_bytes()

    def shown():
        capsys.readouterr()
        assert main(["sweep", "show", "sweeps/s"]) == 0
        out = capsys.readouterr().out
        states = [row.split()[-1] for row in out.splitlines() if re.match(r"\d ", row)]
        return states, "goes on with: megaspec sweep resume sweeps/s" in out

    with RunLock(folder.path):
        assert shown() == (["running"] * 3, False)
        assert '"state": "running", "metric"' in Path("sweeps/s/index.html").read_text()
    with RunLock(folder.run(found[2])):
        assert shown() == (["done", "running", "interrupted"], True)
    leave = "import os; from megaspec.checkpoint.lock import RunLock; RunLock('sweeps/s').acquire(); os._exit(9)"
    killed = [sys.executable, "-c", leave]
    assert subprocess.run(killed, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 9
    assert shown() == (["done", "interrupted", "interrupted"], True)
    assert '"state": "interrupted", "metric"' in Path("sweeps/s/index.html").read_text()
    assert Path("sweeps/s/points.jsonl").read_bytes() == before
