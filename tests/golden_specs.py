"""The resolved Spec of every shipped recipe: what a change of a default or a rule shows up in.

A recipe that says its GPUs is resolved for them, the others for two cores and for eight H200.
"""

import json
from pathlib import Path
from typing import Any

from megaspec.compose.compose import compose
from megaspec.compose.search_path import SearchPath
from megaspec.core.errors import MegaspecError
from megaspec.core.frozen import AUTO
from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.spec import Spec

FOLDER = Path(__file__).parent / "golden" / "specs"
# Of recipes that name no GPUs.
ENDINGS = ("-cpu", "-h200")
CPU = Target(cores=2, versions={"torch": "2.13.0+cpu"})
VERSIONS = {"torch": "2.13.0", "tensorboard": "2.21.0"}
GPUS = {
    "A100-80": Target(gpu="NVIDIA A100-SXM4-80GB", sm=80, gpu_memory=81920 * 2**20, cores=64, versions=VERSIONS),
    "H100": Target(gpu="NVIDIA H100 80GB HBM3", sm=90, gpu_memory=81559 * 2**20, cores=64, versions=VERSIONS),
    "H200": Target(gpu="NVIDIA H200", sm=90, gpu_memory=143771 * 2**20, cores=64, versions=VERSIONS),
}


def targets(recipe: Recipe) -> dict[str, Target]:
    """File ending -> machine that a recipe is resolved for."""
    ranks = recipe.launcher.ranks
    if ranks == AUTO:
        return {"-cpu": CPU, "-h200": GPUS["H200"].model_copy(update={"gpus": 8})}
    hardware = recipe.about.hardware
    assert hardware is not None, (
        f"launcher.ranks={ranks} without about.hardware: its golden Spec is for the GPUs it names"
    )
    assert hardware in GPUS, f"about.hardware={hardware} is not in GPUS of tests/golden_specs.py; add it"
    return {"": GPUS[hardware].model_copy(update={"gpus": ranks})}


def golden_cases() -> list[tuple[str, str]]:
    """Recipe and file ending of every golden file: what `resolved` makes, without composing anything."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        ending = next((one for one in ENDINGS if path.stem.endswith(one)), "")
        found.append((path.stem.removesuffix(ending), ending))
    return found


def resolved() -> dict[str, dict[str, Any]]:
    """File name -> Spec as plain data."""
    found = {}
    for name in SearchPath().choices("recipe"):
        for ending, spec in resolved_of(name).items():
            found[f"{name}{ending}.json"] = json.loads(spec.model_dump_json())
    return found


def resolved_of(name: str) -> dict[str, Spec]:
    """File ending -> Spec of a recipe. What it raises names the recipe."""
    try:
        recipe = compose(name).recipe
        facts = Facts(run_dir=f"runs/{name}")
        return {ending: resolve(recipe, target, facts) for ending, target in targets(recipe).items()}
    except (MegaspecError, AssertionError) as error:
        error.add_note(f"golden Spec of recipes/{name}.yaml")
        raise
