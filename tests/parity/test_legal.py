"""What the harness runs, the resolver accepts, and makes the same Spec of it."""

import json

import pytest

from megaspec.core.errors import RecipeError
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from tests.parity.cases import content_of, spec_of
from tests.parity.sets import DEFAULT, SLOW, cases_of

TARGET = Target(cores=8, versions={"torch": "2.13.0+cpu"})
OURS = {"segments", "decisions", "samples_moved"}


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_case_resolves_to_what_is_run(name: str) -> None:
    refused = []
    for case in cases_of(name):
        recipe = Recipe.model_validate_json(json.dumps(content_of(case)))
        try:
            resolved = resolve(recipe, TARGET, Facts(run_dir="parity"))
        except RecipeError as error:
            refused.append(f"{case}: {error}")
            continue
        run = spec_of(case)
        # of documents a run takes what the data hold, and a plan what is known of their lengths
        run = run.model_copy(
            update={"data": run.data.model_copy(update={"document_lengths": resolved.data.document_lengths})}
        )
        assert resolved.model_dump(exclude=OURS) == run.model_dump(exclude=OURS), str(case)
    assert not refused, "\n".join(refused)
