"""What measurements of earlier code are held to."""

from collections.abc import Iterator

import pytest

from megaspec.estimate import step_time
from tests.estimate.earlier import earlier_code


@pytest.fixture
def before() -> Iterator[None]:
    """See earlier.py."""
    with earlier_code():
        yield


@pytest.fixture
def at_the_tables_clock(monkeypatch) -> None:
    """Products and attention take what was measured of them, whatever else a step does: see estimate/power.py."""
    monkeypatch.setattr(step_time, "sustained", lambda load: 1.0)
