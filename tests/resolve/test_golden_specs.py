"""Every shipped recipe resolves to the Spec that was last looked at; `make golden` writes it anew."""

import json

import pytest

from tests.golden_specs import FOLDER, resolved

RESOLVED = resolved()


def test_no_golden_spec_is_missing_or_left_over():
    assert {p.name for p in FOLDER.glob("*.json")} == set(RESOLVED)


@pytest.mark.parametrize("name", RESOLVED)
def test_spec(name):
    assert json.loads((FOLDER / name).read_text()) == RESOLVED[name]
