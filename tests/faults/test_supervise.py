"""`--supervise`: a run that goes on through kills of ranks and launcher, lost, returned and suspected devices."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from megaspec.launcher.attempts import read_attempts
from megaspec.launcher.exit_file import read_exit
from megaspec.launcher.rendezvous import TcpRendezvous
from megaspec.launcher.run_secret import RunSecret
from megaspec.launcher.suspects import read_avoided
from megaspec.log.jsonl import read_metrics
from megaspec.recipe import Recipe
from megaspec.run_folder import newest_step
from megaspec.runtime.join import _first_answer
from megaspec.runtime.rank import RankInfo
from tests.faults.runs import go, make_run, newest, recipe
from tests.faults.supervised import ENVIRONMENT, family, is_gone, plan_faults, supervised, wait_until

FAST = {"first_wait_seconds": 0.05, "longest_wait_seconds": 0.2, "look_seconds": 0.2}


def a_recipe(*, ranks=2, layouts=(), batch=4, steps=24, **launcher):
    """Data-parallel ranks in fp64; a layout of each smaller number where `layouts` names them."""
    fields = json.loads(recipe(tp=1, steps=steps).model_dump_json())
    fields["precision"] = {"kind": "fp64"}
    fields["parallelism"] = {"tp": 1, "dp_replicate": ranks}
    fields["train"]["global_batch"] = batch
    fields["train"]["micro_batch"] = 1
    fields["launcher"] |= {"ranks": ranks, "layouts": words_of(layouts), "restarts": FAST} | launcher
    return Recipe.model_validate_json(json.dumps(fields))


def words_of(layouts):
    return [[f"parallelism.dp_replicate={ranks}", f"launcher.ranks={ranks}"] for ranks in layouts]


def taken(run):
    """The samples of each step, in their order."""
    return [(line["first_sample"], line["samples"]) for line in steps_of(run)]


def steps_of(run):
    return [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"]


def weights_of(run):
    """Step and weights of the newest checkpoint, as numbers."""
    step, tensors, _ = newest(run)
    weights = {}
    for name, data in tensors.items():
        if name.startswith("model/"):
            weights[name] = np.frombuffer(data, dtype=np.float64)
    return step, weights


def assert_same_course(run, undisturbed, *, within):
    """Losses, gradient norms and the last weights lie within so much of the undisturbed run's; no sample is lost or
    taken twice."""
    assert taken(run) == taken(undisturbed)
    assert [line["step"] for line in steps_of(run)] == [line["step"] for line in steps_of(undisturbed)]
    for name in ("loss", "grad_norm"):
        mine = np.array([line[name] for line in steps_of(run)])
        theirs = np.array([line[name] for line in steps_of(undisturbed)])
        assert np.abs(mine / theirs - 1).max() <= within, name
    step, weights = weights_of(run)
    last, expected = weights_of(undisturbed)
    assert step == last
    assert weights.keys() == expected.keys() != set()
    for name, theirs in expected.items():
        assert np.abs(weights[name] - theirs).max() <= within * max(1.0, np.abs(theirs).max()), name


def undisturbed_run(tmp_path, factory, recipe, ranks):
    run = make_run(tmp_path / "undisturbed" / "run", recipe)
    assert go(run, factory, ranks=ranks) == 0
    return run


def test_a_run_goes_on_through_kills_and_on_the_devices_that_are_left(tmp_path, factory):
    asked = a_recipe(layouts=(1,))
    run = make_run(tmp_path / "run", asked)
    (run / "devices").write_text("0, 1 2\n")
    plan_faults(
        run,
        {
            0: {"rank": 1, "kind": "kill", "count": 5},
            1: {"rank": 0, "kind": "launcher", "count": 4},
            # device 1 is rank 1's: the spare takes its place
            2: {"rank": 0, "kind": "suspect", "count": 4, "suspects": [1]},
            3: {"rank": 1, "kind": "devices", "count": 4, "devices": "2", "dies": True},
            4: {"rank": 0, "kind": "devices", "count": 4, "devices": "2,0"},
        },
    )
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 0, said
    attempts = read_attempts(run).attempts
    assert [attempt.end.world_size for attempt in attempts] == [2, 2, 2, 2, 1, 2], said
    assert [attempt.end.code for attempt in attempts] == [74, 74, 77, 74, 75, 0]
    assert [attempt.start.devices for attempt in attempts] == [
        ("0", "1", "2"),
        ("0", "1", "2"),
        ("0", "1", "2"),
        ("0", "2"),
        ("2",),
        ("2", "0"),
    ]
    assert "rank 1 was killed by SIGKILL" in attempts[0].end.reason
    assert attempts[1].end.reason == "the launcher was killed by SIGKILL"
    assert attempts[2].start.why == f"attempt 1 ended: {attempts[1].end.reason}"
    assert attempts[4].end.reason == "devices came back: 2 ranks in place of 1"
    assert attempts[4].end.layout == "parallelism.dp_replicate=1 launcher.ranks=1"
    assert [(one.device, one.attempt) for one in read_avoided(run).entries] == [("1", 2)]
    begun = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == "start"][-1]
    assert begun["attempt"] == 5
    assert begun["why"] == f"attempt 4 ended: {attempts[4].end.reason}"
    # the run keeps the recipe that it began with
    assert json.loads((run / "recipe.json").read_text())["launcher"]["ranks"] == 2
    assert_same_course(run, undisturbed_run(tmp_path, factory, asked, 2), within=1e-12)


def test_a_crash_loop_ends_after_a_few_attempts(tmp_path):
    run = make_run(tmp_path / "run", a_recipe())
    plan_faults(run, {attempt: {"rank": 1, "kind": "kill", "count": 2} for attempt in range(9)})
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 70, said
    assert [attempt.end.code for attempt in read_attempts(run).attempts] == [74, 74, 74]
    assert "given up with exit code 70: 3 attempts in a row saved no new step" in said
    last = read_exit(run)
    assert (last.code, last.step) == (70, 0)
    assert "the supervisor starts it no more" in last.meaning


def test_nothing_outlives_a_killed_supervisor_and_a_request_to_stop_is_saved(tmp_path):
    run = make_run(tmp_path / "run", a_recipe(steps=2000))
    plan_faults(run, {})
    with supervised(run) as supervisor:
        wait_until(lambda: newest_step(run) >= 3)
        below = family(supervisor.pid)
        assert len(below) == 4  # the launcher, the process that forks ranks, two ranks
        with supervised(run) as second:
            second.communicate(timeout=30)
        assert second.returncode == 78
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in below), seconds=5)
    saved = newest_step(run)
    with supervised(run) as supervisor:
        wait_until(lambda: newest_step(run) > saved)
        below = family(supervisor.pid)
        os.kill(supervisor.pid, signal.SIGTERM)
        _, said = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 75, said
    assert all(is_gone(pid) for pid in below)
    attempts = read_attempts(run).attempts
    assert [attempt.end is None for attempt in attempts] == [True, False]
    assert attempts[1].start.why == "the supervisor before this one ended without a word"
    assert attempts[1].end.saved == attempts[1].end.step == newest_step(run) == read_exit(run).step


def stop_each(run, supervisor, kinds):
    """Sends SIGSTOP to the launcher, to the process that forks ranks, or to all four, each time that the run has got
    on. -> all that were there."""
    seen = []
    for kind in kinds:
        saved = newest_step(run)
        # a start takes many seconds where others work on the same cores
        wait_until(lambda saved=saved: newest_step(run) > saved, seconds=150)
        below = family(supervisor.pid)
        assert len(below) == 4
        launcher, server, *_ = below
        for pid in {"launcher": [launcher], "server": [server], "all": below}[kind]:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda below=below: all(is_gone(pid) for pid in below))
        seen += below
    return seen


@pytest.mark.parametrize("kinds", [("server",), pytest.param(("launcher", "all"), marks=pytest.mark.slow)], ids=str)
def test_processes_that_are_stopped_are_replaced(kinds, tmp_path, factory):
    """Each SIGSTOP ends its attempt with 74, nothing of it is left, and the run comes to the same numbers."""
    asked = a_recipe(steps=30)
    run = make_run(tmp_path / "run", asked)
    every = {"pause": 0.1, "flips": str(tmp_path)}
    plan_faults(run, {"every": every, "supervisor": {"look_seconds": 0.1}})
    with supervised(run) as supervisor:
        seen = stop_each(run, supervisor, kinds)
        _, said = supervisor.communicate(timeout=150)
    assert supervisor.returncode == 0, said
    ends = [attempt.end for attempt in read_attempts(run).attempts]
    assert [end.code for end in ends] == [*[74] * len(kinds), 0], said
    for end in ends[:-1]:
        assert end.reason == "the launcher, or the process that it forks ranks from, was stopped (SIGSTOP)"
    assert all(is_gone(pid) for pid in seen)
    assert_same_course(run, undisturbed_run(tmp_path, factory, asked, 2), within=1e-12)


@pytest.mark.slow
def test_a_launcher_whose_heartbeat_is_missed_is_replaced(tmp_path, factory):
    """Of one that does nothing any more the kernel may say that it runs: here it is not asked."""
    asked = a_recipe(steps=30, timeout_seconds=2.0)
    run = make_run(tmp_path / "run", asked)
    every = {"pause": 0.1, "flips": str(tmp_path)}
    plan_faults(run, {"every": every, "supervisor": {"look_seconds": 0.1, "sees_no_stops": True}})
    with supervised(run) as supervisor:
        seen = stop_each(run, supervisor, ["all"])
        _, said = supervisor.communicate(timeout=150)
    assert supervisor.returncode == 0, said
    ends = [attempt.end for attempt in read_attempts(run).attempts]
    assert [end.code for end in ends] == [74, 0], said
    assert ends[0].reason == "the launcher was silent: it wrote no heartbeat, and looked after no rank"
    assert all(is_gone(pid) for pid in seen)
    assert_same_course(run, undisturbed_run(tmp_path, factory, asked, 2), within=1e-12)


@pytest.mark.slow
def test_four_three_two_and_four_ranks_again(tmp_path, factory, tell):
    asked = a_recipe(ranks=4, layouts=(3, 2), batch=12, steps=60)
    run = make_run(tmp_path / "run", asked)
    (run / "devices").write_text("0,1,2,3")
    plan_faults(
        run,
        {
            0: {"rank": 3, "kind": "devices", "count": 11, "devices": "0,1,2", "dies": True},
            1: {"rank": 1, "kind": "devices", "count": 11, "devices": "0,2", "dies": True},
            2: {"rank": 0, "kind": "devices", "count": 11, "devices": "0,2,1,3"},
            3: {"rank": 2, "kind": "kill", "count": 7},
        },
    )
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=240)
    assert supervisor.returncode == 0, said
    attempts = read_attempts(run).attempts
    assert [attempt.end.world_size for attempt in attempts] == [4, 3, 2, 4, 4], said
    assert [attempt.end.code for attempt in attempts] == [74, 74, 75, 74, 0]
    assert_same_course(run, undisturbed_run(tmp_path, factory, asked, 4), within=1e-12)
    last = steps_of(run)[-1]
    tell(f"4 → 3 → 2 → 4 ranks: {len(steps_of(run))} steps, samples 0 to {last['samples']} once each, within 1e-12")


@pytest.mark.slow
def test_a_host_that_fails_twice_is_kept_away_from(tmp_path):
    """Nothing names devices here, so that what is suspected is the host."""
    run = make_run(tmp_path / "run", a_recipe())
    plan_faults(run, {n: {"rank": 0, "kind": "suspect", "count": 5, "suspects": [1]} for n in range(9)})
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 77, said
    assert [attempt.end.code for attempt in read_attempts(run).attempts] == [77, 77]
    ((host, why),) = read_avoided(run).hosts.items()
    assert host == socket.gethostname()
    assert "planted: computes wrongly" in why
    assert read_exit(run).code == 77
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 77
    assert f"host {host} failed this run 2 times" in said


def test_a_damaged_line_of_what_is_avoided_is_told_before_anything_starts(tmp_path):
    run = make_run(tmp_path / "run", a_recipe())
    (run / "devices").write_text("0,1,2")
    plan_faults(run, {})
    (run / "avoided.jsonl").write_text('{"host": "node1", "device": "1" "attempt": 0, "why": "weights differ"}\n')
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 64, said
    assert f"{run / 'avoided.jsonl'}:1: is no JSON" in said
    assert read_attempts(run).attempts == ()


@pytest.mark.slow
def test_a_run_ends_where_no_layout_fits_what_is_left(tmp_path):
    run = make_run(tmp_path / "run", a_recipe())
    (run / "devices").write_text("4,7")
    plan_faults(run, {0: {"rank": 0, "kind": "suspect", "count": 5, "suspects": [1]}})
    with supervised(run) as supervisor:
        _, said = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 77, said
    assert [attempt.end.code for attempt in read_attempts(run).attempts] == [77, 77]
    assert "as the recipe says needs 2 ranks, there is room for 1" in said
    assert "device 7 (rank 1) is not used again: planted: computes wrongly" in said
    assert newest_step(run) == read_exit(run).step == 3


@pytest.mark.parametrize("worlds", [(2, 2, 1, 1, 2)])
def test_a_world_of_another_size_is_prepared_anew(worlds, tmp_path):
    """Of hosts under torchrun some may be gone in the next attempt, and there again in the one after it. What is said
    of the run holds its spec.json, which a world of another size has anew."""
    shared = torch.distributed.HashStore()
    secret = RunSecret(b"of the ranks of this test alone, and nobody else's")
    run = str(tmp_path)

    def write(world):
        (tmp_path / "spec.json").write_text(f"for {world}")

    prepared = []
    for attempt, world in enumerate(worlds):
        place = TcpRendezvous("host", 1, prefix=f"megaspec/job/{attempt}", is_open=True)
        me = RankInfo(0, world, 0, attempt, place, 5.0)

        def prepare(world=world):
            prepared.append(("new", world))
            write(world)
            return run

        def again(folder, world=world):
            prepared.append((folder, world))
            write(world)

        meeting = torch.distributed.PrefixStore(place.prefix, shared)
        answer = _first_answer(meeting, me, prepare, again, secret, "megaspec/job")
        digest = hashlib.sha256(f"for {world}".encode()).hexdigest()
        assert answer == f"{digest} {run}"
    assert prepared == [("new", 2), (run, 1), (run, 2)]


@pytest.mark.slow
def test_a_host_that_torchrun_loses(tmp_path, factory):
    """Two hosts, as two agents of torchrun; one is killed, and the other goes on in the layout for what is left."""
    asked = a_recipe(layouts=(1,), steps=400, timeout_seconds=10.0)
    run = make_run(tmp_path / "run", asked)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    words += ["--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", *words, "-m", "megaspec.cli", "resume", str(run)]
    with open(tmp_path / "said.txt", "w") as said:
        environment = ENVIRONMENT | {"MEGASPEC_RUN_SECRET": "of the ranks of these two hosts alone"}
        agents = [subprocess.Popen(command, env=environment, stdout=said, stderr=said) for _ in range(2)]
        try:
            wait_until(lambda: newest_step(run) >= 30, seconds=120)
            # the store is the first one's, or who of them came first
            lost = next(one for one in agents if not serves(one.pid, port))
            below = psutil.Process(lost.pid).children(recursive=True)
            lost.kill()
            for process in below:
                process.kill()
            (kept,) = [one for one in agents if one is not lost]
            assert kept.wait(timeout=240) == 0, (tmp_path / "said.txt").read_text()[-3000:]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    starts = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] == "start"]
    assert [line["world_size"] for line in starts] == [2, 1]
    assert read_exit(run).code == 0
    assert_same_course(run, undisturbed_run(tmp_path, factory, asked, 2), within=1e-12)


def serves(pid, port):
    """Whether a process listens at a port."""
    return any(
        one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in psutil.Process(pid).net_connections()
    )
