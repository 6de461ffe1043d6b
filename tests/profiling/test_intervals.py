"""Arithmetic on intervals: exposed communication, and time shared out among kinds."""

import random
from collections import Counter

import pytest

from megaspec.profiling.intervals import Span, Where, shared_out, union, where, within, without
from megaspec.profiling.kinds import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENT_WISE,
    IDLE,
    KINDS,
    MATRIX_PRODUCTS,
    OTHER,
)


def test_union_merges_what_touches() -> None:
    assert union([(5, 6), (0, 2), (2, 3), (1, 2)]) == [(0, 3), (5, 6)]


def test_messages_beside_arithmetic_are_not_exposed() -> None:
    found = where([(0, 4_000), (6_000, 8_000)], [(2_000, 5_000), (9_000, 10_000)], steps=1)
    assert found == Where(step_ms=10.0, compute_ms=6.0, messages_ms=4.0, exposed_ms=2.0, idle_ms=2.0)
    assert where([], [], steps=1) == Where(0, 0, 0, 0, 0)


def test_parts_inside_and_outside_of_windows() -> None:
    assert within([(0, 4), (6, 9)], [(2, 7), (8, 20)]) == [(2, 4), (6, 7), (8, 9)]
    assert without([(0, 10)], [(2, 3), (5, 7), (9, 12)]) == [(0, 2), (3, 5), (7, 9)]
    assert without([(0, 2)], []) == [(0, 2)]


def test_every_moment_counts_once() -> None:
    spans = [
        Span(0, 4, MATRIX_PRODUCTS),
        Span(2, 4, ATTENTION),  # beside a product: half of it each
        Span(3, 6, COPIES),  # alone from 4 on
        Span(5, 9, COMMUNICATION),  # exposed from 6 on
        Span(11, 30, ELEMENT_WISE),  # cut off at the window's end
        Span(8, 8, OTHER),
    ]
    found = shared_out(spans, [(0, 10), (12, 14)])
    expected = {MATRIX_PRODUCTS: 3.0, ATTENTION: 1.0, COPIES: 2.0, COMMUNICATION: 3.0, IDLE: 1.0, ELEMENT_WISE: 2.0}
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(12)


@pytest.mark.parametrize("seed", range(20))
def test_kinds_add_up_to_the_windows_and_to_what_a_moment_by_moment_count_says(seed: int) -> None:
    draw = random.Random(seed)
    spans = []
    for _ in range(30):
        start = draw.randrange(100)
        spans.append(Span(start, start + draw.randrange(1, 15), draw.choice(KINDS[:-1])))
    windows = [(5, 40), (50, 90)]
    expected: Counter[str] = Counter()
    for moment in [*range(5, 40), *range(50, 90)]:
        here = [one.kind for one in spans if one.start <= moment < one.end]
        computed = [kind for kind in here if kind not in (COPIES, COMMUNICATION)]
        counted = computed or [COPIES for kind in here if kind == COPIES] or here or [IDLE]
        for kind in counted:
            expected[kind] += 1 / len(counted)
    found = shared_out(spans, windows)
    assert found == pytest.approx(dict(expected))
    assert sum(found.values()) == pytest.approx(75)
