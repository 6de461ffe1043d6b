"""The arithmetic behind exposed communication."""

from megaspec.profiling.intervals import Where, union, where


def test_union_merges_what_touches() -> None:
    assert union([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def test_messages_beside_arithmetic_are_not_exposed() -> None:
    found = where([(0, 4_000), (6_000, 8_000)], [(2_000, 5_000), (9_000, 10_000)], steps=1)
    assert found == Where(step_ms=10.0, compute_ms=6.0, messages_ms=4.0, exposed_ms=2.0, idle_ms=2.0)
    assert where([], [], steps=1) == Where(0, 0, 0, 0, 0)
