"""Points through Hydra's own launchers, and our slots as a launcher of Hydra."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megaspec.sweep import hydra_jobs
from megaspec.sweep.state import SweepFolder
from tests.sweep.conftest import lives, points, states, sweep

ROOT = Path(__file__).parents[2]
APP = """
import json, os, sys
import hydra

@hydra.main(version_base="1.3", config_path=None, config_name=None)
def app(config):
    from hydra.core.hydra_config import HydraConfig
    job = HydraConfig.get()
    with open(os.path.join(job.runtime.output_dir, "ran"), "w") as file:
        json.dump([config.x, os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid(), os.getsid(0), job.job.num], file)
    if config.x == 2:
        raise ValueError("two")
    if config.x == 3:
        os._exit(9)
    return config.x * 10

app()
"""


def run_app(folder: Path, *words: str) -> subprocess.CompletedProcess:
    (folder / "app.py").write_text(APP)
    path = os.pathsep.join(str(ROOT / p) for p in ("", "kernels", "launchers"))
    environment = dict(os.environ) | {"PYTHONPATH": path}
    command = [sys.executable, "app.py", "-m", "hydra.sweep.dir=out", "hydra.sweep.subdir=${hydra.job.num}", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_an_application_of_ones_own_runs_on_our_slots(tmp_path):
    done = run_app(tmp_path, "hydra/launcher=megaspec", "hydra.launcher.slots=2", "+x=1,2,3,4")
    ran = [json.loads(tmp_path.joinpath("out", str(n), "ran").read_text()) for n in range(4)]
    assert [(x, number) for x, _, _, _, number in ran] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert len({pid for _, _, pid, _, _ in ran}) == 4
    assert all(pid == session for _, _, pid, session, _ in ran)
    assert done.returncode != 0  # two jobs failed, and stopped no other
    assert "ValueError: two" in done.stderr


def test_its_settings_are_checked(tmp_path):
    done = run_app(tmp_path, "hydra/launcher=megaspec", "hydra.launcher.gpus_per_job=0", "+x=1")
    assert "gpus_per_job=0 must be at least 1" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run_app(tmp_path, "hydra/launcher=megaspec", "+x=1,4")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("stubbed")
def test_the_basic_launcher_runs_points(capsys):
    assert sweep("data.seed=1,2", "about.purpose=ok,fail", "hydra/launcher=basic") == 76
    assert states() == ["done", "failed", "done", "failed"]
    assert "failed (76)" in capsys.readouterr().out
    assert sweep("data.seed=1,2", "about.purpose=ok,fail", "hydra/launcher=basic") == 76
    assert [len(one) for one in lives().values()] == [1, 1, 1, 1]
    assert Path("sweeps/s/index.html").is_file()


@pytest.mark.usefixtures("stubbed")
def test_a_stopped_sweep_of_the_basic_launcher_goes_on():
    def stop():
        while not any(b'"step"' in f.read_bytes() for f in Path("sweeps/s").glob("*/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    words = ("data.seed=1,2", "about.purpose=held", "hydra/launcher=basic")
    assert sweep(*words, steps=40) == 75
    thread.join()
    assert states() == ["interrupted", "waiting"]
    assert SweepFolder(Path("sweeps/s")).head().state == "interrupted"
    Path("go").touch()
    assert sweep(*words, steps=40) == 0
    assert [len(one) for one in lives().values()] == [2, 1]


def test_a_launcher_that_refuses_its_settings_is_told(capsys):
    assert sweep("data.seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jbs=2") == 64
    err = capsys.readouterr().err
    assert "hydra/launcher=joblib" in err
    assert "n_jbs" in err
    assert states() == ["waiting", "waiting"]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """An empty folder as PATH: programs are what a test writes there."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_is_asked_for_where_it_is_not(programs, capsys):
    write_program(programs / "srun", "exit 0")
    assert sweep("data.seed=1,2", "hydra/launcher=submitit_slurm") == 64
    err = capsys.readouterr().err
    assert "hydra/launcher=submitit_slurm needs SLURM, and sbatch can't be found" in err
    assert "hydra/launcher=submitit_local or megaspec" in err
    assert not Path("sweeps").exists()


def test_a_job_that_sbatch_refuses_is_told(programs, capsys):
    write_program(programs / "srun", "exit 0")
    write_program(programs / "sbatch", "echo 'sbatch: error: invalid partition specified: gpus' >&2; exit 1")
    assert sweep("data.seed=1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpus") == 64
    err = capsys.readouterr().err
    assert "hydra/launcher=submitit_slurm: sbatch: error: invalid partition specified: gpus" in err
    assert states() == ["waiting", "waiting"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_a_launcher_that_is_not_installed_is_named(launcher, monkeypatch, capsys):
    monkeypatch.setattr(hydra_jobs, "find_spec", lambda _: None)
    assert sweep("data.seed=1,2", f"hydra/launcher={launcher}") == 64
    err = capsys.readouterr().err
    package = f"hydra-{launcher.partition('_')[0]}-launcher"
    assert f"hydra/launcher={launcher} needs {package}: pip install 'megaspec[sweep]'" in err
    assert not Path("sweeps").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("hydra/launcher=basic",),
        ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_hydras_launchers_train_points(words):
    assert sweep("optim.lr=1e-3,1e-2,1e30", *words, steps=3) == 76
    assert states() == ["done", "done", "failed"]
    for point in list(points().values())[:2]:
        lines = [json.loads(t) for t in Path("sweeps/s", point.folder, "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3]
