"""One pool of ranks for all parity tests of a session."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks
