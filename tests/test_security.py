"""SECURITY.md's claims: each names tests that are there, and its figures are those of the tests."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import test_canaries
from tests.launchers import test_run_secret
from tests.log import test_webhook
from tests.report import test_report

ROOT = Path(__file__).parents[1]


def cases(test: Callable[..., Any]) -> int:
    """Of a test with one list of them."""
    [mark] = test.pytestmark
    return len(mark.args[1])


def canaries() -> int:
    in_words = sum(form.count("{}") for form in test_canaries.WORDS)
    return len(test_canaries.VARIABLES) + len(test_canaries.ADDRESSES) + in_words


COUNTED = {
    "5 values that were never signed": cases(test_run_secret.test_what_was_never_signed_is_refused),
    "20 planted": canaries(),
    "3 answers": cases(test_webhook.test_an_address_that_does_not_take_it_is_told_without_its_name),
    "3 addresses": cases(test_webhook.test_an_address_that_cannot_be_reached_is_told_without_its_name),
    "5 that are none": len(test_webhook.NO_ADDRESSES),
    "5 hostile texts": len(test_report.HOSTILE),
    "9 kinds of broken lines": len(test_report.BROKEN_LINES),
    # the test itself asserts more than 200
    "200 single-bit changes": 200,
}


def rows() -> list[list[str]]:
    """Claim, what was tried, tests."""
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and "tests/" in cells[2]:
            found.append(cells)
    return found


@pytest.mark.parametrize("words", COUNTED)
def test_a_figure_is_the_tests(words):
    assert int(words.partition(" ")[0]) == COUNTED[words]
    assert sum(words in tried for _, tried, _ in rows()) == 1, f"SECURITY.md does not say {words!r} once"


def test_every_figure_is_counted():
    said = [number for _, tried, _ in rows() for number in re.findall(r"(?<![\w-])\d+(?![\w-])", tried)]
    # exit codes are no counts
    counts = [number for number in said if number not in ("64", "74")]
    assert sorted(counts) == sorted(words.partition(" ")[0] for words in COUNTED)


def test_every_claim_names_tests_that_are_there():
    found = rows()
    assert len(found) >= 14
    for claim, _, tests in found:
        for path in re.findall(r"`(tests/[^`]+)`", tests):
            assert (ROOT / path).exists(), f"{claim}: {path}"
