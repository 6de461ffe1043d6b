"""SIGTERM and Ctrl-C wherever they come: saved, exit code 75, nothing changed by it."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaspec.log.jsonl import read_metrics
from tests.faults.runs import assert_same, go, make_run, newest, recipe
from tests.warm import WarmProcess

ROOT = Path(__file__).parents[2]
WHERE = {
    "warm-up": {"point": "warm-up"},
    "step": {"point": "step", "count": 6},
    "evaluation": {"point": "evaluate", "count": 2},
    "save": {"point": "save_started", "count": 2},
    "publishing": {"point": "before_manifest", "count": 2},
}

# The step behind which a request is answered that came there: an evaluation and a save stand behind a step.
SAVED = {"warm-up": 1, "step": 6, "evaluation": 9, "save": 7, "publishing": 7}
# Ctrl-C goes the way of SIGTERM: one of its places by default
STOPS = [pytest.param(signal.SIGTERM, where) for where in WHERE] + [
    pytest.param(signal.SIGINT, where, marks=[pytest.mark.slow] * (where != "evaluation")) for where in WHERE
]


@pytest.mark.parametrize(("number", "where"), STOPS)
def test_stop(tmp_path, factory, undisturbed, where, number):
    run = make_run(tmp_path / "run", recipe())
    mark = tmp_path / "here"
    with sent_when_there(mark, number):
        code = go(run, factory, fault={"rank": 0, "kind": "mark", "mark": str(mark), **WHERE[where]})
    assert code == 75
    step, _, _ = newest(run)
    assert step == SAVED[where]
    assert read_metrics(run / "metrics.jsonl")[-1]["how"] == "Preempted"
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


@contextmanager
def sent_when_there(mark, number):
    """While entered, this process gets a signal once the file is there."""
    over = threading.Event()

    def wait():
        while not over.wait(0.005):
            if mark.exists():
                os.kill(os.getpid(), number)
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_stop_at_every_step(tmp_path, factory, undisturbed):
    """Also where an evaluation is due: it is not left out, and not done twice."""
    run = make_run(tmp_path / "run", recipe())
    stops = 0
    while True:
        mark = tmp_path / f"here-{stops}"
        with sent_when_there(mark, signal.SIGTERM):
            code = go(run, factory, fault={"rank": 1, "kind": "mark", "mark": str(mark), "point": "warm-up"})
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
    job = WarmProcess(["resume", str(run)], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    try:
        wait_for_step(run, job)
        os.killpg(job.pid, number)
        _, said = job.communicate()
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 75, said
    assert "Traceback" not in said
    step, _, _ = newest(run)
    assert step == [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"][-1]


def wait_for_step(run, job):
    """Until the run has made a step, or its job has ended, which it may not."""
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and '"event": "step"' in metrics.read_text()):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.02)
