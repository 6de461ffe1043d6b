"""Requests to stop that come before anything has begun: 75, since nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megaspec.checkpoint.lock import RunLock
from megaspec.launcher.exit_file import read_exit
from megaspec.run_folder import is_run
from tests.faults.runs import go, make_run, recipe
from tests.faults.test_stop import ROOT
from tests.warm import warm_script

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "launchers"))}


def python(*words: str, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-P", *words], env=ENVIRONMENT | more, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )


def wait_for_signal_mask(job: subprocess.Popen, mask: str, number: int) -> None:
    """Until a process catches (SigCgt) or holds back (SigBlk) a signal, which it has to before it imports much."""
    end = time.monotonic() + 20
    while job.poll() is None and time.monotonic() < end:
        status = Path(f"/proc/{job.pid}/status").read_text()
        (found,) = [line for line in status.splitlines() if line.startswith(mask)]
        if int(found.split()[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.001)
    pytest.fail(f"ended with {job.poll()} and had no {mask}")


def ended(job: subprocess.Popen) -> tuple[int, str]:
    try:
        _, said = job.communicate(timeout=30)
    finally:
        job.kill()
        job.wait()
    return job.returncode, said.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("module", "number"), [("megaspec", signal.SIGTERM), ("megaspec.cli", signal.SIGUSR1)])
def test_while_the_command_line_is_imported(tmp_path, module, number):
    job = python("-m", module, "train", "recipe=hello", f"run_dir={tmp_path / 'run'}")
    wait_for_signal_mask(job, "SigCgt", number)
    os.kill(job.pid, number)
    code, said = ended(job)
    assert code == 75, said
    assert f"{signal.Signals(number).name} while no rank runs: nothing is lost" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_while_a_point_of_a_sweep_becomes_its_run(tmp_path):
    job = python("-m", "megaspec.sweep.child", str(os.getpid()), str(tmp_path / "run"))
    wait_for_signal_mask(job, "SigBlk", signal.SIGTERM)
    os.kill(job.pid, signal.SIGTERM)
    code, said = ended(job)
    assert code == 75, said
    assert "SIGTERM while no rank runs" in said


ASKED_THERE = """
import os, signal, sys
from megaspec.launcher.stop import leave_on_request

place, words = sys.argv[1], sys.argv[2:]
leave_on_request(words)
from megaspec import cli, run_folder
from megaspec.commands import starting

module = run_folder if hasattr(run_folder, place) else starting
itself = getattr(module, place)

def asked(*args, **keywords):
    os.kill(os.getpid(), signal.SIGTERM)
    return itself(*args, **keywords)

setattr(module, place, asked)
sys.exit(cli.main(words))
"""


def asked_at(place: str, *words: str) -> tuple[int, str]:
    """A command line that is asked to stop as it comes to a function of commands/starting.py or run_folder.py."""
    done = warm_script(ASKED_THERE, [place, *words], cwd=Path.cwd(), env=ENVIRONMENT)
    return done.returncode, done.stderr


@pytest.mark.parametrize("place", ["write_environment", "print_plan", "launch", "_ended"])
def test_a_start_that_has_begun_says_how_it_ended(tmp_path, place):
    run = make_run(tmp_path / "run", recipe(steps=6))
    # where the function is come to with ranks behind it, they take all steps
    code, said = asked_at(place, "resume", str(run), "parallelism.tp=1", "parallelism.dp_replicate=2")
    assert code == 75, said
    assert "SIGTERM while no rank runs" in said
    ended_so = read_exit(run)
    assert (ended_so.code, ended_so.step) == (75, 6 if place == "_ended" else 0)
    # the lock's holder is gone, so that it is free at once
    with RunLock(run):
        pass


def test_a_fork_that_is_asked_to_stop_can_be_started_again(tmp_path, factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), recipe(steps=6))
    assert go(run, factory) == 0
    for place in ("_read_block", "publish", "predict"):
        code, said = asked_at(place, "resume", "run", "--fork", "child", "train.steps=8")
        assert code == 75, said
        assert sorted({p.name for p in Path("child").iterdir()} - {"recipe.json", "target.json"}) == ["lock"], place
    code, said = asked_at("_show", "resume", "run", "--fork", "child", "train.steps=8")
    assert (code, read_exit(Path("child")).code) == (75, 75), said
    assert is_run(Path("child"))


def test_while_a_rank_of_torchrun_waits_for_the_first(tmp_path):
    """Rank 0 prepares the run; the wait for it hears signals, and SIGUSR2 shows where it is."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = python("-m", "megaspec.cli", "train", "recipe=hello", CUDA_VISIBLE_DEVICES="", **place, **where)
    os.set_blocking(job.stderr.fileno(), False)
    said, end = "", time.monotonic() + 60
    for number in (signal.SIGTERM, signal.SIGUSR2):
        wait_for_signal_mask(job, "SigCgt", number)
    while "in _wait\n" not in said:
        assert job.poll() is None, said
        assert time.monotonic() < end, said
        os.kill(job.pid, signal.SIGUSR2)
        time.sleep(0.2)
        said += (job.stderr.read() or b"").decode()
    os.set_blocking(job.stderr.fileno(), True)
    os.kill(job.pid, signal.SIGTERM)
    assert ended(job)[0] == 75
