"""One warm process for all ranks of these tests, and the run that nothing disturbed."""

import pytest

from megaspec_launchers.local import PRELOADED
from tests.faults.runs import go, make_run, recipe, result
from tests.warm import WarmFactory


@pytest.fixture(scope="session")
def factory():
    with WarmFactory((*PRELOADED, "tests.faults.entry")) as made:
        yield made


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, factory):
    """Results by tensor-parallel degree of two ranks."""
    found = {}
    for tp in (1, 2):
        run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", recipe(tp=tp))
        assert go(run, factory) == 0
        found[tp] = result(run)
    return found
