"""Ranks of the local launcher and ranks of torchrun: one run, the same numbers."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from megaspec import cli
from megaspec.commands import starting
from megaspec.launcher import exit_file
from megaspec.launcher.heartbeat import EVERY_SECONDS, read_heartbeat
from megaspec.log.jsonl import read_metrics
from megaspec_launchers.local import launch
from tests.faults.test_stop import wait_for_step
from tests.runtime.lives import read_all
from tests.runtime.specs import make_run

ROOT = Path(__file__).parents[2]


TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PATH = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(*words):
    return subprocess.run(
        [*TORCHRUN, "-m", "megaspec.cli", *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_run_that_torchrun_goes_on_with(tmp_path, factory, monkeypatch):
    monkeypatch.setattr(starting, "launch", partial(launch, factory=factory))
    monkeypatch.delenv("RANK", raising=False)
    changes = {"parallelism.tp": 2, "model.dropout": 0.1, "precision.kind": "bf16", "train.steps": 8}
    run = make_run(tmp_path / "run", {**changes, "optim.schedule.decay_steps": 16})
    assert cli.main(["resume", str(run)]) == 0
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert cli.main(["resume", str(run), "train.steps=16"]) == 0
    done = torchrun("resume", str(other), "train.steps=16")
    assert done.returncode == 0, done.stderr
    assert read_all(other).keys() == read_all(run).keys() == {8, 16}
    assert read_all(other)[16] == read_all(run)[16]
    losses = [
        [line["loss"] for line in read_metrics(r / "metrics.jsonl") if line["event"] == "step"] for r in (run, other)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 16


# that ranks of torchrun train is held in tests/test_cli.py
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGUSR1, -10)])
def test_the_exit_code_that_torchrun_hides_stands_in_the_run_folder(tmp_path, number, code):
    """Also when torchrun dies of the signal, as it does of one that it doesn't know: its ranks outlive it and save."""
    run = make_run(tmp_path / "run", {"parallelism.tp": 2, "train.steps": 5000})
    exit_file.end(run, 65, step=0)
    job = subprocess.Popen(
        [*TORCHRUN, "-m", "megaspec.cli", "resume", str(run)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(run, job)
        assert exit_file.read_exit(run).code is None  # the end of an older start can't be read
        os.kill(job.pid, number)
        _, said = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == code, said
    told = exit_file.read_exit(run)
    assert (told.code, told.meaning) == (75, "stopped, what was trained is saved: start again")
    (saved,) = read_all(run)
    assert told.step == saved > 0


@pytest.mark.slow
def test_a_rank_that_was_stopped_is_told_by_the_others(tmp_path):
    """No launcher of ours watches: the ranks answer each other, and look at /proc for the one that does not."""
    run = make_run(
        tmp_path / "run",
        {"parallelism.tp": 2, "train.steps": 50_000, "launcher.timeout_seconds": 5.0, "checkpoint.every": 0},
    )
    job = subprocess.Popen(
        [*TORCHRUN, "-m", "megaspec.cli", "resume", str(run)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(run, job)
        # the first step may come before the next heartbeat
        deadline = time.monotonic() + 3 * EVERY_SECONDS
        while (beat := read_heartbeat(run)).state == "starting":
            assert time.monotonic() < deadline, "no heartbeat came after the first"
            time.sleep(0.1)
        assert (beat.by, beat.state) == ("rank 0", "training")
        ranks = {}
        for process in psutil.Process(job.pid).children():
            rank = process.environ().get("RANK")
            if rank is not None:
                ranks[int(rank)] = process
        began = time.monotonic()
        ranks[1].suspend()
        while exit_file.read_exit(run).code is None:
            assert time.monotonic() - began < 5 + 5 + 2, "nobody noticed"
            time.sleep(0.1)
        _, said = job.communicate(timeout=90)
    finally:
        job.kill()
        job.wait()
    assert exit_file.read_exit(run).code == 74
    assert re.search(r"rank 0: step \d+, .*in all_reduce number \d+ of all ranks", said), said
    assert "rank 1: stopped (SIGSTOP, or a debugger), in the kernel's do_signal_stop (on " in said
    assert "stack of rank 0:" in said
    assert read_heartbeat(run).state == "failed"
