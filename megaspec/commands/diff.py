"""`megaspec diff A B`: what two recipes, runs or checkpoints compute differently, and what they only do differently."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table

from megaspec.checkpoint.examine import read_manifest_at
from megaspec.checkpoint.files import open_folder
from megaspec.checkpoint.format import MANIFEST
from megaspec.commands.stated import Stated, stated
from megaspec.core.errors import CheckpointError, Problem, RecipeError
from megaspec.core.problems import show
from megaspec.core.terminal import escape, terminal
from megaspec.estimate.target import Target
from megaspec.rules.difference import Change, differences, verdict
from megaspec.run_folder import is_run, read_run, read_target, refuse_unfinished_fork
from megaspec.spec import Spec
from megaspec_kernels.gone import gone_kernels

_PARTS = ((True, "what is computed"), (False, "how"))


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    spec: Spec | None = None
    """Of a run or checkpoint."""
    target: Target | None = None
    """The machine that a run was resolved for."""
    recipe: Stated | None = None

    def resolved(self, other: Target | None) -> Spec:
        """Its Spec; a recipe is resolved for the machine of the other side, where that is a run."""
        if self.spec is not None:
            return self.spec
        assert self.recipe is not None, f"{self.name} is neither a run nor a recipe"
        if other is None:
            return self.recipe.spec()
        return replace(self.recipe, target=other).spec()


def add_parser(commands: Any) -> None:
    """The parser of `diff`."""
    text = "what two recipes, runs or checkpoints differ in: in what is computed, and in how"
    command = commands.add_parser("diff", help=text, description=text, allow_abbrev=False)
    what = 'recipe ("NAME a.b=c" changes it), YAML file, folder of a run or of a checkpoint'
    command.add_argument("a", metavar="A", help=what)
    command.add_argument("b", metavar="B", help=what)
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="more groups and recipes")


def run(args: argparse.Namespace) -> int:
    """Compare and print. Differences are an answer, not a failure: 0."""
    a = side(args.a, args.config_dir)
    b = side(args.b, args.config_dir)
    found = differences(a.resolved(b.target), b.resolved(a.target))
    if args.json:
        print(json.dumps(as_json(a, b, found), indent=1))
    else:
        print_changes(a, b, found)
    return 0


def side(text: str, config_dirs: Sequence[str | Path] = ()) -> Side:
    """What a word of the command line names. RecipeError, CheckpointError: nothing, or something damaged."""
    folder = Path(text)
    refuse_unfinished_fork(folder)
    if is_run(folder):
        return Side(text, read_run(folder).spec, read_target(folder))
    if os.path.lexists(folder / MANIFEST):
        return Side(text, _spec_of_checkpoint(folder), read_target(folder.parent.parent))
    if folder.is_dir() and "/" in text:
        what = "neither a run (spec.json) nor a checkpoint (manifest.json); give one, or the name of a recipe"
        raise RecipeError([Problem("", f"{text} holds {what}", code="run-missing")])
    name, *overrides = text.split()
    return Side(text, recipe=stated(name.removeprefix("recipe="), overrides, config_dirs))


def as_json(a: Side, b: Side, found: list[Change]) -> dict[str, Any]:
    """What a program reads."""
    parts: dict[str, list[dict[str, Any]]] = {"experiment": [], "mapping": []}
    for change in found:
        part = "experiment" if change.is_experiment else "mapping"
        parts[part].append({"key": change.key, "a": change.was, "b": change.now})
    return {"a": a.name, "b": b.name, "verdict": verdict(found), **parts}


def print_changes(a: Side, b: Side, found: list[Change]) -> None:
    """A table for what is computed, one for how, and the verdict."""
    out = terminal()
    for is_experiment, title in _PARTS:
        changes = [change for change in found if change.is_experiment == is_experiment]
        if not changes:
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for heading in ("key", a.name, b.name):
            table.add_column(escape(heading), overflow="fold")
        for change in changes:
            table.add_row(change.key, escape(_words(change.was)), escape(_words(change.now)))
        out.print(table)
    out.print(verdict(found))


def _words(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value)
    return show(value)


def _spec_of_checkpoint(folder: Path) -> Spec:
    descriptor = open_folder(folder)
    try:
        manifest = read_manifest_at(folder, descriptor)
    finally:
        os.close(descriptor)
    try:
        return Spec.model_validate_json(json.dumps(manifest.spec))
    except (ValidationError, AssertionError) as error:
        gone = ", ".join(f"{one.key}={show(one.name)} is gone" for one in gone_kernels(manifest.spec))
        first = gone or str(error).splitlines()[0]
        raise CheckpointError(f"{folder / MANIFEST} holds no Spec that this version reads: {first}") from None
