"""Numbers and times of a page in words. Torch-free."""

import math
from datetime import UTC, datetime
from typing import Any

from megaspec.core.units import bytes_in_words, seconds_in_words
from megaspec.report.history import known_number

UNKNOWN = "–"
_LAST_YEAR_SECONDS = 253_402_300_799
"""The end of the year 9999 in seconds since 1970."""


def in_figures(value: Any) -> str:
    """`3.1416`, `12,345`, `2.1e-05`, `nan`; a dash for what is no number."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    number = known_number(value)
    if number is None:
        return UNKNOWN
    if number != 0 and (abs(number) >= 1e9 or abs(number) < 1e-3):
        return f"{number:.3g}"
    if abs(number) >= 1000 or number == round(number):
        return f"{number:,.0f}"
    return f"{number:.5g}"


def in_seconds(value: Any) -> str:
    """`12.35 s`, `850.0 ms`."""
    number = known_number(value)
    return UNKNOWN if number is None else seconds_in_words(number)


def in_bytes(value: Any) -> str:
    """`79.6 GiB`."""
    number = known_number(value)
    return UNKNOWN if number is None else bytes_in_words(number)


def in_percent(value: Any) -> str:
    """`41.3 %`, of a share."""
    number = known_number(value)
    return UNKNOWN if number is None else f"{100 * number:.1f} %"


def beside_plan(value: float | None, planned: float | None) -> str:
    """`+2.1 %`: how far a measurement is above the plan."""
    if value is None or not planned:
        return UNKNOWN
    return f"{100 * (value / planned - 1):+.1f} %"


def at_time(value: Any) -> str:
    """Seconds since 1970 as a day and a time, UTC."""
    number = known_number(value)
    if number is None or not 0 <= number <= _LAST_YEAR_SECONDS:
        return UNKNOWN
    return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%d %H:%M:%S")


def in_words(value: Any) -> str:
    """Any value of a file, on its way into a page: lists and objects as they would stand in a recipe."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(in_words(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {in_words(one)}" for name, one in value.items())
    if isinstance(value, float):
        return in_figures(value)
    return str(value)
