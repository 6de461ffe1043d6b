"""The resolved Spec of every shipped recipe on two machines: what a change of a default or a rule shows up in."""

import json
from pathlib import Path
from typing import Any

from megaspec.compose import compose
from megaspec.resolve.facts import Facts
from megaspec.resolve.resolver import resolve
from megaspec.resolve.target import Target
from megaspec.search import SearchPath

FOLDER = Path(__file__).parent / "golden" / "specs"
TARGETS = {
    "cpu": Target(cores=2, versions={"torch": "2.13.0+cpu"}),
    "h200": Target(gpus=8, gpu="NVIDIA H200", sm=90, cores=64, versions={"torch": "2.13.0", "tensorboard": "2.21.0"}),
}


def resolved() -> dict[str, dict[str, Any]]:
    """File name -> Spec as plain data."""
    return {
        f"{name}-{machine}.json": json.loads(
            resolve(compose(name).recipe, target, Facts(run_dir=f"runs/{name}")).model_dump_json()
        )
        for name in SearchPath().choices("recipe")
        for machine, target in TARGETS.items()
    }
