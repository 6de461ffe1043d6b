"""The local launcher with toy ranks: exit codes, restarts, signals, output, orphans."""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megaspec.core.errors import WriteError
from megaspec_launchers import local
from megaspec_launchers.local import launch
from megaspec_launchers.rank_factory import RankFactory

ROOT = Path(__file__).parents[2]
TOYS = "tests.launchers.toys"
# Seconds that tests wait for what comes within one on an idle machine. Toys that nobody stops last 60.
PATIENCE = 40.0


@pytest.fixture(scope="module")
def factory():
    with RankFactory((TOYS,)) as made:
        yield made


def run(tmp_path, factory, name, ranks, *, restarts=0, grace=5.0, timeout=30.0, **arguments):
    return launch(
        str(tmp_path),
        ranks=ranks,
        entry=f"{TOYS}:{name}",
        max_restarts=restarts,
        grace_seconds=grace,
        timeout_seconds=timeout,
        arguments=arguments,
        factory=factory,
    )


def test_a_traceback_that_explains_nothing_is_shown_all_the_same(tmp_path, factory, capfd, monkeypatch):
    monkeypatch.setattr(local, "HOLD_SECONDS", 0.2)
    assert run(tmp_path, factory, "tracebacks", 2) == 0
    said = capfd.readouterr().err
    assert said.index("survived") < said.index("after it") < said.index("much later")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0], 0),
        ([0, 0, 0], 0),
        ([75, 75], 75),
        (["kill", "wait"], 74),
        (["wait", "kill"], 74),
        (["wait", "crash", "wait"], 70),
        (["wait", "bad data"], 65),
        (["no checkpoint", "wait"], 66),
        (["wait", 76], 76),
        ([78, 78], 78),
        (["wait", 3], 70),
    ],
)
def test_exit_code(tmp_path, factory, codes, expected):
    assert run(tmp_path, factory, "codes", len(codes), codes=codes) == expected


@pytest.mark.parametrize(
    ("codes", "cause", "code"),
    [
        ([74, "kill late", "dies of SIGTERM"], "rank 1 was killed by SIGKILL", 74),
        (["dies of SIGTERM", 74, "kill late"], "rank 2 was killed by SIGKILL", 74),
        (["kill late", "dies of SIGTERM", 74], "rank 0 was killed by SIGKILL", 74),
        (["dies of SIGTERM", "crash late", 74], "rank 1 ended with exit code 1", 70),
        ([74, "dies of SIGTERM", "crash late"], "rank 2 ended with exit code 1", 70),
    ],
)
def test_the_first_cause_is_named_when_survivors_end_before_it(tmp_path, factory, capfd, codes, cause, code):
    assert run(tmp_path, factory, "codes", len(codes), codes=codes) == code
    said = capfd.readouterr().err
    assert cause in said
    assert "SIGTERM" not in said
    assert ("IndexError: a plug-in's bug on purpose" in said) == ("crash late" in codes)


class SilentFactory:
    """Ranks that hear no signal any more."""

    def signal(self, pid: int, number: int, *, group: bool = False) -> None:
        """Sends nothing."""


def test_a_rank_that_was_dead_before_it_was_signalled_is_no_survivor(tmp_path):
    """Both ended before either was heard of; what the launcher does at the first is no reason for the second."""
    watch = local.Watch(
        store=str(tmp_path / "meeting"), world_size=3, attempt=0, timeout_seconds=5.0, run_dir=str(tmp_path)
    )
    attempt = local._Attempt(str(tmp_path), "", {}, SilentFactory(), None, lambda: True, watch, 5.0, 5.0)
    attempt.running = {10: local._Rank(0, 10), 11: local._Rank(1, 11), 12: local._Rank(2, 12)}
    for pid, rank in attempt.running.items():
        watch.add(rank.rank, pid)
    before = time.monotonic()
    attempt._ended({"ended": 10, "code": 74, "signal": None, "at": before})
    attempt._ended({"ended": 11, "code": None, "signal": signal.SIGTERM, "at": before})
    attempt._ended({"ended": 12, "code": None, "signal": signal.SIGTERM, "at": time.monotonic()})
    assert [end.by_launcher for end in attempt.ends] == [False, False, True]
    assert str(local.judge(attempt.ends).cause) == "rank 1 was killed by SIGTERM"


def test_user_errors_print_no_traceback_and_bugs_do(tmp_path, factory, capfd):
    run(tmp_path, factory, "codes", 2, codes=["wait", "bad data"])
    said = capfd.readouterr().err
    assert "data.path=nowhere is missing" in said
    assert "Traceback" not in said
    run(tmp_path, factory, "codes", 2, codes=["wait", "crash"])
    said = capfd.readouterr().err
    assert "rank 1 ended with exit code 1" in said
    assert "a bug on purpose" in said
    assert "Traceback" in said


def test_ranks_know_their_place(tmp_path, factory):
    assert run(tmp_path, factory, "places", 3, timeout=7.0, extra=[1, {"a": None}]) == 0
    places = [dict(read_place(tmp_path / f"place-{r}")) for r in range(3)]
    for rank, place in enumerate(places):
        assert place["local_rank"] == rank
        assert (place["world_size"], place["attempt"], place["timeout_seconds"]) == (3, 0, 7.0)
        assert place["extra"] == [1, {"a": None}]
        assert place["folder_mode"] == 0o700
        assert place["session"] == place["pid"]
    assert len({p["store"] for p in places}) == 1
    assert not Path(places[0]["store"]).parent.exists()


def read_place(path):
    return ast.literal_eval(path.read_text())


def test_output_of_rank_0_is_shown_and_that_of_the_others_kept(tmp_path, factory, capfd):
    assert run(tmp_path, factory, "talk", 3) == 0
    out, err = capfd.readouterr()
    assert out == "out of 0\n"
    assert err == "err of 0\n"
    logs = [(tmp_path / "logs" / f"rank-{r}.log").read_text() for r in range(3)]
    assert logs[0] == "err of 0\n"
    assert sorted(logs[2].splitlines()) == ["err of 2", "out of 2"]


def test_what_a_rank_wrote_in_an_earlier_life_is_not_told_again(tmp_path, factory, capfd):
    for _ in range(2):
        assert run(tmp_path, factory, "codes", 2, codes=["wait", "bad data"]) == 65
        assert capfd.readouterr().err.count("data.path=nowhere is missing") == 1
    assert (tmp_path / "logs" / "rank-1.log").read_text().count("data.path=nowhere is missing") == 2


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path, factory):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="file/logs"):
        run(tmp_path / "file", factory, "talk", 1)


def test_a_link_in_place_of_a_log_is_refused(tmp_path, factory):
    (tmp_path / "mine").write_text("a file of somebody's own\n")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank-1.log").symlink_to(tmp_path / "mine")
    with pytest.raises(WriteError, match=r"run/logs/rank-1\.log: is a link"):
        run(tmp_path / "run", factory, "talk", 2)
    assert (tmp_path / "mine").read_text() == "a file of somebody's own\n"
    (tmp_path / "run" / "logs" / "rank-0.log").unlink()
    os.mkfifo(tmp_path / "run" / "logs" / "rank-0.log")
    with pytest.raises(WriteError, match=r"run/logs/rank-0\.log: is no regular file"):
        run(tmp_path / "run", factory, "talk", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").symlink_to(tmp_path)
    with pytest.raises(WriteError, match=r"other/logs/rank-0\.log: lies behind a link"):
        run(tmp_path / "other", factory, "talk", 1)
    assert not (tmp_path / "rank-0.log").exists()


def test_a_folder_that_went_to_another_job_gets_no_line_from_this_launcher(tmp_path, factory, capfd):
    options = {"entry": f"{TOYS}:codes", "arguments": {"codes": ["bad data"]}, "factory": factory}
    assert launch(str(tmp_path), ranks=1, is_ours=lambda: False, **options) == 65
    assert "data.path=nowhere is missing" in capfd.readouterr().err
    assert (tmp_path / "logs" / "rank-0.log").read_text() == ""


def test_killed_ranks_are_started_again(tmp_path, factory, capfd):
    before = processor_seconds(factory)
    assert run(tmp_path, factory, "once", 4, restarts=10, dies_at_rank=2, attempts=11) == 0
    # 44 ranks out of one warm process
    assert processor_seconds(factory) - before < 10
    for attempt in range(11):
        for rank in range(4):
            assert (tmp_path / f"attempt-{attempt}-rank-{rank}").exists()
    said = capfd.readouterr().err
    assert said.count("rank 2 was killed by SIGKILL") == 10
    assert "restart 10 of 10" in said


def test_restarts_end(tmp_path, factory):
    assert run(tmp_path, factory, "once", 2, restarts=2, dies_at_rank=0, attempts=99) == 74
    assert (tmp_path / "attempt-2-rank-1").exists()
    assert not (tmp_path / "attempt-3-rank-1").exists()


@pytest.mark.parametrize("code", ["bad data", 66, 76, 78, 75])
def test_what_another_attempt_would_meet_again_is_not_tried_again(tmp_path, factory, capfd, code):
    run(tmp_path, factory, "codes", 1, restarts=3, codes=[code])
    assert "starting again" not in capfd.readouterr().err


def test_ranks_that_outlive_a_finished_one_are_killed_with_their_stacks(tmp_path, factory, capfd):
    assert run(tmp_path, factory, "codes", 2, timeout=0.3, codes=[0, "wait"]) == 74
    said = capfd.readouterr().err
    assert "rank 1 did not end in time" in said
    assert "toys.py" in said


def test_ranks_of_a_warm_factory_start_at_once(tmp_path, factory):
    run(tmp_path, factory, "codes", 1, codes=[0])
    before = processor_seconds(factory)
    assert run(tmp_path, factory, "codes", 8, codes=[0] * 8) == 0
    # a fraction of a second; eight interpreters that load torch take over ten
    assert processor_seconds(factory) - before < 5.0


def processor_seconds(factory):
    """Of a warm process and of its ranks that have ended: how busy the machine is does not count."""
    return sum(psutil.Process(factory.pid).cpu_times()[:4])


def test_a_rank_starts_in_the_folder_of_its_launch(tmp_path, factory, monkeypatch):
    for name in ("one", "other"):
        (tmp_path / name / "run").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        assert run(Path("run"), factory, "places", 1) == 0
        assert (tmp_path / name / "run" / "place-0").exists()


def test_a_launcher_never_imports_torch():
    program = "import sys, megaspec_launchers.local, megaspec_launchers.environment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment())


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "launchers"))}


@contextmanager
def started(tmp_path, name, ranks, **options):
    """A launcher in a process group of its own, with its ranks up."""
    command = [sys.executable, str(ROOT / "tests/launchers/start.py"), str(tmp_path), f"{TOYS}:{name}", str(ranks)]
    process = subprocess.Popen(
        [*command, json.dumps(options)],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: all(text_of(tmp_path / f"up-{r}") for r in range(ranks)))
        yield process
    finally:
        process.kill()
        process.wait()


def text_of(path):
    return path.read_text() if path.exists() else ""


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def pids(tmp_path, kind, ranks):
    return [int((tmp_path / f"{kind}-{r}").read_text()) for r in range(ranks)]


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_hangup_that_nohup_ignores_stops_nothing(tmp_path):
    with started(tmp_path, "saves", 2, under_nohup=True) as launcher:
        os.kill(launcher.pid, signal.SIGHUP)
        for pid in pids(tmp_path, "up", 2):
            os.kill(pid, signal.SIGHUP)
        os.kill(launcher.pid, signal.SIGUSR2)
        logs = [tmp_path / "logs" / f"rank-{r}.log" for r in range(2)]
        wait_for(lambda: all("toys.py" in log.read_text() for log in logs))
        assert not any((tmp_path / f"saved-{r}").exists() for r in range(2))
        os.kill(launcher.pid, signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75
    assert "SIGTERM: ranks finish" in said
    assert "SIGHUP" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_every_rank(tmp_path, number):
    with started(tmp_path, "saves", 3) as launcher:
        os.kill(launcher.pid, number)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75
    assert all((tmp_path / f"saved-{r}").exists() for r in range(3))
    assert said.count(signal.Signals(number).name) == 1


def test_ctrl_c_reaches_ranks_through_the_launcher_alone(tmp_path):
    with started(tmp_path, "saves", 2) as launcher:
        assert not set(pids(tmp_path, "up", 2)) & {p.pid for p in psutil.process_iter() if in_group(p, launcher.pid)}
        os.killpg(launcher.pid, signal.SIGINT)
        launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75


def in_group(process, group):
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(tmp_path):
    with started(tmp_path, "stubborn", 2, grace_seconds=0.5) as launcher:
        ranks, children = pids(tmp_path, "up", 2), pids(tmp_path, "child", 2)
        start = time.monotonic()
        os.kill(launcher.pid, signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE)
        assert time.monotonic() - start > 0.5
    assert launcher.returncode == 74
    assert "did not end in time" in said
    assert all(gone(p) for p in ranks)
    wait_for(lambda: all(gone(p) for p in children))


def test_sigusr2_shows_where_every_rank_is_and_stops_nothing(tmp_path):
    with started(tmp_path, "saves", 2) as launcher:
        os.kill(launcher.pid, signal.SIGUSR2)
        logs = [tmp_path / "logs" / f"rank-{r}.log" for r in range(2)]
        wait_for(lambda: all("toys.py" in log.read_text() for log in logs))
        assert launcher.poll() is None
        os.kill(launcher.pid, signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75
    assert "SIGUSR2: every rank writes its stacks to its log and goes on" in said


def test_a_frozen_rank_is_named_and_not_one_that_waited_for_it(tmp_path):
    with started(tmp_path, "frozen", 3, grace_seconds=0.3) as launcher:
        wait_for(lambda: psutil.Process(pids(tmp_path, "up", 3)[1]).status() == psutil.STATUS_STOPPED)
        os.kill(launcher.pid, signal.SIGTERM)
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 74
    assert "rank 1 did not end in time and was killed: it was stopped (SIGSTOP" in said


def test_a_rank_that_is_stuck_is_named_and_not_one_that_waits_in_a_collective(tmp_path, capfd):
    def stop_when_up():
        wait_for(lambda: all((tmp_path / f"up-{r}").exists() for r in range(2)))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    sent = threading.Thread(target=stop_when_up)
    sent.start()
    with RankFactory(("torch", "tests.launchers.gloo_toy")) as warm:
        code = launch(
            str(tmp_path),
            ranks=2,
            entry="tests.launchers.gloo_toy:stuck",
            grace_seconds=0.3,
            arguments={"culprit": 1},
            factory=warm,
        )
    sent.join()
    assert code == 74
    assert "rank 1 did not end in time and was killed: it was in stuck (" in capfd.readouterr().err


# Less than a rank takes there, and so much more than its launcher, its server and another rank that the kernel, which
# ends the largest process, ends no other one.
LITTLE_MEMORY = 400 << 20


@pytest.fixture
def small_group():
    """A control group with little memory, and how a process joins it; the test is skipped where none may be made."""
    groups = Path("/sys/fs/cgroup")
    if (groups / "memory").exists():
        limits = {"memory.limit_in_bytes": LITTLE_MEMORY, "memory.memsw.limit_in_bytes": LITTLE_MEMORY}
        group = groups / "memory" / f"megaspec-test-{os.getpid()}"
    else:
        limits = {"memory.max": LITTLE_MEMORY, "memory.swap.max": 0}
        group = groups / f"megaspec-test-{os.getpid()}"
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(str(limit))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        pytest.skip("may not limit a control group's memory here")
    yield group / "cgroup.procs"
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_that_memory_ran_out_for_ends_the_run_for_good(tmp_path, small_group):
    start = [sys.executable, str(ROOT / "tests/launchers/start.py"), str(tmp_path), f"{TOYS}:eats", "2"]
    joined = ["sh", "-c", f'echo $$ > {small_group} && exec "$@"', "sh", *start, json.dumps({"max_restarts": 2})]
    done = subprocess.run(joined, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 64, done.stderr
    assert "rank 1 was killed because memory ran out" in done.stderr
    assert "starting again" not in done.stderr


def test_a_second_signal_kills_at_once(tmp_path):
    with started(tmp_path, "stubborn", 2, grace_seconds=60) as launcher:
        os.kill(launcher.pid, signal.SIGTERM)
        # longer than a request that comes twice at once
        time.sleep(0.5)
        assert launcher.poll() is None
        os.kill(launcher.pid, signal.SIGINT)
        # less than the grace time
        _, said = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 74
    assert "SIGINT again: killing 2 ranks" in said


def test_a_request_that_comes_twice_at_once_counts_once(tmp_path):
    with started(tmp_path, "saves", 2, grace_seconds=60) as launcher:
        os.kill(launcher.pid, signal.SIGINT)
        os.kill(launcher.pid, signal.SIGTERM)
        launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75


def test_no_rank_outlives_its_launcher(tmp_path):
    with started(tmp_path, "stubborn", 2) as launcher:
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 5  # the server, two ranks, a child of each
        launcher.kill()
        wait_for(lambda: all(gone(p.pid) for p in family))


def test_no_rank_outlives_the_server(tmp_path):
    with started(tmp_path, "stubborn", 2, max_restarts=0) as launcher:
        (server,) = psutil.Process(launcher.pid).children()
        server.kill()
        _, said = launcher.communicate(timeout=PATIENCE)
        assert launcher.returncode == 74
        assert "the process that starts ranks was killed by SIGKILL, by hand or because memory ran out" in said
        assert "its message is above" not in said
        wait_for(lambda: all(gone(p) for p in pids(tmp_path, "up", 2)))


def test_a_launch_ends_though_its_server_is_frozen(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(local, "AFTER_KILL_SECONDS", 1.0)

    def freeze_and_stop():
        wait_for(lambda: all((tmp_path / f"up-{r}").exists() for r in range(2)))
        os.kill(warm.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    with RankFactory((TOYS,)) as warm:
        stopping = threading.Thread(target=freeze_and_stop)
        stopping.start()
        code = run(tmp_path, warm, "stubborn", 2, grace=0.3)
        stopping.join()
    assert code == 74
    said = capfd.readouterr().err
    assert "no end of rank 0, 1 was heard of after the kill; the process that starts ranks" in said
    assert "was stopped (SIGSTOP, or a debugger)" in said
    wait_for(lambda: all(gone(p) for p in pids(tmp_path, "up", 2)))


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("kill", 74)])
def test_a_rank_leaves_no_child_behind(tmp_path, factory, how, code):
    assert run(tmp_path, factory, "leaves_a_child", 2, how=how) == code
    wait_for(lambda: all(gone(p) for p in pids(tmp_path, "child", 2)))
    if how == "return":
        assert (tmp_path / "logs" / "rank-1.log").read_text() == "no newline at the end"


def test_a_signal_before_the_ranks_have_started_ends_at_once(tmp_path, monkeypatch):
    ready = local._Attempt._wait_until_ready

    def interrupted(attempt):
        os.kill(os.getpid(), signal.SIGTERM)
        return ready(attempt)

    monkeypatch.setattr(local._Attempt, "_wait_until_ready", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with RankFactory(("torch",)) as cold:
        assert run(tmp_path, cold, "codes", 1, codes=[0]) == 75
        # nobody waited for its imports
        assert not cold.is_ready
    assert signal.getsignal(signal.SIGTERM) is before


def test_entry_that_cannot_be_imported(tmp_path, capfd):
    with RankFactory(("tests.launchers.nothing",)) as broken:
        assert run(tmp_path, broken, "codes", 1, codes=[0]) == 70
    assert "No module named 'tests.launchers.nothing'" in capfd.readouterr().err


def test_a_world_recovers_from_ten_kills(tmp_path):
    deaths = [0, 1, 2, 3, 3, 2, 1, 0, 2, 1]
    with RankFactory(("torch", "tests.launchers.gloo_toy")) as warm:
        code = launch(
            str(tmp_path),
            ranks=4,
            entry="tests.launchers.gloo_toy:sums",
            max_restarts=10,
            timeout_seconds=20,
            arguments={"deaths": deaths},
            factory=warm,
        )
    assert code == 0
    assert [(tmp_path / f"sum-{r}").read_text() for r in range(4)] == ["10 1.0"] * 4
