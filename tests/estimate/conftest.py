"""What measurements of earlier code are held to."""

from collections.abc import Iterator

import pytest

from tests.estimate.earlier import tables_made_whole


@pytest.fixture
def tables_before() -> Iterator[None]:
    """See earlier.py."""
    with tables_made_whole():
        yield
