"""The catalog that the resolver reads and the registry of functions are the same list."""

import ast
from pathlib import Path
from typing import get_args

import pytest
import yaml

import megaspec
import megaspec_kernels
from megaspec_kernels.catalog import CATALOG, Use, choose, unmet
from megaspec_kernels.registry import REGISTRY, kernels_of
from megaspec_kernels.spec import KernelsSpec

EVERYTHING = Use(attention_dropout=True, precision="fp64", widths=(7,), narrow_states=True)


def test_catalog_and_registry_name_the_same_implementations() -> None:
    assert {op: set(one.implementations) for op, one in CATALOG.items()} == {op: set(r) for op, r in REGISTRY.items()}


@pytest.mark.parametrize("operation", CATALOG)
def test_the_spec_offers_what_the_catalog_has(operation: str) -> None:
    literal = get_args(KernelsSpec.model_fields[operation].annotation)[0]
    assert set(get_args(literal)) == set(CATALOG[operation].implementations)


@pytest.mark.parametrize("operation", CATALOG)
def test_every_operation_has_a_reference_that_runs_everywhere(operation: str) -> None:
    for device, sm in (("cpu", 0), ("cuda", 70), ("cuda", 90)):
        assert unmet(operation, "reference", device=device, sm=sm, use=EVERYTHING) is None


def test_names_are_looked_up() -> None:
    kernels = kernels_of(
        KernelsSpec(
            attention="sdpa",
            cross_entropy="chunked",
            grouped="reference",
            unpermute="reference",
            attention_merge="reference",
            compile="none",
        )
    )
    assert kernels.attention is REGISTRY["attention"]["sdpa"]
    assert kernels.cross_entropy is REGISTRY["cross_entropy"]["chunked"]
    assert kernels.grouped is REGISTRY["grouped"]["reference"]
    assert kernels.unpermute is REGISTRY["unpermute"]["reference"]
    assert kernels.attention_merge is REGISTRY["attention_merge"]["reference"]


def test_the_choice_follows_the_target() -> None:
    assert choose("attention", device="cpu", sm=0) == "sdpa"
    assert choose("attention", device="cuda", sm=90, use=Use(attention_dropout=True)) == "reference"
    assert choose("cross_entropy", device="cuda", sm=90) == "triton"
    assert choose("cross_entropy", device="cuda", sm=75) == "chunked"
    assert choose("cross_entropy", device="cpu", sm=0) == "chunked"
    assert choose("grouped", device="cpu", sm=0) == "reference"
    for operation in ("unpermute", "attention_merge"):
        assert choose(operation, device="cpu", sm=0) == choose(operation, device="cuda", sm=75) == "reference"
        assert choose(operation, device="cuda", sm=90) == "triton"
    narrow = Use(precision="bf16", narrow_states=True)
    assert choose("adamw", device="cuda", sm=90) == choose("adamw", device="cpu", sm=0) == "torch"
    assert choose("adamw", device="cuda", sm=90, use=narrow) == "triton"
    assert choose("adamw", device="cpu", sm=0, use=narrow) == "reference"
    assert choose("grouped", device="cuda", sm=90, use=Use(precision="bf16", widths=(2048, 768))) == "torch"
    assert choose("grouped", device="cuda", sm=90, use=Use(precision="fp32", widths=(2048, 768))) == "reference"


def test_what_is_missing_is_named() -> None:
    assert unmet("cross_entropy", "triton", device="cpu", sm=0) == "needs cuda, the target is cpu"
    assert unmet("cross_entropy", "triton", device="cuda", sm=75) == "needs sm80, this GPU is sm75"
    assert unmet("attention", "sdpa", device="cpu", sm=0, use=Use(attention_dropout=True)) == "has no attention dropout"
    assert unmet("adamw", "torch", device="cuda", sm=90, use=Use(narrow_states=True)) == "keeps states in 32 bits"
    assert unmet("cross_entropy", "triton", device="cuda", sm=90, use=Use(precision="fp64")) == (
        "needs fp32 or bf16 or fp16 or fp8, the model is in fp64"
    )
    assert unmet("grouped", "torch", device="cuda", sm=90, use=Use(precision="fp32")) == (
        "needs bf16, the model is in fp32"
    )
    assert unmet("grouped", "torch", device="cuda", sm=90, use=Use(precision="bf16", widths=(64, 12))) == (
        "needs matrices whose widths are multiples of 8, one is 12 wide"
    )


def test_nothing_but_the_registry_reaches_a_triton_kernel() -> None:
    """So that kernels=reference runs none: what a recipe names is all that is looked up."""
    found = {}
    for package in (megaspec, megaspec_kernels):
        root = Path(package.__file__).parent
        for file in root.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megaspec_kernels"):
                    names = {f"{node.module}.{one.name}" for one in node.names}
                    if any(".triton" in name for name in names):
                        found[file.relative_to(root).as_posix()] = names
    assert set(found) == {"registry.py"}


def test_the_choice_reference_takes_the_reference_of_every_operation() -> None:
    preset = dict.fromkeys(CATALOG, "reference") | {"compile": "none"}
    path = Path(__file__).parents[2] / "conf" / "kernels" / "reference.yaml"
    assert yaml.safe_load(path.read_text()) == preset
