"""A spec.json from before an operation of kernels/ had a name is read with what its runs took."""

import json
from pathlib import Path

import pytest

from megaspec.core.errors import RecipeError
from megaspec.run_folder import read_run
from megaspec.spec import Spec
from megaspec_kernels.catalog import CATALOG
from tests.parity.cases import Case, spec_of
from tests.runtime.specs import make_run

LATER = (
    "attention_merge",
    "unpermute",
    "adamw",
    "linear",
    "norm",
    "gated",
    "rope",
    "fp8_cast",
    "scaled_product",
    "scaled_grouped",
)


def earlier(*, device: str, formats: dict[str, str]) -> Spec:
    content = json.loads(spec_of(Case(precision="bf16")).model_dump_json())
    content["device"], content["optim"]["formats"] = device, formats
    for name in LATER:
        del content["kernels"][name]
    return Spec.model_validate_json(json.dumps(content))


def test_every_operation_that_came_later_is_known():
    first = {"attention", "cross_entropy", "grouped"}
    missing = set(CATALOG) - first - set(LATER)
    assert missing == set(), "add it to LATER here, and what runs took before it to `taken` in megaspec/spec.py"


@pytest.mark.parametrize(
    ("device", "formats", "taken"),
    [
        ("cuda", {}, ("triton", "triton", "torch")),
        ("cuda", {"exp_avg": "bf16"}, ("triton", "triton", "triton")),
        ("cpu", {}, ("reference", "reference", "torch")),
        ("cpu", {"exp_avg_sq": "fp8"}, ("reference", "reference", "reference")),
    ],
    ids=str,
)
def test_names_follow_from_the_device_and_the_states(device: str, formats: dict[str, str], taken: tuple[str, ...]):
    kernels = earlier(device=device, formats=formats).kernels
    # linear layers were torch's, norms, gates and rotations plain; no earlier run computed in fp8
    assert tuple(getattr(kernels, name) for name in LATER) == (*taken, "torch", *("reference",) * 6)


def test_how_an_earlier_run_began_is_not_known():
    content = json.loads(spec_of(Case()).model_dump_json())
    del content["forked_from"]
    assert Spec.model_validate_json(json.dumps(content)).forked_from == "unknown"
    # of a version that noted the checkpoint and not the run
    content["forked_from"] = {"manifest": "0" * 64, "step": 4, "tokens": 100}
    assert Spec.model_validate_json(json.dumps(content)).forked_from.source == "unknown"


def test_what_the_resolver_forgot_is_not_filled():
    content = json.loads(spec_of(Case()).model_dump_json())
    content["kernels"]["adamw"] = "auto"
    with pytest.raises(ValueError, match=r"left open: kernels\.adamw"):
        Spec.model_validate_json(json.dumps(content))


@pytest.mark.parametrize("written", [None, 1, 3])
def test_a_run_of_another_format_is_refused_in_a_sentence(written: int | None, tmp_path: Path):
    run = make_run(tmp_path / "run")
    content = json.loads((run / "spec.json").read_text())
    del content["format_version"]
    content["model"] = {"kind": "llama", "n_layers": 2, "norm_eps": 1e-5}
    if written is not None:
        content["format_version"] = written
    (run / "spec.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError) as caught:
        read_run(run)
    (problem,) = caught.value.problems
    assert problem.code == "run-format"
    assert problem.message == (
        f"{run}/spec.json: format_version={written or 1}, this program reads 2; go on with the program that began "
        "the run (environment.json beside it says which), or start a new run with megaspec train"
    )
