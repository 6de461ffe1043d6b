"""kill -9 of a random rank at random moments, a third of them inside saves."""

import os
import random

import pytest

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.folders import CHECKPOINTS, QUARANTINE, candidates
from megaspec.checkpoint.store import Store
from tests.faults.runs import STEPS, assert_same, go, make_run, recipe

# What each of the kills is: at a random moment, inside a save, or inside the save that writes a step anew whose first
# checkpoint was damaged.
KILLS = ["moment"] * 26 + ["save"] * 9 + ["save anew"] * 5
FEW_KILLS = ["moment", "save", "save anew"]
# Which ranks come to a point: each writes its own shard, rank 0 publishes and prunes.
EVERY_RANK = ("save_started", "before_chunk_write", "after_shard_write", "after_shard_sync")
RANK_0 = ("before_manifest", "after_manifest", "after_publish", "after_cleanup", "mid_delete")
# A launch that meets no kill takes about this long on two free cores.
LONGEST_SECONDS = 1.2


@pytest.mark.parametrize("kinds", [FEW_KILLS, pytest.param(KILLS, marks=pytest.mark.slow)], ids=len)
def test_kills_change_nothing(kinds, tmp_path, factory, undisturbed, capfd, tell):
    rng = random.Random(20)
    kills = kinds.copy()
    rng.shuffle(kills)
    runs = 0
    while kills:
        tp = 1 + runs % 2
        run = make_run(tmp_path / f"run-{runs}", recipe(tp=tp))
        runs += 1
        assert runs < 2 * len(kinds), f"{len(kills)} kills are left after {runs} runs"
        known, damaged = 0, None
        while True:
            if kills and kills[-1] == "save anew" and damaged is None and len(candidates(run / CHECKPOINTS)) == 2:
                known, damaged = damage_newest(run, rng)
            code = go(run, factory, fault=next_fault(rng, kills, damaged))
            if code == 0:
                break
            assert code == 74, f"exit code {code}: {capfd.readouterr().err}"
            known = assert_newest_is_good(run, at_least=known)
            if damaged is not None:
                assert any(f"{damaged:08d}" in p.name for p in (run / CHECKPOINTS / QUARANTINE).iterdir())
                assert kills.pop() == "save anew"
                damaged = None
            elif kills and kills[-1] != "save anew":
                kills.pop()
        assert_same(run, undisturbed[tp])
    tell(f"{len(kinds)} kills of ranks in {runs} runs")


def next_fault(rng, kills, damaged):
    """For a save anew it is the first save, since the run falls back to the checkpoint before the damaged one."""
    if not kills:
        return None
    if kills[-1] == "moment":
        return {"rank": rng.randrange(2), "kind": "after", "seconds": rng.uniform(0.05, LONGEST_SECONDS)}
    if kills[-1] == "save anew" and damaged is None:
        return {"rank": rng.randrange(2), "kind": "point", "point": "step", "count": 8}
    points = EVERY_RANK + RANK_0[:-1] if damaged is not None else EVERY_RANK + RANK_0
    point = rng.choice(points)
    rank = 0 if point in RANK_0 else rng.randrange(2)
    return {"rank": rank, "kind": "point", "point": point, "count": 1 if damaged is not None else rng.randint(1, 2)}


def assert_newest_is_good(run, *, at_least):
    """Nothing that was published is lost. -> step of the newest good checkpoint, 0 when there is none yet."""
    reader = Store(run).newest_good(SoloComm(), repair=False)
    if reader is None:
        assert at_least == 0, f"the checkpoint of step {at_least} is gone"
        return 0
    with reader:
        for name in reader.names():
            reader.read(name)
        assert reader.step >= at_least, f"step {at_least} was good, now the newest good one is {reader.step}"
        assert reader.step <= STEPS
        return reader.step


def damage_newest(run, rng):
    """Flips a bit in the newer of two checkpoints. -> (step of the older, step of the damaged)."""
    older, newer = sorted(candidates(run / CHECKPOINTS), key=lambda c: c.step)
    shard = rng.choice(sorted(newer.path.glob("*.safetensors")))
    with open(shard, "r+b") as file:
        at = rng.randrange(os.path.getsize(shard))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return older.step, newer.step


def test_the_launcher_starts_killed_ranks_again(tmp_path, factory, undisturbed, capfd):
    run = make_run(tmp_path / "run", recipe())
    # before the ninth step of every attempt, so that two steps behind a checkpoint are done again; then six are left
    fault = {"rank": 1, "kind": "point", "point": "step", "count": 9}
    assert go(run, factory, fault=fault, max_restarts=5) == 0
    said = capfd.readouterr().err
    assert said.count("rank 1 was killed by SIGKILL") == 3
    assert_same(run, undisturbed[2])
