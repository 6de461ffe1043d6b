"""Long lists of cases, half of which run by default."""

from collections.abc import Sequence
from typing import Any

import pytest


def halved(cases: Sequence[Any]) -> list[Any]:
    """The cases, every second one marked slow: where others, as in tests/parity, hold the same."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (i % 2)) for i, case in enumerate(cases)]
