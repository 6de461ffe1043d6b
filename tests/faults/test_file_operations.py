"""A file operation of a run fails once: the run goes on, or ends with 73; never with another code, or a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.supervised import ENVIRONMENT

FOLDER = Path(__file__).parent / "file_operations"
# Each ended a run with 70, 78, 66, or a traceback, put good checkpoints aside, or took its history away.
ONCE_BAD = {
    "list/EIO/lock @ .*check < .*publish.py:write$|lock @ .*check < .*publish.py:write ": 73,
    "list/EIO/lock @ .*check < .*prune": 0,
    "stat/EIO/manifest.json @ .*read_limited_fd": 0,
    "open to write/EIO/metrics.jsonl @ .*jsonl.py:_open": 0,
}
# So did these, in the slow set.
ONCE_BAD_TOO = {
    "list/EIO/lock @ .*check < .*_has_let_go": 0,
    "fsync/ENOSPC/lock @ .*_claim": 73,
    "stat/EIO/logs/rank-N.log @ .*_log_sizes": 0,
    "write/EIO/tensorboard": 0,
}
# Behind the verification, as ranks load.
LOADING = "read/EIO/safetensors @ .*read_chunk < .*reader.py:"
# By the mode (file_operations/runs.py), a few of its operations that fail in the fast set.
SAMPLES = {
    "train": ONCE_BAD,
    "resume": {LOADING: 73, "read/EUCLEAN/safetensors @ .*read_chunk < .*check$": 0},
    "copy_to": {"write/ENOSPC/<copies>/checkpoints": 0, "read/EIO/<run>/spec.json .*remote": 0},
}
MORE = {
    "train": ONCE_BAD_TOO,
    "resume": {"read/EIO/safetensors @ .*read_chunk < .*check$": 0, "read/ESTALE/manifest.json": 73},
    # its attempts start torch anew
    "supervise": {"read/EIO/lock/N.json @ .*_record_of < .*check$": 0},
}
KINDS = (
    "fsync", "list", "lock", "mkdir", "open to read", "open to write", "read", "rename", "stat", "unlink", "write",
)  # fmt: skip
# What the file system itself found wrong with a checkpoint's bytes: damage, which is put aside.
DAMAGE = ("EUCLEAN",)
# What a supervised run does beside what one without a supervisor does; each takes some seconds.
OF_SUPERVISORS = "supervis|attempt|lock|exit_file|launchers/|starting"
STEPS = [1, 2, 3, 4, 5, 6]


def ended(folder, modes):
    """How runs ended in which those operations failed. `modes`: mode -> patterns."""
    path = os.pathsep.join([str(FOLDER), ENVIRONMENT["PYTHONPATH"]])
    said = {mode: list(patterns) for mode, patterns in modes.items()}
    command = [sys.executable, "-P", str(FOLDER / "runs.py"), str(folder), json.dumps(said)]
    done = subprocess.run(
        command,
        env=ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_ends_well(one, mode, *, code=73):
    """The run goes on to its end, or ends with `code`, and then another start does. Nothing that is good is put aside
    or gone, no step is told twice, and what it says is for a reader."""
    assert one["failed"], one
    assert "Traceback" not in one["said"], one["said"]
    assert one["code"] in {code, 0}, one
    is_damage = one["pattern"].split("/")[1] in DAMAGE
    assert bool(one["aside"]) == is_damage, one
    if mode in ("resume", "copy_to") and not is_damage:
        # what there was is there, but for what a newer one took the place of
        assert 4 in one["kept"], one
    if "again" in one:
        assert one["again"]["code"] == 0, one["again"]["said"]
        assert one["steps"] in (STEPS, STEPS[:4]), one
    if one["code"] == 0:
        assert one["steps"] == STEPS, one
        assert 6 in one["last"], one
    if one["code"] == 0 and mode == "copy_to":
        assert 6 in one["copied"], one


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """How the runs of all modes ended; their ranks are forked from one process."""
    return ended(tmp_path_factory.mktemp("samples"), SAMPLES)


@pytest.mark.parametrize("mode", SAMPLES)
def test_an_operation_that_fails_once_is_survived_or_ends_with_73(samples, mode):
    check_sample(samples, mode, SAMPLES[mode])


@pytest.mark.slow
def test_more_operations_that_fail_once(tmp_path):
    found = ended(tmp_path, MORE)
    for mode, sample in MORE.items():
        check_sample(found, mode, sample)


def check_sample(samples, mode, sample):
    """`sample`: the code that each of the mode's operations ends with."""
    found = [one for one in samples if one["mode"] == mode]
    assert {one["pattern"] for one in found} == set(sample)
    for one in found:
        assert_ends_well(one, mode, code=sample[one["pattern"]])
        if one["pattern"] == LOADING:
            # what one rank can't read ends all with the same words: none waits for another's weights
            assert one["code"] == 73
            assert len(one["ranks"]) == 2
            assert all("cannot be read now" in log for log in one["ranks"]), one["ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "resume", "copy_to", "supervise"])
def test_no_operation_that_fails_once_ends_otherwise(tmp_path, mode):
    places = OF_SUPERVISORS if mode == "supervise" else "."
    for one in ended(tmp_path, {mode: [f"{kind}/EIO/{places}" for kind in KINDS]}):
        assert_ends_well(one, mode)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ESTALE", "ETIMEDOUT"])
def test_a_file_server_that_is_away_for_a_moment_costs_no_checkpoint(tmp_path, code):
    patterns = [f"{kind}/{code}/checkpoints" for kind in ("open to read", "read", "stat")]
    for one in ended(tmp_path, {"resume": patterns}):
        assert_ends_well(one, "resume")
