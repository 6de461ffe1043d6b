"""Ranks of the local launcher and ranks of torchrun: one run, the same numbers."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megaspec import cli
from megaspec.log.jsonl import read_metrics
from megaspec_launchers.local import launch
from tests.runtime.lives import read_all
from tests.runtime.specs import make_run

ROOT = Path(__file__).parents[2]


def torchrun(*words):
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, "-m", "megaspec.cli", *words], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_run_that_torchrun_goes_on_with(tmp_path, factory, monkeypatch):
    monkeypatch.setattr(cli, "launch", partial(launch, factory=factory))
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
