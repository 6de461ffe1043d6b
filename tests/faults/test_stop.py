"""SIGTERM and Ctrl-C wherever they come: saved, exit code 75, nothing changed by it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaspec.log.jsonl import read_metrics
from tests.faults.runs import assert_same, go, make_run, newest, recipe

ROOT = Path(__file__).parents[2]
WHERE = {
    "warm-up": {"point": "warm-up"},
    "step": {"point": "step", "count": 6},
    "evaluation": {"point": "evaluate", "count": 2},
    "save": {"point": "save_started", "count": 2},
    "publishing": {"point": "before_manifest", "count": 2},
}


# Ctrl-C goes the way of SIGTERM: half of its places
STOPS = [pytest.param(signal.SIGTERM, where) for where in WHERE] + [
    pytest.param(signal.SIGINT, where, marks=[pytest.mark.slow] * (i % 2)) for i, where in enumerate(WHERE)
]


@pytest.mark.parametrize(("number", "where"), STOPS)
def test_stop(tmp_path, factory, undisturbed, where, number):
    run = make_run(tmp_path / "run", recipe())
    mark = tmp_path / "here"
    sent = threading.Thread(target=send_when_there, args=(mark, number))
    sent.start()
    start = time.monotonic()
    code = go(run, factory, fault={"rank": 0, "kind": "mark", "mark": str(mark), **WHERE[where]})
    sent.join()
    assert code == 75
    assert time.monotonic() - start < 15
    step, _, _ = newest(run)
    assert 1 <= step < undisturbed[2].step
    assert read_metrics(run / "metrics.jsonl")[-1]["how"] == "Preempted"
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


def send_when_there(mark, number):
    end = time.monotonic() + 15
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.005)
    os.kill(os.getpid(), number)


def test_stop_at_every_step(tmp_path, factory, undisturbed):
    """Also where an evaluation is due: it is not left out, and not done twice."""
    run = make_run(tmp_path / "run", recipe())
    stops = 0
    while True:
        mark = tmp_path / f"here-{stops}"
        sent = threading.Thread(target=send_when_there, args=(mark, signal.SIGTERM))
        sent.start()
        code = go(run, factory, fault={"rank": 1, "kind": "mark", "mark": str(mark), "point": "warm-up"})
        sent.join()
        assert code == 75
        stops += 1
        if newest(run)[0] == undisturbed[2].step:
            break
        assert stops <= undisturbed[2].step
    assert stops == undisturbed[2].step
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_command_line_returns_75(tmp_path, number):
    run = make_run(tmp_path / "run", recipe(steps=5000))
    path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "launchers"))
    job = subprocess.Popen(
        [sys.executable, "-P", "-m", "megaspec.cli", "resume", str(run)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_step(run, job)
        os.killpg(job.pid, number)
        _, said = job.communicate(timeout=30)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 75, said
    assert "Traceback" not in said
    step, _, _ = newest(run)
    assert step == [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"][-1]


def wait_for_step(run, job):
    metrics = run / "metrics.jsonl"
    end = time.monotonic() + 60
    while not (metrics.exists() and '"event": "step"' in metrics.read_text()):
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < end, "no step was made"
        time.sleep(0.02)
