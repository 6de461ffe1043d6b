"""The process that starts the ranks of one node: what they are told, how they are stopped, and how it ends.

Ranks are toys here; real ones run in test_slurm.py and test_hosts.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megaspec.launcher import exit_file
from megaspec_launchers.environment import rank_from_environment
from megaspec_launchers.node import CAUSE_SECONDS, Node
from tests.launchers.jobs import ROOT

# What takes the place of megaspec.cli, for its words behind `--`.
TOY = """
import json, os, signal, subprocess, sys, time
folder, *codes = sys.argv[1:]
rank = int(os.environ["RANK"])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(f"{folder}/{rank}.tmp", "w") as file:
    json.dump({name: os.environ[name] for name in names} | {"pids": [os.getpid(), child.pid]}, file)
os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.json")
code = codes[rank]
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if code == "deaf":
    time.sleep(60)
if code in ("saves", "waits"):
    while not stop:
        time.sleep(0.01)
    sys.exit(75 if code == "saves" else 74)
sys.exit(int(code))
"""


def start(
    folder: Path,
    *codes: str,
    node: int = 0,
    options: tuple[str, ...] = (),
    cause_seconds: float = 0.3,
    **more: str,
) -> subprocess.Popen[str]:
    """Node `node` of two, with two ranks; codes of all four. `cause_seconds`: for how long it looks for a cause on
    another node, of which most tests have none."""
    (folder / "cli.py").write_text(TOY)
    program = "import sys, subprocess; from megaspec_launchers import node;"
    program += "Popen = subprocess.Popen;"
    # in place of `-m megaspec.cli`: the toy
    program += f"node.CAUSE_SECONDS = {cause_seconds};"
    program += "node.subprocess.Popen = lambda c, **k: Popen([c[0], sys.argv[1], *c[4:]], **k);"
    program += "sys.exit(node.main(sys.argv[2:]))"
    words = ["--nodes=2", "--ranks=2", "--rank-from=NODE_RANK", "--host=10.0.0.1", "--port=1234", "--job=77-0"]
    words += [f"--run-dir={folder}", "--grace=5", *options, "--", str(folder), *codes]
    environment = os.environ | {
        "NODE_RANK": str(node),
        "PYTHONPATH": os.pathsep.join(str(ROOT / source) for source in ("", "kernels", "launchers")),
        **more,
    }
    command = [sys.executable, "-P", "-c", program, str(folder / "cli.py"), *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def places(folder: Path, count: int) -> list[dict]:
    """What `count` ranks were told, once they all run."""
    give_up = time.monotonic() + 60
    while len(found := sorted(folder.glob("[0-9].json"))) < count:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return [json.loads(path.read_text()) for path in found]


def assert_gone(told: list[dict]) -> None:
    give_up = time.monotonic() + 5
    pids = [pid for one in told for pid in one["pids"]]
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < give_up, "a rank, or what it started, outlived its node"
        time.sleep(0.02)


def test_ranks_are_told_their_places(tmp_path):
    process = start(tmp_path, "0", "0", "0", "0", node=1, RANK="1", WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT="3")
    assert process.wait(60) == 0
    told = places(tmp_path, 2)
    assert [one["RANK"] for one in told] == ["2", "3"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in told} == {"4"}
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told} == {("10.0.0.1", "1234")}
    # a controller's own RANK, which counts pods, is no rank's
    place = rank_from_environment(Node(1, 2, 2, "10.0.0.1", 1234, "77-0").environment(1, {"RANK": "9"}))
    assert (place.rank, place.world_size, place.local_rank, place.attempt) == (3, 4, 1, 0)
    assert place.store.prefix == "megaspec/77-0/0"
    assert not place.store.is_open
    assert_gone(told)


def test_the_last_node_of_several_starts_its_ranks(tmp_path):
    """Those of a job that has one node alone are started by a launcher of their own, in the recipe's layout."""
    for kind in ("nodes", "ended", "left-out", "run"):
        (tmp_path / "job" / kind).mkdir(parents=True)
    (tmp_path / "job" / "hosts").write_text("node1\n")
    options = ("--nodes=1", f"--job-dir={tmp_path}/job", f"--run-dir={tmp_path}/job/run")
    process = start(tmp_path, "0", "0", options=options, SLURMD_NODENAME="node1")
    assert process.wait(60) == 0
    told = places(tmp_path, 2)
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [("0", "0", "2"), ("1", "1", "2")]
    assert (tmp_path / "job" / "ended" / "node1").read_text() == "ended"
    assert_gone(told)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        (("75", "75"), 75),
        (("0", "64"), 64),
        (("waits", "76"), 76),
        (("waits", "kill"), 74),
        (("deaf", "65"), 65),
        (("74", "77"), 77),
    ],
)
def test_the_run_has_one_code(tmp_path, codes, code):
    process = start(tmp_path, *codes, options=("--grace=1",))
    told = places(tmp_path, 2)
    assert process.wait(60) == code
    assert_gone(told)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_to_stop_reaches_ranks(tmp_path, number):
    process = start(tmp_path, "saves", "saves")
    told = places(tmp_path, 2)
    process.send_signal(number)
    assert process.wait(60) == 75
    assert_gone(told)


def test_ranks_that_do_not_stop_are_killed(tmp_path):
    process = start(tmp_path, "saves", "deaf", options=("--grace=1",))
    told = places(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 74
    assert "did not end in time and was killed" in process.stderr.read()
    assert_gone(told)


def test_ranks_end_with_their_node(tmp_path):
    """Killed itself, it can say nothing to them: the kernel does, see `end_with`."""
    process = start(tmp_path, "0", "0")
    assert process.wait(60) == 0
    assert "end_with(os.getppid())" in (ROOT / "megaspec/commands/starting.py").read_text()


def test_a_cause_on_another_node_is_told(tmp_path):
    """Ranks here only miss theirs; the run's folder says why."""
    exit_file.begin(tmp_path, step=3)
    process = start(tmp_path, "waits", "74", cause_seconds=CAUSE_SECONDS)
    places(tmp_path, 2)
    exit_file.end(tmp_path, 76, step=3)
    assert process.wait(60) == 76


def test_how_an_earlier_start_ended_is_no_cause(tmp_path):
    exit_file.begin(tmp_path, step=3)
    exit_file.end(tmp_path, 65, step=3)
    process = start(tmp_path, "waits", "74")
    assert process.wait(60) == 74


@pytest.mark.parametrize(("codes", "told"), [(("75", "75"), 203), (("74", "74"), 202), (("64", "64"), 64)])
def test_what_the_training_operator_starts_again(tmp_path, codes, told):
    assert start(tmp_path, *codes, options=("--retryable",)).wait(60) == told


@pytest.mark.parametrize("number", ["2", "-1", "", "x", "²"])
def test_a_node_that_is_none_is_refused(tmp_path, number):
    process = start(tmp_path, "0", "0", NODE_RANK=number)
    assert process.wait(60) == 64
    assert f"NODE_RANK={number} must be the number of this node, from 0 to 1" in process.stderr.read()
