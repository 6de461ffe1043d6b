"""Ranks on GPUs for these tests."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    # blocks are compiled while the others wait
    with RankPool(device="cuda", timeout=300) as ranks:
        yield ranks
