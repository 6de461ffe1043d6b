"""Five minutes with a fault every 30 s; an hour of it: tests/benchmarks/bench_soak.py."""

import pytest

from tests.faults.soak import soak


@pytest.mark.slow
def test_five_minutes(tmp_path, factory, tell):
    found = soak(tmp_path, factory, minutes=5.0, every=30.0)
    tell(f"soak: {found}")
    assert sum(found.faults.values()) >= 8
    assert found.attempts > 6
    # where others work on the same cores some 1,000 steps are done, too few for a slope: what is loaded in the first
    # attempts, once, outweighs it
    assert found.supervisor_growth < 3.0
    # a megabyte in 1,000 steps
    assert found.rank_slope < 1.0
    assert found.supervisor_files <= 2
    # a cold start takes ten seconds where others work on the same cores
    assert found.goodput > 0.2
