"""Sweeps that train: killed in the middle in every way, each point's steps are taken once."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import psutil
import pytest

from megaspec.cli import main
from tests.sweep.conftest import TINY, points, states

ROOT = Path(__file__).parents[2]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "megaspec", "train", "-m", *TINY, "sweep.name=s", "sweep.slots=2", *words]


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    return dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def steps_of(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    # a line that is just being written counts next time
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.startswith('{"event": "step"')]


def starts_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line.startswith('{"event": "start"')]


def life(number: signal.Signals, at: int, *words: str, points: int = 1) -> int:
    """One life of the sweep, ended by a signal once its points did `at` steps in all, so many of them at least one. ->
    exit code."""
    process = subprocess.Popen(command(*words), env=environment(), stdout=subprocess.DEVNULL)
    done: list[int] = []
    still: dict[Path, list[psutil.Process]] = {}
    while process.poll() is None and (sum(done) < at or sum(map(bool, done)) < points):
        time.sleep(0.02)
        folders = list(Path("sweeps/s").glob("*"))
        done = [len(steps_of(f)) for f in folders]
        if points > 1:
            # nobody is done before the others have begun
            for folder, steps in zip(folders, done, strict=True):
                if steps >= at // points and folder not in still:
                    still[folder] = ranks_of(folder)
                    for rank in still[folder]:
                        rank.suspend()
    process.send_signal(number)
    code = process.wait()
    for rank in chain.from_iterable(still.values()):
        rank.resume()
    return code


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Of a point that runs: children of a process that its launcher has started."""
    for launcher in psutil.process_iter():
        if is_run_here(launcher) and folder.name in " ".join(launcher.cmdline()):
            return [child for child in launcher.children(recursive=True) if child.ppid() != launcher.pid]
    return []


def runs_left() -> list[int]:
    return [p.pid for p in psutil.process_iter() if is_run_here(p)]


def is_run_here(process: psutil.Process) -> bool:
    try:
        return process.cwd() == os.getcwd() and "resume" in process.cmdline()
    except psutil.Error:
        return False


def finish(*words: str) -> None:
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_each_ran_once(count: int, steps: int) -> None:
    assert states() == ["done"] * count
    for point in points().values():
        folder = Path("sweeps/s", point.folder)
        assert steps_of(folder) == list(range(1, steps + 1)), point.folder
        starts = starts_of(folder)
        assert starts[0] == 0, point.folder
        assert starts == sorted(set(starts)), point.folder  # no life began where another one had
    assert runs_left() == []


def test_a_killed_sweep_goes_on(capsys):
    words = ("optim.lr=1e-3,3e-3", "train.steps=150", "checkpoint.every=20")
    assert life(signal.SIGKILL, 20, *words, points=2) == -signal.SIGKILL
    while runs_left():
        time.sleep(0.05)
    assert states() == ["running", "running"]  # nobody was left to write what became of them
    assert main(["sweep", "show", "sweeps/s"]) == 0
    out = capsys.readouterr().out
    assert out.count("interrupted") == 2
    assert "goes on with: megaspec sweep resume sweeps/s" in out
    finish(*words)
    assert_each_ran_once(2, 150)
    assert len(starts_of(Path("sweeps/s", points()[1].folder))) == 2


def test_points_copy_to_places_of_their_own(warm_launches):
    there = Path("copies").resolve()
    words = (*TINY, "sweep.name=s", "optim.lr=1e-3,3e-3", "train.steps=2", f"checkpoint.copy_to=file://{there}/")
    assert main(["train", "-m", *words]) == 0
    assert sorted(path.name for path in there.iterdir()) == ["s-01", "s-02"]
    for point in points().values():
        copies = there / point.recipe["name"]
        saved = json.loads((copies / "spec.json").read_text())
        assert saved["run_dir"] == f"sweeps/s/{point.folder}"
        assert saved["checkpoint"]["copy_to"] == f"file://{copies}"
        assert (copies / "checkpoints" / "step-00000002" / "manifest.json").exists()
    # the same command again goes on with them
    assert main(["train", "-m", *words]) == 0


@pytest.mark.slow
def test_twelve_points_are_killed_and_stopped():
    words = ("optim.lr=1e-4,3e-4,1e-3,3e-3", "data.seed=1,2,3", "train.steps=300", "checkpoint.every=50")
    assert life(signal.SIGKILL, 1000, *words) == -signal.SIGKILL
    assert life(signal.SIGTERM, 2000, *words) == 75
    assert runs_left() == []
    finish(*words)
    assert_each_ran_once(12, 300)
    lives = [len(starts_of(Path("sweeps/s", p.folder))) for p in points().values()]
    assert 12 < sum(lives) <= 16  # only the two points of each interrupted pair lived again
