"""A plugin of pytest for a quick look at long products of cases: `-p tests.kernels.drawn`.

Of each test those cases run in which every two values of two parameters meet at least once. Of tests of kernels that
also write fp8 those run in which every value is there once: what is computed is held by test_equations, and what is
cast by test_fp8_cast.py, with every two values each.
"""

from itertools import combinations

import pytest

FEW = 8
"""Cases of a test that all run."""


def values_of(item: pytest.Item) -> set[tuple]:
    """The values of a case, one and two at a time."""
    values = [(name, repr(value)) for name, value in item.callspec.params.items() if name != "device"]
    if item.originalname == "test_triton_writes_fp8":
        return {*combinations(values, 1)}
    return {*combinations(values, 1), *combinations(values, 2)}


def drawn(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Few cases in which all pairs of values are: one after the other that which has most of those that are missing."""
    values = {case: values_of(case) for case in cases}
    missing = set().union(*values.values())
    kept = set()
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        missing -= values[best]
        kept.add(best)
    return kept


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    of_tests: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        of_tests.setdefault((item.path, item.originalname), []).append(item)
    kept: set[pytest.Item] = set()
    for cases in of_tests.values():
        kept |= drawn(cases) if len(cases) > FEW else set(cases)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
