"""What measurements of earlier code are held to."""

from collections.abc import Iterator

import pytest

from tests.estimate.earlier import earlier_code


@pytest.fixture
def before() -> Iterator[None]:
    """See earlier.py."""
    with earlier_code():
        yield
