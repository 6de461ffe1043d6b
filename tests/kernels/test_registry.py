"""The catalog that the resolver reads and the registry of functions are the same list."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

import megaspec
import megaspec_kernels
from megaspec_kernels.catalog import CATALOG, Use, choose, unmet
from megaspec_kernels.registry import REGISTRY, kernels_of
from megaspec_kernels.spec import KernelsSpec

ROOT = Path(__file__).parents[2]
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
    names = dict.fromkeys(CATALOG, "reference") | {"attention": "sdpa", "cross_entropy": "chunked"}
    kernels = kernels_of(KernelsSpec(**names, compile="none"))
    for operation in CATALOG:
        # adamw is the optimizer's, which looks it up for the device of each part
        if operation != "adamw":
            assert getattr(kernels, operation) is REGISTRY[operation][names[operation]], operation


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
    assert choose("adamw", device="cuda", sm=90) == "triton"
    assert choose("adamw", device="cpu", sm=0) == "torch"
    assert choose("adamw", device="cuda", sm=90, use=narrow) == "triton"
    assert choose("adamw", device="cpu", sm=0, use=narrow) == "reference"
    assert choose("grouped", device="cuda", sm=90, use=Use(precision="bf16", widths=(2048, 768))) == "torch"
    assert choose("grouped", device="cuda", sm=90, use=Use(precision="fp32", widths=(2048, 768))) == "reference"


def test_what_is_missing_is_named() -> None:
    assert unmet("cross_entropy", "triton", device="cpu", sm=0) == "needs cuda, the target is cpu"
    assert unmet("cross_entropy", "triton", device="cuda", sm=75) == "needs sm80, this GPU is sm75"
    packages = ("flash-attn-3", "flash-attn-4")
    # 3 is built for Hopper's own instructions, 4 compiles for the GPU at hand
    assert unmet("attention", "flash_attn_3", device="cuda", sm=90, packages=packages) is None
    assert unmet("attention", "flash_attn_3", device="cuda", sm=100, packages=packages) == (
        "runs up to sm90, this GPU is sm100"
    )
    assert unmet("attention", "flash_attn", device="cuda", sm=100, packages=packages) is None
    assert unmet("attention", "sdpa", device="cpu", sm=0, use=Use(attention_dropout=True)) == "has no attention dropout"
    assert unmet("adamw", "torch", device="cuda", sm=90, use=Use(narrow_states=True)) == "keeps states in 32 bits"
    assert unmet("cross_entropy", "triton", device="cuda", sm=90, use=Use(precision="fp64")) == (
        "needs fp32, bf16, fp16 or fp8, the model is in fp64"
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
            # they share what they are made of
            if file.name.startswith("triton"):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megaspec_kernels"):
                    names = {f"{node.module}.{one.name}" for one in node.names}
                    if any(".triton" in name for name in names):
                        found[file.relative_to(root).as_posix()] = names
    assert set(found) == {"registry.py"}


@pytest.mark.parametrize(("choice", "compiled"), [("auto", "auto"), ("reference", "none")])
def test_a_choice_names_every_operation(choice: str, compiled: str) -> None:
    said = yaml.safe_load((ROOT / "conf" / "kernels" / f"{choice}.yaml").read_text())
    assert said == dict.fromkeys(CATALOG, choice) | {"compile": compiled}


def test_the_readme_lists_every_implementation() -> None:
    """Best first, as in the catalog."""
    text = (ROOT / "kernels" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+` ?)+) \|", text, re.MULTILINE))
    listed = {operation: re.findall(r"`(\w+)`", cell) for operation, cell in rows.items()}
    assert listed == {operation: list(one.implementations) for operation, one in CATALOG.items()}


def test_the_readme_lists_the_folder_of_every_operation() -> None:
    text = (ROOT / "kernels" / "megaspec_kernels" / "README.md").read_text()
    folders = re.findall(r"`(\w+)/`", text)
    assert sorted(folders) == sorted(CATALOG)


@pytest.mark.parametrize("operation", CATALOG)
def test_every_operation_has_a_test_of_its_own(operation: str) -> None:
    assert (Path(__file__).parent / f"test_{operation}.py").exists()
