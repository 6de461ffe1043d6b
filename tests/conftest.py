"""Lines that tests have to say: they stand together at the end, whichever worker ran the test."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool

Tell = Callable[[str], None]
_PROPERTY = "tell"


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Says a line in the summary."""
    return lambda line: request.node.user_properties.append((_PROPERTY, line))


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[RankPool]:
    """Ranks on GPUs, one each."""
    # blocks are compiled while the others wait
    with RankPool(device="cuda", timeout=300) as ranks:
        yield ranks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    done = [one for reports in terminalreporter.stats.values() for one in reports if getattr(one, "when", "") == "call"]
    lines = [line for one in done for name, line in one.user_properties if name == _PROPERTY]
    if lines:
        terminalreporter.section("what tests say")
        for line in lines:
            terminalreporter.line(line)
