"""A run that hangs says where every rank stood."""

import contextlib
import io
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megaspec.launcher.rendezvous import FileRendezvous
from megaspec.parallelism.collectives import all_reduce
from megaspec.runtime import position as runtime_position
from megaspec.runtime.position import Position, RanksAtPosition, Watchdog, by_position, in_words, pending_collective
from megaspec.runtime.rank import RankInfo, tell
from tests.ranks import RankPool


def test_ranks_at_the_same_place_share_a_line() -> None:
    groups = by_position({0: "here", 2: "there", 3: "here"}, 4)
    assert groups == [
        RanksAtPosition((0, 3), "here"),
        RanksAtPosition((1,), "gone, or too busy to answer"),
        RanksAtPosition((2,), "there"),
    ]
    assert in_words(groups[:2]) == "  ranks 0, 3: here\n  rank 1: gone, or too busy to answer"


@pytest.mark.parametrize(
    ("what", "said"),
    [("a collective failed", "rank 1: a collective failed\n"), ("rank 0: cannot write x", "rank 0: cannot write x\n")],
)
def test_an_error_names_one_rank(what: str, said: str, capsys) -> None:
    me = RankInfo(rank=1, world_size=2, local_rank=1, attempt=0, store=FileRendezvous("nowhere"), timeout_seconds=1.0)
    tell(me, what)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("group", "said"), [("tp", "group tp"), ("default_pg", "all ranks")])
def test_what_nccl_has_not_ended_is_told_by_its_group(group: str, said: str, monkeypatch) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 12, "process_group": ["3", group]}
    entries = [entry | {"state": "completed", "collective_seq_id": 11}, entry | {"state": "started"}]
    dump = json.dumps({"entries": entries})
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda *_: dump, raising=False)
    assert pending_collective() == f", waiting for nccl:all_reduce number 12 of {said}"


def _times_out() -> None:
    raise RuntimeError("Timed out waiting")


def late(rank: int, path: str) -> str:
    """Rank 2 sleeps in micro batch 1 while the others sum something in micro batch 2."""
    # longer than the pool waits: ranks end by hearing all of the others
    runtime_position._PATIENCE = 600.0
    store = dist.FileStore(path, 3)
    position = Position(torch.device("cpu"), step=7)
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        Watchdog(position, rank=rank, world_size=3, store=store, seconds=60) as watchdog,
    ):
        position.mark(f"forward of micro batch {1 if rank == 2 else 2}, layers.3")
        if rank == 2:
            time.sleep(1.5)
        try:
            if rank < 2:
                group = dist.new_group([0, 1], use_local_synchronization=True)
                all_reduce(torch.ones(2), group)
                _times_out()
        except RuntimeError as error:
            watchdog.tell("a collective failed", error)
        else:
            watchdog.tell("late")
    return said.getvalue()


def test_one_message_names_every_rank(tmp_path) -> None:
    with RankPool() as pool:
        told = pool.run(late, str(tmp_path / "store"), ranks=3)
    assert [bool(text) for text in told] == [True, False, False]
    first, *lines = told[0].splitlines()
    assert first == "a collective failed; where every rank stood:"
    place = "ranks 0, 1: step 7, forward of micro batch 2, layers.3"
    collective = r"behind all_reduce number 1 of group \w+"
    assert any(re.search(rf"{place}, {collective}, in _times_out \(tests/", line) for line in lines), told[0]
    assert any("stack of rank 0, 1:" in line for line in lines)
    assert any("rank 2: step 7, forward of micro batch 1, layers.3" in line for line in lines)


def test_units_tell_training_and_evaluation_apart(monkeypatch) -> None:
    position, told = Position(torch.device("cpu"), micro=3), []
    monkeypatch.setattr(Position, "mark", lambda _, what: told.append(what))
    unit = SimpleNamespace(name="layers.1", run=lambda x: 2 * x)
    position.watch(SimpleNamespace(units=[unit]))
    unit.run(torch.ones(2, requires_grad=True)).sum().backward()
    with torch.no_grad():
        unit.run(torch.ones(2))
    assert told == [f"{what} of micro batch 3, layers.1" for what in ("forward", "backward", "evaluation")]


def stuck(rank: int, path: str) -> None:
    position = Position(torch.device("cpu"), step=1)
    with Watchdog(position, rank=rank, world_size=1, store=dist.FileStore(path, 1), seconds=1):
        position.mark("backward of micro batch 0, layers.1")
        threading.Event().wait()


def test_a_rank_that_does_not_get_on_is_ended(tmp_path) -> None:
    # had it not ended by itself, the pool would say that it did not answer
    with RankPool() as pool, pytest.raises(AssertionError, match="rank 0 died"):
        pool.run(stuck, str(tmp_path / "store"), ranks=1)


class LostStore:
    """The store at a host that is lost: after its first key it answers nobody."""

    def __init__(self) -> None:
        self.is_lost = False

    def set(self, *_: object) -> None:
        if self.is_lost:
            threading.Event().wait()
        self.is_lost = True

    def check(self, *_: object) -> bool:
        threading.Event().wait()
        return False


def hears_nothing(rank: int, _: str) -> tuple[float, str]:
    """Seconds in which a rank says that a collective failed, and what it says."""
    position = Position(torch.device("cpu"), step=7)
    said = io.StringIO()
    started = time.monotonic()
    with (
        contextlib.redirect_stderr(said),
        Watchdog(position, rank=1, world_size=2, store=LostStore(), seconds=60) as watchdog,
    ):
        watchdog.tell("a collective failed", RuntimeError("no answer"))
    return time.monotonic() - started, said.getvalue()


def stuck_alone(rank: int, _: str) -> None:
    position = Position(torch.device("cpu"), step=1)
    with Watchdog(position, rank=1, world_size=2, store=LostStore(), seconds=1):
        time.sleep(30)


def test_a_store_that_is_lost_keeps_no_rank_waiting() -> None:
    """Nor the thread that ends a rank which hangs."""
    with RankPool() as pool:
        [(seconds, said)] = pool.run(hears_nothing, "", ranks=1)
    assert seconds < 10
    assert "rank 1: starting" in said
    assert "rank 0: gone, or too busy to answer" in said
    started = time.monotonic()
    with RankPool() as pool, pytest.raises(AssertionError, match="rank 0 died"):
        pool.run(stuck_alone, "", ranks=1)
    assert time.monotonic() - started < 20
