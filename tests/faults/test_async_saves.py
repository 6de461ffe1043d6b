"""kill -9 of ranks, of the processes that write their checkpoints, and of the launcher, while training goes on."""

import os
import random
import shutil
import signal
import time

import psutil
import pytest

from megaspec import cli
from megaspec.checkpoint.remote import Remote
from megaspec.checkpoint.store import Store
from megaspec.log.jsonl import read_metrics
from megaspec_launchers.local import PRELOADED
from megaspec_launchers.rank_factory import RankFactory
from tests.faults.runs import assert_same, go, make_run, newest, recipe
from tests.faults.test_kills import LONGEST_SECONDS, assert_newest_is_good
from tests.ranks import forks
from tests.warm import rank_servers_are_forks

KILLS = ["rank"] * 14 + ["writer"] * 16 + ["launcher"] * 10
FEW_KILLS = ["rank"] + ["writer"] * 2 + ["launcher"]
# In a writer: each writes its rank's file, that of rank 0 publishes.
EVERY_WRITER = ("save_started", "before_chunk_write", "after_shard_write", "after_shard_sync")
WRITER_0 = ("before_manifest", "after_manifest", "after_publish", "after_cleanup")
# A retry in the same place waits for a second; there may be some in a run.
LONG = {"grace_seconds": 40.0, "timeout_seconds": 40.0}


def saved(run):
    """Steps of the checkpoints that a run told of."""
    return [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "checkpoint"]


def test_every_checkpoint_that_the_recipe_asks_for(tmp_path, factory, undisturbed):
    run = make_run(tmp_path / "run", recipe(saving="async"))
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])
    assert saved(run) == list(range(3, 25, 3))
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000021", "step-00000024"]


def launched(run: str) -> None:
    """A launcher with ranks of its own."""
    rank_servers_are_forks()
    with RankFactory((*PRELOADED, "tests.faults.entry")) as factory:
        os._exit(go(run, factory, **LONG))


def kill_launcher(run, rng, known):
    """One launch, whose launcher is killed once ranks run; nothing of it lives on."""
    child = forks().Process(target=launched, args=(run,))
    child.start()
    lines = (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").exists() else 0
    deadline = time.monotonic() + 60
    while child.is_alive() and time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") > lines:
            break
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.6))
    family = psutil.Process(child.pid).children(recursive=True) if child.is_alive() else []
    child.kill()
    child.join()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"outlived the launcher: {alive}"
    return child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("kinds", [FEW_KILLS, pytest.param(KILLS, marks=pytest.mark.slow)], ids=len)
def test_kills_change_nothing(kinds, tmp_path, factory, undisturbed, capfd, tell):
    rng = random.Random(21)
    kills = kinds.copy()
    rng.shuffle(kills)
    runs = 0
    while kills:
        tp = 1 + runs % 2
        run = make_run(tmp_path / f"run-{runs}", recipe(tp=tp, saving="async", save_every=2))
        runs += 1
        assert runs < 3 * len(kinds), f"{len(kills)} kills are left after {runs} runs"
        known, is_done = 0, False
        while not is_done:
            kind = kills[-1] if kills else "none"
            mark = tmp_path / f"mark-{runs}-{len(kills)}"
            fault = None
            if kind == "launcher":
                if kill_launcher(run, rng, known):
                    kills.pop()
                known = assert_newest_is_good(run, at_least=known)
                continue
            if kind == "rank":
                fault = {"rank": rng.randrange(2), "kind": "after", "seconds": rng.uniform(0.05, LONGEST_SECONDS)}
            elif kind == "writer" and rng.random() < 0.5:
                fault = {"rank": rng.randrange(2), "kind": "writer", "mark": str(mark)}
                fault["seconds"] = rng.uniform(0.3, LONGEST_SECONDS)
            elif kind == "writer":
                point = rng.choice(EVERY_WRITER + WRITER_0)
                rank = 0 if point in WRITER_0 else rng.randrange(2)
                fault = {"rank": rank, "kind": "writer at", "point": point, "count": rng.randint(1, 3)}
                mark.touch()
            code = go(run, factory, fault=fault, **LONG)
            said = capfd.readouterr().err
            if kind == "rank" and code != 0:
                assert code == 74, f"exit code {code}: {said}"
                kills.pop()
            else:
                # a writer that dies costs its save another try, never the run
                assert code == 0, f"exit code {code}: {said}"
                if kind == "writer" and mark.exists():
                    kills.pop()
                is_done = True
            known = assert_newest_is_good(run, at_least=known)
        assert_same(run, undisturbed[tp])
        leftovers = [name for name in os.listdir(run / "checkpoints") if not name.startswith("step-")]
        assert leftovers == []
    tell(f"{len(kinds)} kills of ranks, writers and launchers in {runs} runs")


@pytest.mark.parametrize("retries", [0, 1])
def test_a_save_that_always_fails_ends_the_run(tmp_path, factory, capfd, retries):
    run = make_run(tmp_path / "run", recipe(saving="async", save_every=8, retries=retries))
    fault = {"rank": 1, "kind": "every writer at", "point": "after_shard_write", "seconds": 30.0}
    assert go(run, factory, fault=fault, **LONG) == 73
    said = capfd.readouterr().err
    assert "rank 1: the process that writes checkpoints was killed by SIGKILL" in said
    assert f"step 8 was not saved, in {retries + 1} tries; the run ends here" in said
    assert said.count("trying again in") == retries
    assert os.listdir(run / "checkpoints") == []
    if retries == 0:
        steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["event"] == "step"]
        assert steps[-1] < 16, "the error was not heard of before the next save"


def test_a_request_to_stop_waits_for_what_is_being_written(tmp_path, factory, undisturbed, capfd):
    run = make_run(tmp_path / "run", recipe(saving="async", save_every=4))
    fault = {"rank": 1, "kind": "stop", "point": "step", "count": 6}
    assert go(run, factory, fault=fault, **LONG) == 75
    assert saved(run) == [4, 6]
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])


@pytest.mark.parametrize("saving", [pytest.param("blocking", marks=pytest.mark.slow), "async"])
def test_the_best_stay(tmp_path, factory, saving):
    """Through a stop as well: what was evaluated before it is known after it."""
    changes = {"keep": 1, "keep_best": 2, "keep_every": 8, "saving": saving}
    run = make_run(tmp_path / "run", recipe(save_every=4, **changes))
    assert go(run, factory, fault={"rank": 0, "kind": "stop", "point": "step", "count": 18}, **LONG) == 75
    assert go(run, factory) == 0
    losses = {one["step"]: one["loss"] for one in read_metrics(run / "metrics.jsonl") if one["event"] == "eval"}
    assert sorted(losses) == list(range(4, 25, 4))
    best = sorted(losses, key=lambda step: (losses[step], -step))[:2]
    kept = sorted({24, 8, 16, *best})
    assert sorted(os.listdir(run / "checkpoints")) == [f"step-{step:08d}" for step in kept]


def test_copies_follow_the_run_folder(tmp_path, factory, undisturbed, capfd):
    """The run folder is lost; what a copy brings back goes on as if nothing had been."""
    copies = f"file://{tmp_path}/copies"
    run = make_run(tmp_path / "run", recipe(saving="async", save_every=6, copy_to=copies))
    assert go(run, factory, fault={"rank": 1, "kind": "point", "point": "step", "count": 20}, **LONG) == 74
    kept = sorted(os.listdir(run / "checkpoints"))
    assert go(run, factory, fault={"rank": 0, "kind": "stop", "point": "step", "count": 2}, **LONG) == 75
    # what a killed start had not copied is copied by the next
    assert set(Remote(copies).steps()) & {int(name.removeprefix("step-")) for name in kept}
    shutil.rmtree(run)
    assert cli.main(["checkpoint", "fetch", copies, "--out", str(run)]) == 0
    assert go(run, factory, **LONG) == 0, capfd.readouterr().err
    assert_same_end(run, undisturbed[2])
    assert Remote(copies).steps()[-1] == 24


# the two that are hardest to go on from by default, each with each in the slow set
@pytest.mark.parametrize(
    ("saving", "point"),
    [
        ("async", "mid_remote_delete"),
        pytest.param("blocking", "before_remote_delete", marks=pytest.mark.slow),
        pytest.param("blocking", "mid_remote_delete", marks=pytest.mark.slow),
        pytest.param("async", "before_remote_delete", marks=pytest.mark.slow),
    ],
)
def test_what_was_to_be_deleted_there_when_it_was_killed_is_deleted_by_the_next_start(
    tmp_path, factory, capfd, saving, point
):
    """Whoever deletes is killed each time, and then the rank: nothing is left that knew what was to go."""
    copies = Remote(f"file://{tmp_path}/copies")
    run = make_run(tmp_path / "run", recipe(save_every=3, keep=1, copy_to=copies.url, saving=saving))
    fault = {"rank": 0, "kind": "every writer at", "point": point}
    assert go(run, factory, fault=fault, **LONG) == 0
    found = copies.found()
    # what was being copied when it was to be deleted stays here, and there
    here = Store(run).steps()
    forgotten = {*found.whole, *found.partial} - {*here}
    assert forgotten, "nothing was to be deleted"
    assert "was not deleted there: the process that writes checkpoints was killed by SIGKILL" in capfd.readouterr().err
    assert go(run, factory, **LONG) == 0
    assert f"what an earlier start had to leave there is deleted: step {min(forgotten)}" in capfd.readouterr().err
    left = copies.found()
    assert {*left.whole, *left.partial} <= {*here}
    assert left.whole[-1] == 24


def assert_same_end(run, undisturbed):
    """The weights; of the history there is what was copied."""
    step, tensors, state = newest(run)
    assert (step, state) == (undisturbed.step, undisturbed.state)
    assert tensors == undisturbed.tensors


def test_a_place_for_copies_that_cannot_be_written_ends_a_run_before_it_trains(tmp_path, factory, capfd):
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "run", recipe(copy_to=f"file://{tmp_path}/file/copies"))
    assert go(run, factory, **LONG) == 73
    assert f"checkpoint.copy_to=file://{tmp_path}/file/copies" in capfd.readouterr().err
    assert not (run / "metrics.jsonl").exists()
