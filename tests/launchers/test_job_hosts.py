"""Which hosts a job of several nodes is to do without: who is named, when, and what its script is told."""

import json
import signal
from pathlib import Path

import pytest

from megaspec.core.errors import HardwareError, RecipeError
from megaspec.launcher.suspects import Avoided, avoid, avoid_host, read_avoided, tell_failed_host, tell_suspects
from megaspec_launchers.job_hosts import JobHosts
from megaspec_launchers.outcome import RankEnd, judge

NAMES = ("node1", "node2", "node3")
KILLED = judge([RankEnd(2, None, signal.SIGKILL), RankEnd(3, 74)])
MISSED = judge([RankEnd(0, 74), RankEnd(1, 74)])


def job(folder: Path, restarts: int = 0, lost: str = "") -> list[JobHosts]:
    """What each node of a start sees. Names are not in the order of nodes."""
    place = folder / "job"
    for kind in ("nodes", "ended", "left-out"):
        (place / kind).mkdir(parents=True, exist_ok=True)
        for left in (place / kind).iterdir():
            left.unlink()
    (folder / "run").mkdir(exist_ok=True)
    (place / "hosts").write_text("".join(f"{name}\n" for name in sorted(NAMES, reverse=True)))
    made = []
    for number, name in enumerate(NAMES):
        start = f"4711-{restarts}"
        made.append(JobHosts(place, folder / "run", start, restarts, name, number, ranks=2, lost=lost))
    return made


def told(folder: Path, kind: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "job" / kind).iterdir()}


def fail(folder: Path, restarts: int, *killed: str) -> None:
    """A start in which ranks of these hosts are killed, and those of the others miss them."""
    nodes = job(folder, restarts)
    for node in nodes:
        node.begin()
    for node in nodes:
        node.note_end(KILLED if node.name in killed else MISSED, was_asked=False)
    for node in nodes:
        node.leave_out(74, suspicions=0)


def test_a_suspected_rank_names_its_host(tmp_path):
    nodes = job(tmp_path, restarts=3)
    tell_suspects(tmp_path / "run", attempt=0, ranks=[0], why="of another start")
    before = [node.begin() for node in nodes]
    assert before == [1, 1, 1]
    for _ in range(6):
        # every rank says so
        tell_suspects(tmp_path / "run", attempt=0, ranks=[5], why="weights differ")
    for node in nodes:
        node.note_end(judge([RankEnd(node.node, 77)]), was_asked=False)
        node.leave_out(77, suspicions=1)
    assert read_avoided(tmp_path / "run").entries == (Avoided("node3", None, 3, "rank 5: weights differ"),)
    assert told(tmp_path, "left-out") == dict.fromkeys(NAMES, "node3\n")


def test_a_suspicion_without_a_rank_names_nobody(tmp_path):
    nodes = job(tmp_path)
    for node in nodes:
        node.begin()
    tell_suspects(tmp_path / "run", attempt=0, ranks=[], why="weights differ")
    for node in nodes:
        node.leave_out(77, suspicions=0)
    assert read_avoided(tmp_path / "run").entries == ()
    assert told(tmp_path, "left-out") == dict.fromkeys(NAMES, "")


def test_a_host_that_fails_for_the_second_time_is_avoided(tmp_path):
    fail(tmp_path, 0, "node2")
    assert told(tmp_path, "ended") == {"node1": "missed", "node2": "failed", "node3": "missed"}
    assert read_avoided(tmp_path / "run").entries == ()
    fail(tmp_path, 1, "node3")
    assert read_avoided(tmp_path / "run").entries == ()
    fail(tmp_path, 2, "node2")
    (avoided,) = read_avoided(tmp_path / "run").entries
    assert (avoided.host, avoided.device, avoided.attempt) == ("node2", None, 2)
    assert avoided.why.startswith("failed 2 times, the last: rank 2 was killed by SIGKILL")
    with pytest.raises(HardwareError, match=r"the run keeps away from host node2 .*no rank was started"):
        job(tmp_path, 3)[0].begin()
    # what its nodes said last is enough to leave it out
    assert told(tmp_path, "left-out") == {"node1": "node2\n"}


def test_hosts_that_fail_at_once_are_not_to_blame(tmp_path):
    """As for a bug, or with the power of a rack."""
    for restarts in range(3):
        fail(tmp_path, restarts, "node1", "node2")
    assert read_avoided(tmp_path / "run").entries == ()


def test_a_host_that_is_mended_is_back_until_it_fails_again(tmp_path):
    for restarts in range(2):
        fail(tmp_path, restarts, "node2")
    (tmp_path / "run" / "avoided.jsonl").write_text("")
    fail(tmp_path, 2)
    assert told(tmp_path, "left-out") == dict.fromkeys(NAMES, "")
    fail(tmp_path, 3, "node2")
    assert list(read_avoided(tmp_path / "run").hosts) == ["node2"]


@pytest.mark.parametrize(
    "end",
    [
        RankEnd(0, None, signal.SIGKILL, by_launcher=True),
        RankEnd(0, None, signal.SIGABRT),
        RankEnd(0, None, signal.SIGTERM),
        RankEnd(0, 70),
        RankEnd(0, 74),
    ],
    ids=str,
)
def test_ends_that_say_nothing_against_a_host(tmp_path, end):
    for restarts in range(3):
        node = job(tmp_path, restarts)[0]
        node.begin()
        node.note_end(judge([end]), was_asked=False)
        node.leave_out(74, suspicions=0)
        assert told(tmp_path, "ended")["node1"] != "failed"
    assert read_avoided(tmp_path / "run").entries == ()


def test_what_slurm_ends_is_no_failure_of_a_host(tmp_path):
    """It asks, and kills what has not ended in time: ranks before the process that watches them."""
    for restarts in range(3):
        node = job(tmp_path, restarts)[0]
        node.begin()
        node.note_stop()
        assert told(tmp_path, "ended") == {"node1": "stopped"}
        node.note_end(KILLED, was_asked=True)
        node.leave_out(74, suspicions=0)
    assert told(tmp_path, "ended") == {"node1": "stopped"}
    assert not (tmp_path / "run" / "failed_hosts.jsonl").exists()


def test_memory_that_runs_out_is_no_failure_of_a_host(tmp_path):
    for restarts in range(3):
        node = job(tmp_path, restarts)[0]
        node.begin()
        node.note_end(judge([RankEnd(0, None, signal.SIGKILL)], memory_kills=1), was_asked=False)
        node.leave_out(64, suspicions=0)
    assert told(tmp_path, "ended") == {"node1": "ended"}
    assert read_avoided(tmp_path / "run").entries == ()


def test_a_host_that_is_lost_twice_is_avoided_by_all_nodes(tmp_path):
    for node in job(tmp_path, 1, lost="4711-0 node2"):
        node.begin()
    (line,) = (tmp_path / "run" / "failed_hosts.jsonl").read_text().splitlines()
    assert json.loads(line) == {"host": "node2", "start": "4711-0", "why": "it was lost with its ranks"}
    for node in reversed(job(tmp_path, 2, lost="4711-1 node2")):
        with pytest.raises(HardwareError, match=r"host node2 .failed 2 times, the last: it was lost"):
            node.begin()
    assert len(read_avoided(tmp_path / "run").entries) == 1


def test_a_damaged_line_is_told_before_a_rank_starts(tmp_path):
    node = job(tmp_path)[0]
    (tmp_path / "run" / "avoided.jsonl").write_text("node2\n")
    with pytest.raises(RecipeError, match=r"avoided.jsonl:1: is no JSON"):
        node.begin()


def test_lines_that_a_scheduler_could_misread_are_told(tmp_path, capsys):
    """In a list of SLURM brackets and commas name more than a host; a device is the supervisor's."""
    nodes = job(tmp_path)
    for name in ("a[1-99]", "b,c", "d e", "--f"):
        avoid(tmp_path / "run", Avoided(name, None, 0, "by hand"))
    avoid(tmp_path / "run", Avoided("node1", "3", 0, "of the supervisor"))
    avoid(tmp_path / "run", Avoided("node9", None, 0, "by hand"))
    nodes[0].begin()
    nodes[0].leave_out(75, suspicions=0)
    assert told(tmp_path, "left-out") == {"node1": "node9\n"}
    assert capsys.readouterr().err.count("is no name of a host, and is not left out") == 4


def test_one_line_however_many_say_so(tmp_path):
    assert avoid_host(tmp_path, Avoided("node1", None, 0, "a"))
    assert not avoid_host(tmp_path, Avoided("node1", None, 1, "b"))
    assert len((tmp_path / "avoided.jsonl").read_text().splitlines()) == 1


def test_a_run_that_is_not_there_yet_costs_nothing(tmp_path, capsys):
    """Its ranks were killed before the first of them could make its folder."""
    node = job(tmp_path)[0]
    (tmp_path / "run").rmdir()
    node.begin()
    node.note_end(KILLED, was_asked=False)
    node.leave_out(74, suspicions=0)
    assert "this failure of host node1 is not counted" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_link_is_not_written_through(tmp_path):
    """The run's folder may have been filled by somebody else."""
    node = job(tmp_path)[0]
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "run" / "failed_hosts.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"links are not followed"):
        tell_failed_host(tmp_path / "run", "node1", start="4711-0", why="")
    node.note_end(KILLED, was_asked=False)
    assert (tmp_path / "elsewhere").read_text() == ""
