"""Small runs to break, and the measure of whether they came through whole."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaspec.checkpoint.comm import SoloComm
from megaspec.checkpoint.store import Store
from megaspec.estimate.target import Target
from megaspec.log.events import TIMED
from megaspec.log.jsonl import read_metrics
from megaspec.recipe import Recipe
from megaspec.resolve.resolver import resolve
from megaspec.rules.run_facts import Facts
from megaspec.run_folder import make_folder, read_run, write_run
from megaspec_launchers.local import launch
from megaspec_launchers.rank_factory import RankFactory

STEPS, BATCH = 24, 4
ENTRY = "tests.faults.entry:main"
TARGET = Target(cores=2)


def recipe(
    *, steps: int = STEPS, tp: int = 2, save_every: int = 3, seed: int = 1234, ranks: int = 2, **checkpoint: Any
) -> Recipe:
    """Two ranks (or one), a model of a few thousand parameters, evaluations and checkpoints every few steps."""
    return Recipe.model_validate_json(
        json.dumps(
            {
                "name": "broken",
                "model": {
                    "kind": "decoder",
                    "n_layers": 1,
                    "d_model": 16,
                    "n_heads": 2,
                    "n_kv_heads": 2,
                    "d_ffn": 32,
                    "vocab_size": 32,
                    "dropout": 0.1,
                },
                "precision": {"kind": "fp32"},
                "data": {"kind": "synthetic", "vocab_size": 32, "seq_len": 8},
                "optim": {"kind": "adamw", "lr": 1e-2, "schedule": {"warmup_steps": 4}},
                "parallelism": {"tp": tp},
                "train": {"steps": steps, "global_batch": BATCH, "eval_every": 4, "eval_samples": 2, "seed": seed},
                "checkpoint": {"every": save_every, "keep": 2} | checkpoint,
                "log": {"console": "quiet", "tensorboard": False},
                "launcher": {"ranks": ranks},
            }
        )
    )


def make_run(folder: Path, recipe: Recipe, *, target: Target = TARGET) -> Path:
    """A run folder that is ready to start."""
    make_folder(folder)
    write_run(folder, recipe, target, resolve(recipe, target, Facts(run_dir=str(folder))))
    return folder


def go(run: Path, factory: RankFactory, *, fault: dict[str, Any] | None = None, ranks: int = 0, **options: Any) -> int:
    """One launch of a run. `ranks`: 0 for those of its spec. -> exit code."""
    options = {"grace_seconds": 20.0, "timeout_seconds": 20.0} | options
    ranks = ranks or read_run(run).spec.world_size
    return launch(str(run), ranks=ranks, entry=ENTRY, arguments={"fault": fault}, factory=factory, **options)


@dataclass(frozen=True)
class Result:
    """What a run came to, for comparing: bytes of the last checkpoint, and its history."""

    step: int
    tensors: dict[str, bytes]
    state: dict[str, Any]
    history: list[dict[str, Any]]


def newest(run: Path) -> tuple[int, dict[str, bytes], dict[str, Any]]:
    """Step, tensors and state of the newest good checkpoint; nothing is repaired."""
    reader = Store(run).newest_good(SoloComm(), repair=False)
    assert reader is not None, "no checkpoint"
    with reader:
        tensors = {name: reader.read(name).view(torch.uint8).numpy().tobytes() for name in reader.names()}
        return reader.step, tensors, reader.state


def result(run: Path) -> Result:
    """The newest good checkpoint of a run and its steps and evaluations, without what depends on the clock."""
    history = [
        {k: v for k, v in line.items() if k not in TIMED}
        for line in read_metrics(run / "metrics.jsonl")
        if line["event"] in ("step", "eval")
    ]
    return Result(*newest(run), history)


def assert_same(run: Path, undisturbed: Result) -> None:
    """Weights, optimizer, generators and history are those of the undisturbed run, to the bit; no sample twice."""
    mine = result(run)
    assert mine.step == undisturbed.step
    assert mine.tensors.keys() == undisturbed.tensors.keys()
    differ = [name for name, data in undisturbed.tensors.items() if mine.tensors[name] != data]
    assert not differ, f"differ from the undisturbed run: {differ}"
    assert mine.state == undisturbed.state
    assert mine.history == undisturbed.history
    taken = [(line["first_sample"], line["samples"]) for line in mine.history if line["event"] == "step"]
    assert taken == [(BATCH * s, BATCH * (s + 1)) for s in range(undisturbed.step)]
