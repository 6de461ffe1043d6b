"""Tiny recipes, and the Specs and run folders made from them."""

import json
from pathlib import Path
from typing import Any

from megaspec.estimate.target import Target
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import make_folder, write_run
from megaspec.spec import Spec

TARGET = Target(cores=2)
BASE: dict[str, Any] = {
    "name": "tiny",
    "model": {"kind": "decoder", "n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ffn": 48},
    "precision": {"kind": "fp64"},
    "data": {"kind": "synthetic", "vocab_size": 37, "seq_len": 16, "masked": 0.2},
    "optim": {"kind": "adamw", "lr": 1e-2, "schedule": {"warmup_steps": 4}},
    "parallelism": {
        "tp": 1,
        "dp_replicate": 1,
        "dp_shard": 1,
        "pipeline": {"schedule": "1f1b", "micro_batch_group": 1},
    },
    "train": {"steps": 20, "global_batch": 4},
    "checkpoint": {"keep": 100},
    "log": {"console": "quiet", "tensorboard": False},
}
SGD = {"kind": "sgd", "lr": 5e-2, "weight_decay": 0.1, "schedule": {"warmup_steps": 4}}


def recipe(changes: dict[str, Any] | None = None) -> Recipe:
    """BASE with other values, by dotted path; a dictionary replaces what is there."""
    content = json.loads(json.dumps(BASE | {"model": BASE["model"] | {"vocab_size": 37}}))
    for path, value in (changes or {}).items():
        *sections, name = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return Recipe.model_validate_json(json.dumps(content))


def spec(changes: dict[str, Any] | None = None, target: Target = TARGET) -> Spec:
    """The Spec of `recipe(changes)`."""
    return resolve(recipe(changes), target, Facts(run_dir="run"))


def make_run(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A run folder that is ready to start."""
    made = recipe(changes)
    make_folder(folder)
    write_run(folder, made, TARGET, resolve(made, TARGET, Facts(run_dir=str(folder))))
    return folder
