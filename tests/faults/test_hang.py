"""A rank that stops answering: the run ends in a bounded time and says where every rank stood."""

import re
import time

from tests.faults.runs import assert_same, go, make_run, newest, recipe


def test_a_rank_that_halts(tmp_path, factory, undisturbed, capfd):
    run = make_run(tmp_path / "run", recipe())
    start = time.monotonic()
    code = go(run, factory, fault={"rank": 1, "kind": "halt", "point": "step", "count": 8}, timeout_seconds=5.0)
    assert code == 74
    # the bound on a collective, that on the answers of others, and the end of what is left
    assert time.monotonic() - start < 60
    said = capfd.readouterr().err
    assert re.search(r"rank 0: step \d+, (forward|backward) of micro batch 0, [\w.]+, in \w+ \(.+\.py:\d+\)", said), (
        said
    )
    assert said.count("rank 1: gone, or too busy to answer") == 1
    assert "megaspec: rank 1 did not end in time and was killed: it was stopped" in said
    step, _, _ = newest(run)
    assert 1 <= step < undisturbed[2].step
    assert go(run, factory) == 0
    assert_same(run, undisturbed[2])
