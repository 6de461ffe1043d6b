"""Ranks that stop answering: within the time of a collective and 5 s more the run says where every rank stood, with its
collective, that one's number and its Python stack, and ends with 74."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaspec.launcher.beat import Page, page_path
from megaspec.launcher.heartbeat import read_heartbeat
from tests.faults.runs import assert_same, go, make_run, newest, recipe

TIMEOUT = 3.0
BOUND = TIMEOUT + 5.0


@dataclass(frozen=True)
class Hung:
    """How a run ended that hung."""

    code: int
    said: str
    report: dict[str, Any]
    seconds: float
    """From the moment in which the first rank was stuck to the report."""


def hang(run: Path, factory, capfd, *, fault: dict[str, Any], freeze_server: bool = False) -> Hung:
    """Runs it with a fault that makes the file `stuck` when it strikes."""
    stuck = run / "stuck"
    watched = threading.Event()

    def freeze() -> None:
        while not stuck.exists() and not watched.is_set():
            time.sleep(0.01)
        if stuck.exists():
            os.kill(factory.pid, signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    if freeze_server:
        freezer.start()
    code = go(run, factory, fault=fault | {"mark": str(stuck)}, timeout_seconds=TIMEOUT)
    watched.set()
    if freeze_server:
        freezer.join()
    report = json.loads((run / "logs/hang-0.json").read_text())
    assert stuck.exists(), "the fault never struck"
    return Hung(code, capfd.readouterr().err, report, report["time"] - stuck.stat().st_mtime)


def assert_told(hung: Hung, *, stopped: set[int], ranks: int = 2) -> None:
    """Every rank has a place, a collective with its number, and a stack unless it was stopped."""
    assert hung.code == 74
    assert hung.seconds <= BOUND, f"told {hung.seconds:.1f} s after it hung, {BOUND:.1f} are allowed"
    assert [one["rank"] for one in hung.report["ranks"]] == list(range(ranks))
    for one in hung.report["ranks"]:
        is_stopped = one["rank"] in stopped
        assert one["state"] == ("stopped" if is_stopped else "running"), one
        assert re.search(r"step \d+", one["where"]), one
        if ranks > 1:
            assert re.fullmatch(r"(in|behind) [a-z_ ]+ number \d+ of [\w .-]+", one["collective"]), one
        if is_stopped:
            assert one["kernel"]["state"].startswith(("T", "t")), one
        else:
            assert any("megaspec/" in line for line in one["stacks"]["main"]), one
    assert "where every rank stood:" in hung.said


def sleeps(rank: int, point: str, count: int) -> dict[str, Any]:
    return {"rank": rank, "kind": "sleep", "point": point, "count": count}


def test_a_rank_that_is_stuck_in_python(tmp_path, factory, capfd):
    """It is alive: its stack says where, and the others wait for it in a collective that it has not begun."""
    run = make_run(tmp_path / "run", recipe())
    hung = hang(run, factory, capfd, fault=sleeps(1, "step", 8))
    assert_told(hung, stopped=set())
    waits, stuck = hung.report["ranks"]
    assert waits["collective"].startswith("in ")
    assert stuck["collective"].startswith("behind ")
    assert any(line.startswith("_sleep (") for line in stuck["stacks"]["main"])
    assert "most likely the others wait for rank 1: it is in no collective" in hung.said


def test_a_rank_that_halts(tmp_path, factory, undisturbed, capfd):
    """It answers nothing any more: its collective stands in its page, the rest the kernel says; and the run goes on
    from what was saved as if nothing had happened."""
    run = make_run(tmp_path / "run", recipe())
    hung = hang(run, factory, capfd, fault={"rank": 1, "kind": "halt", "point": "step", "count": 8})
    assert_told(hung, stopped={1})
    assert "rank 1: stopped (SIGSTOP, or a debugger)" in hung.said
    assert "megaspec: rank 1 did not end in time and was killed: it was stopped" in hung.said
    step, _, _ = newest(run)
    assert 1 <= step < undisturbed[2].step
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


def test_all_ranks_halt(tmp_path, factory, capfd):
    """Nobody among them can notice it."""
    run = make_run(tmp_path / "run", recipe())
    hung = hang(run, factory, capfd, fault={"rank": 0, "kind": "halt all", "point": "step", "count": 8})
    assert_told(hung, stopped={0, 1})


def test_a_rank_that_is_alone(tmp_path, factory, capfd):
    """There is no collective that could fail."""
    run = make_run(tmp_path / "run", recipe(ranks=1, tp=1))
    hung = hang(run, factory, capfd, fault=sleeps(0, "step", 8))
    assert_told(hung, stopped=set(), ranks=1)
    assert re.search(r"rank 0 has not got on for \d+ s", hung.said)


KINDS = ("sleep", "halt", "halt all", "alone", "alone halted", "server")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_thirty_planted_hangs(tmp_path, factory, capfd, number):
    """Of six kinds, at changing places of a run: each is told in time."""
    kind = KINDS[number % len(KINDS)]
    point = ("step", "step", "save_started")[number % 3]
    count = 3 + number // 3 if point == "step" else 1 + number % 4
    is_alone = kind.startswith("alone")
    victim = 0 if is_alone else number % 2
    settings = recipe(ranks=1, tp=1) if is_alone else recipe(tp=1 + number % 2)
    fault = {"rank": victim, "point": point, "count": count}
    stopped = set()
    match kind:
        case "sleep" | "alone":
            fault["kind"] = "sleep"
        case "halt" | "alone halted":
            fault["kind"] = "halt"
            stopped = {victim}
        case "halt all":
            fault["kind"] = "halt all"
            stopped = {0, 1}
        case "server":
            # both ranks are stuck, and who would report their ends is stopped
            fault["kind"] = "sleep"
    run = make_run(tmp_path / "run", settings)
    hung = hang(run, factory, capfd, fault=fault, freeze_server=kind == "server")
    assert_told(hung, stopped=stopped, ranks=1 if is_alone else 2)


def test_a_rank_that_came_and_went_between_two_looks_is_told_with_its_step(tmp_path):
    from megaspec_launchers.watch import Watch

    store = str(tmp_path / "meeting")
    watch = Watch(
        store=store,
        world_size=1,
        attempt=0,
        timeout_seconds=10.0,
        run_dir=str(tmp_path),
        writes_heartbeat=True,
    )
    watch.add(0, os.getpid())
    assert watch.look(os.getpid()) is None
    Page.make(page_path(store, 0)).write_step(8, 10, 2.5)
    watch.ended(0)
    watch.end(76)
    beat = read_heartbeat(tmp_path)
    assert (beat.state, beat.step, beat.steps, beat.loss) == ("failed", 8, 10, 2.5)


def test_a_frozen_launcher_blames_nobody_when_it_goes_on(tmp_path):
    """What it did not see, because it was stopped itself, counts for nobody."""
    from megaspec_launchers.watch import Watch

    now = [100.0]
    store = str(tmp_path / "meeting")
    page = Page.make(page_path(store, 0))
    page.words[5] = 2  # WATCHED
    watch = Watch(
        store=store, world_size=1, attempt=0, timeout_seconds=10.0, run_dir=str(tmp_path), clock=lambda: now[0]
    )
    watch.add(0, os.getpid())
    assert watch.look(os.getpid()) is None
    now[0] += 60.0
    assert watch.look(os.getpid()) is None
    for _ in range(30):
        now[0] += 0.5
        found = watch.look(os.getpid())
        if found is not None:
            break
    assert found is not None
    assert 11.0 < now[0] - 160.0 < 12.5
    assert psutil.Process().status() != psutil.STATUS_STOPPED
