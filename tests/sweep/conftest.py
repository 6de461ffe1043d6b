"""Sweeps of a recipe that is checked in earnest, with runs that are stood in for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspec.cli import main
from megaspec.sweep import child, driver, hydra_jobs
from megaspec.sweep.state import Point, SweepFolder

TINY = (
    "recipe=hello",
    "data=synthetic",
    "~data.blend",
    "train.sample=null",
    "launcher.ranks=1",
    "model.n_layers=1",
    "data.seq_len=8",
    "train.global_batch=2",
    "train.eval_every=0",
    "optim.schedule={warmup_steps: 0, min_lr: 0}",
    "log.tensorboard=false",
    "log.console=quiet",
)
STUB = Path(__file__).with_name("stub.py")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("RANK", raising=False)
    # points of tests are done in hundredths of a second
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(hydra_jobs, "POLL_SECONDS", 0.02)


@pytest.fixture
def stubbed(monkeypatch):
    """Runs are stub.py's."""

    def start(run, log, *, gpus, threads, words):
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-S", str(STUB), str(run)], stderr=file, env=environment, start_new_session=True
            )

    monkeypatch.setattr(child, "start", start)


def sweep(*words: str, name: str = "s", steps: int | None = 2) -> int:
    """`megaspec train -m` with tiny points, in this process; words win over TINY. -> exit code."""
    given = {word.partition("=")[0] for word in words}
    tiny = [word for word in TINY if word.partition("=")[0] not in given]
    return main(["train", "-m", *tiny, f"sweep.name={name}", *([f"train.steps={steps}"] if steps else []), *words])


def points(name: str = "s") -> dict[int, Point]:
    """The points of a sweep as its folder has them."""
    return {p.number: p for p in SweepFolder(Path("sweeps", name)).points()}


def states(name: str = "s") -> list[str]:
    """What became of every point, by number."""
    return [p.state for p in points(name).values()]


def lives(name: str = "s") -> dict[int, list[dict]]:
    """Every life of every point: the step that it began after, and its GPUs."""
    return {
        number: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for number, point in points(name).items()
        for path in [Path("sweeps", name, point.folder, "lives")]
    }
