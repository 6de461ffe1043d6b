"""The folder of a run: recipe.json, target.json and spec.json, made, changed and read. Torch-free."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megaspec.checkpoint.folders import CHECKPOINTS, Candidate, candidates, step_name
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.verify import examine
from megaspec.core.errors import CheckpointError, Problem, RecipeError
from megaspec.data.files import publish, write_atomically, write_error
from megaspec.data.spec import IndexedSpec
from megaspec.plugins import demand
from megaspec.recipe import Recipe
from megaspec.resolve.target import Target
from megaspec.spec import Spec

# What an interrupted `train` may leave before spec.json makes it a run.
_UNFINISHED = ("lock", "recipe.json", "target.json")
RECIPE, TARGET, SPEC = "recipe.json", "target.json", "spec.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class SavedRun:
    """What a run folder says about its run."""

    folder: Path
    recipe: dict[str, Any]
    """The recipe as it was composed."""
    spec: Spec
    """With the folder where it is now as run_dir."""


def is_run(folder: Path) -> bool:
    """True for a folder in which a run was made."""
    return (folder / SPEC).is_file()


def make_folder(folder: Path) -> None:
    """A new run folder, or an empty one that is there. RecipeError: it is in use. WriteError: it can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = all(f.name in _UNFINISHED or f.name.endswith(".tmp") for f in folder.iterdir())
    except FileExistsError:
        is_empty = False
    except OSError as error:
        raise write_error(folder, error) from None
    if not is_empty:
        what = f"holds a run; megaspec resume {folder} goes on with it" if is_run(folder) else "exists and is not empty"
        text = f"run_dir={folder} {what}; choose another run_dir or name"
        raise RecipeError([Problem("run_dir", text, code="run-exists")])


def write_run(folder: Path, recipe: Recipe, target: Target, spec: Spec) -> None:
    """Writes the three files, each whole or not at all, spec.json last: with it the run exists. Raises WriteError."""
    for name, content in ((RECIPE, recipe), (TARGET, target), (SPEC, spec)):
        write_atomically(folder / name, [(content.model_dump_json(indent=1) + "\n").encode()])


def read_run(folder: Path) -> SavedRun:
    """The run of a folder. RecipeError: there is none, or its files are damaged."""
    if not is_run(folder):
        nearest = "; give the folder that `megaspec train` named" if folder.is_dir() else "; there is no such folder"
        raise RecipeError([Problem("", f"{folder} holds no run (no {SPEC}){nearest}", code="run-missing")])
    recipe, saved = _read_json(folder / RECIPE), _read_json(folder / SPEC)
    demand(saved, str(folder))
    try:
        spec = Spec.model_validate_json(json.dumps(saved | {"run_dir": str(folder)}))
    except (ValidationError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise RecipeError([Problem("", f"{folder / SPEC} is damaged: {first}", code="run-damaged")]) from None
    has_blend = isinstance(spec.data, IndexedSpec) and isinstance(recipe.get("data"), dict)
    if "data_order" not in saved and has_blend:
        # The Spec was brought up to today's rules as it was read; the recipe says its blend in the same words.
        recipe["data"]["blend"] = [part.model_dump(mode="json") for part in spec.data.blend]
    return SavedRun(folder, recipe, spec)


def newest_step(folder: Path) -> int:
    """The step of a run's newest checkpoint, good or not; 0 when there is none."""
    return max((c.step for c in candidates(folder / CHECKPOINTS)), default=0)


def newest_good(source: Path) -> tuple[Candidate, Manifest]:
    """The newest checkpoint of a run that is good in every byte, for a fork. CheckpointError: there is none."""
    damage: list[str] = []
    for candidate in candidates(source / CHECKPOINTS):
        manifest, problems = examine(candidate.path, candidate.step, deep=True)
        if manifest is not None and not problems:
            return candidate, manifest
        damage += problems
    what = "; ".join(damage) if damage else "no checkpoint was saved there"
    raise CheckpointError(f"{source}: nothing to fork from: {what}")


def copy_checkpoint(candidate: Candidate, target: Path) -> None:
    """Copies a checkpoint into another run's folder, whole or not at all. WriteError: no room, or it is gone."""
    place = target / CHECKPOINTS / step_name(candidate.step)
    incoming = place.with_name(".incoming")
    try:
        shutil.copytree(candidate.path, incoming)
        publish(incoming, place)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(place.parent, ignore_errors=True)
        cause = error if isinstance(error, OSError) and error.errno else OSError(str(error))
        raise write_error(place, cause, _size(candidate.path)) from None


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError([Problem("", f"{path} can't be read: {error}", code="run-damaged")]) from None
    if not isinstance(content, dict):
        raise RecipeError([Problem("", f"{path} is damaged: it holds no object", code="run-damaged")])
    return content
