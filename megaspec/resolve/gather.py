"""Facts from disk: manifests of the data, which run folders exist, and the weights to begin with. Torch-free."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from megaspec.checkpoint.examine import examine, read_manifest
from megaspec.checkpoint.fallback import fallback_dir_of, looked_up_again, path_of_step, saved_anywhere
from megaspec.checkpoint.files import DiskError
from megaspec.checkpoint.folders import CHECKPOINTS, refuse_gone
from megaspec.checkpoint.format import Manifest
from megaspec.checkpoint.spec import InitSpec
from megaspec.core.errors import CheckpointError
from megaspec.core.frozen import AUTO
from megaspec.data.facts import data_facts, evaluation_facts
from megaspec.data.urls import RemoteData
from megaspec.hf.digest import folder_digest
from megaspec.hf.fits import fit_of
from megaspec.hf.folder import first_of, open_hf_folder
from megaspec.hf.names import weight_table
from megaspec.hf.table import family_of, read_model
from megaspec.recipe import Recipe
from megaspec.rules.run_facts import Facts, SetFacts, SourceFacts
from megaspec.spec import Spec
from megaspec_kernels.gone import without_gone

RUNS = Path("runs")


def gather_facts(recipe: Recipe, known: Sequence[RemoteData] = ()) -> Facts:
    """What the resolver has to know about a recipe's data and run folder. What is wrong with the data is told in
    `problems`, never raised. `known`: what lay at URLs when the run was resolved before (Spec.remote)."""
    data = data_facts(recipe.data, known=known)
    run_dir = str(free_run_dir(recipe.name))
    weights = source_of_weights(recipe.init)
    problems = list(data.problems)
    sets = {}
    # a URL may stand in several places
    remote = {record.url: record for record in data.remote}
    for name, facts in evaluation_facts(recipe.data, data, known=known).items():
        problems += facts.problems
        remote |= {record.url: record for record in facts.remote}
        if not facts.problems:
            sets[name] = SetFacts(facts.vocab_size, facts.samples["valid"])
    if data.problems:
        # a tokenizer may be known beside documents that can't be read
        return Facts(
            run_dir=run_dir,
            started_in=os.getcwd(),
            vocab_size=data.vocab_size,
            valid_sets=sets,
            weights=weights,
            problems=tuple(problems),
            remote=tuple(remote.values()),
        )
    return Facts(
        run_dir=run_dir,
        started_in=os.getcwd(),
        vocab_size=data.vocab_size,
        train_tokens=data.tokens["train"],
        train_samples=data.samples["train"],
        valid_tokens=data.tokens["valid"],
        valid_sets=sets,
        document_lengths=data.document_lengths,
        how_lengths=data.how_lengths,
        fingerprint=data.fingerprint,
        weights=weights,
        problems=tuple(problems),
        remote=tuple(remote.values()),
    )


def source_of_weights(init: InitSpec) -> SourceFacts | None:
    """What is known of the weights that a run is to begin with, without reading them. What is wrong with their folder
    is told in `problem`."""
    if init.from_hf is not None:
        source = SourceFacts("init.from_hf", init.from_hf)
        read = _hf_source
    elif init.load is not None:
        source = SourceFacts("init.load", init.load)
        read = _run_source
    else:
        return None
    try:
        return read(source, init)
    except DiskError:
        # of the disk, not of the recipe
        raise
    except CheckpointError as error:
        return replace(source, problem="; ".join(problem.message for problem in error.problems[:4]))


def _hf_source(source: SourceFacts, init: InitSpec) -> SourceFacts:
    with open_hf_folder(Path(source.path)) as folder:
        model = read_model(folder.config, f"{folder.path}/config.json")
        family = family_of(folder.config, source.path)
        table = weight_table(model.facts, family.names(model))
        problems = fit_of(folder, table).problems
        if problems:
            raise CheckpointError(first_of(problems))
    shapes = {name: ours.shape for name, ours in table.ours.items()}
    return replace(source, model=model, shapes=shapes, family=family.model_type)


def _run_source(source: SourceFacts, init: InitSpec) -> SourceFacts:
    folder = Path(source.path)
    manifest = saved_manifest(folder, init.step)
    try:
        spec = Spec.model_validate_json(json.dumps(without_gone(manifest.spec)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"step {manifest.step} holds no Spec that is read here: {key}: {first['msg']}") from None
    shapes = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith(("model/", "router/")):
            shapes[name] = tensor.shape
    family = None if spec.weights_from is None else spec.weights_from.family
    return replace(source, model=spec.model, shapes=shapes, digest=manifest.digest, step=manifest.step, family=family)


def saved_manifest(folder: Path, step: int | None) -> Manifest:
    """Of a run's checkpoint of a step; None: of the newest whose manifest and sizes are right. CheckpointError: there
    is none that is seen, or the newest may be where nobody can look."""
    fallback_dir = fallback_dir_of(folder)
    return looked_up_again(folder, fallback_dir, partial(_saved_manifest, folder, fallback_dir, step))


def _saved_manifest(folder: Path, fallback_dir: str | None, step: int | None) -> Manifest:
    if step is not None:
        return read_manifest(path_of_step(folder, fallback_dir, step, asked="init.step="), step)
    saved = saved_anywhere(folder, fallback_dir)
    saved.refuse_unseen_newest()
    damage = []
    for candidate in saved.candidates:
        manifest, problems = examine(candidate.path, candidate.step, deep=False)
        if manifest is not None and not problems:
            return manifest
        refuse_gone(candidate.path)
        damage += problems
    nothing = f"{folder / CHECKPOINTS} holds no checkpoint; give the folder of a run that has saved one"
    raise CheckpointError(damage or nothing)


def with_digest(facts: Facts) -> Facts:
    """The facts with which a run begins: every byte of its weights' folder is read. CheckpointError."""
    source = facts.weights
    if source is None or source.model is None or source.digest:
        return facts
    with open_hf_folder(Path(source.path)) as folder:
        return replace(facts, weights=replace(source, digest=folder_digest(folder)))


def free_run_dir(name: str) -> Path:
    """runs/<name>, or with the first number that makes it new: runs/<name>-2, -3, ..."""
    folder = RUNS / name
    number = 1
    while folder.exists():
        number += 1
        folder = RUNS / f"{name}-{number}"
    return folder


def planned_run_dir(recipe: Recipe) -> Path:
    """The run folder that a restarted job has to find again: the one that is set, else runs/<name>."""
    if recipe.run_dir == AUTO:
        return RUNS / recipe.name
    return Path(recipe.run_dir)
