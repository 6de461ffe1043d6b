"""Two jobs on one run folder, and a disk without room."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from megaspec.cli import main
from tests.checkpoint.checkpoint_cases import counters_read
from tests.faults.entry import NEW_HOLDER
from tests.faults.runs import STEPS, assert_same, go, make_run, newest, recipe
from tests.faults.test_stop import ROOT, wait_for_step


def test_a_second_job_is_refused_at_once_and_told_who_has_the_folder(tmp_path, capsys):
    run = make_run(tmp_path / "run", recipe(steps=5000))
    path = os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "launchers"))
    first = subprocess.Popen(
        [sys.executable, "-P", "-m", "megaspec.cli", "resume", str(run)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(run, first)
        before = (run / "spec.json").read_bytes()
        with counters_read() as counters:
            assert main(["resume", str(run), "train.steps=6000"]) == 78
        # at once: nobody waits for the lock
        assert not counters
        assert str(first.pid) in capsys.readouterr().err
        assert (run / "spec.json").read_bytes() == before
        first.terminate()
        first.communicate()
        assert first.returncode == 75
    finally:
        first.kill()
        first.wait()


def test_a_job_that_lost_its_run_writes_nothing_more(tmp_path, factory, capfd):
    """It stood still while another one took over: neither a line nor a checkpoint comes from it afterwards."""
    run = make_run(tmp_path / "run", recipe(save_every=20))
    assert go(run, factory, fault={"rank": 0, "kind": "lose", "point": "step", "count": 4}) == 78
    assert "took it over" in capfd.readouterr().err
    assert (run / "metrics.jsonl").read_text().endswith(NEW_HOLDER)
    assert not (run / "checkpoints").exists()
    assert json.loads((run / "exit_code.json").read_text())["code"] is None


def test_a_run_folder_that_is_renamed_under_way(tmp_path, factory, capfd):
    run = make_run(tmp_path / "run", recipe())
    assert go(run, factory, fault={"rank": 0, "kind": "move", "point": "step", "count": 5}) == 73
    said = capfd.readouterr().err
    assert f"run_dir={run} was moved or removed while the run was under way" in said
    assert "took it over" not in said
    assert "Traceback" not in said
    assert not run.exists()
    assert newest(tmp_path / "elsewhere")[0] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_in_a_save(tmp_path, factory, undisturbed, capfd, rank):
    run = make_run(tmp_path / "run", recipe())
    fault = {"rank": rank, "kind": "full", "point": "before_chunk_write", "count": 3}
    assert go(run, factory, fault=fault) == 73
    said = capfd.readouterr().err
    assert "No space left on device" in said
    assert str(run / "checkpoints") in said
    assert "need" in said
    assert newest(run)[0] >= 3
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


def test_checkpoints_of_another_run_are_passed_over(tmp_path, factory, undisturbed, capfd):
    """Copied over by mistake they verified as good, and the run went on from foreign weights at another sample."""
    run = make_run(tmp_path / "run", recipe())
    other = make_run(tmp_path / "other", recipe(seed=7))
    fault = {"rank": 1, "kind": "point", "point": "step", "count": 8}
    assert go(run, factory, fault=fault) == 74
    assert go(other, factory) == 0
    own = newest(run)
    foreign = other / "checkpoints" / f"step-{STEPS:08d}"
    shutil.copytree(foreign, run / "checkpoints" / foreign.name)
    capfd.readouterr()
    assert go(run, factory) == 0
    said = capfd.readouterr().err
    assert f"it is a checkpoint of another run, {other}: data.seed=7 (this run: 1234)" in said
    assert f"step {own[0]} is the newest good one" in said
    assert_same(run, undisturbed[2])
    # Where there is no own one, the run does not start anew, and nothing moves.
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(foreign, run / "checkpoints" / foreign.name)
    assert go(run, factory) == 66
    assert "Traceback" not in capfd.readouterr().err
    assert [path.name for path in (run / "checkpoints").iterdir()] == [foreign.name]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB; the test is skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def leave_room(filler, size):
    """Takes all the space of a file system but `size` bytes: enough for locks and logs, too little for a checkpoint."""
    free = os.statvfs(filler.parent)
    filler.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - size))


def test_a_disk_that_fills_up(small_disk, factory, undisturbed, capfd):
    run = make_run(small_disk / "run", recipe())
    filler = small_disk / "filler"
    assert go(run, factory, fault={"rank": 1, "kind": "point", "point": "step", "count": 5}) == 74
    good, tensors, _ = newest(run)
    leave_room(filler, 24_000)
    assert go(run, factory) == 73
    said = capfd.readouterr().err
    assert str(run / "checkpoints") in said
    assert re.search(r"need [0-9,]{6,} bytes, [0-9,]+ bytes are free", said), said
    assert newest(run)[:2] == (good, tensors)
    filler.unlink()
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])
