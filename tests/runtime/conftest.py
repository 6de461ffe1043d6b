"""Ranks of these tests: a pool that runs parts of the runtime, and a factory for whole launches."""

from collections.abc import Iterator

import pytest

from megaspec_launchers.local import PRELOADED
from tests.ranks import RankPool
from tests.warm import WarmFactory


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(timeout=60) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def factory() -> Iterator[WarmFactory]:
    with WarmFactory((*PRELOADED, "tests.runtime.lives")) as made:
        yield made
