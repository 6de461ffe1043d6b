"""A plugin of pytest for a quick look at long products of cases: `-p tests.kernels.drawn`.

Of each test those cases run in which every two values of two parameters meet at least once. Of tests that compare
with the bits of a reference, or of another kernel, those run in which every value is there once: what is computed is
held by test_equations, with every two values.
"""

from itertools import combinations

import pytest

FEW = 5
"""Cases of a test that all run."""

TO_THE_BIT = (
    "test_triton_writes_fp8",
    "test_triton_writes_fp8_of_groups",
    "test_every_implementation_makes_the_reference_s_bits",
    "test_every_implementation_makes_the_same_bits",
    "test_lines_have_the_reference_s_bits",
    "test_one_scale_for_all_is_known_before_and_what_is_seen_is_recorded",
    "test_the_kernel_is_the_reference",
)


def values_of(item: pytest.Item) -> set[tuple]:
    """The values of a case, one and two at a time."""
    values = [(name, repr(value)) for name, value in item.callspec.params.items() if name != "device"]
    if item.originalname in TO_THE_BIT:
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
