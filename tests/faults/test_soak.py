"""Five minutes with a fault every 30 s; an hour of it: tests/benchmarks/bench_soak.py."""

import pytest

from tests.faults.soak import soak


@pytest.mark.slow
def test_five_minutes(tmp_path, factory, tell):
    found = soak(tmp_path, factory, minutes=5.0, every=30.0)
    tell(f"soak: {found}")
    assert sum(found.faults.values()) >= 8
    assert found.attempts > 6
    # a megabyte in 1,000 steps
    assert found.supervisor_slope < 1.0
    assert found.rank_slope < 1.0
    assert abs(found.supervisor_files) <= 2
    # a cold start takes seconds where others work on the same cores
    assert found.goodput > 0.3
