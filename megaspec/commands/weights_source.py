"""Checkpoints that a run of weights alone is made of: `checkpoint save` takes one, `checkpoint average` several."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megaspec.commands.hf_export import open_checkpoint
from megaspec.core.errors import CheckpointError
from megaspec.core.frozen import AUTO
from megaspec.estimate.target import detect_target
from megaspec.hf.companions import kept_companions
from megaspec.hf.folder import first_of
from megaspec.recipe import Recipe
from megaspec.rules.belonging import is_imported
from megaspec.rules.initial_weights import weight_shapes
from megaspec.run_folder import SavedRun, read_target, refuse_no_checkpoint
from megaspec.spec import TakenWeights

if TYPE_CHECKING:
    from megaspec.checkpoint.reader import Reader, Weights


@dataclass(frozen=True)
class WeightsSource:
    """An opened checkpoint of a run."""

    run: SavedRun
    reader: "Reader"

    def taken(self, share: float = 1.0) -> TakenWeights:
        """What a run that has its weights notes of it."""
        run = self.run
        return TakenWeights(
            path=str(run.folder),
            step=self.reader.step,
            digest=self.reader.manifest.digest,
            weight=share,
            imported=is_imported(run.spec),
        )


def open_source(run: SavedRun, step: int | None) -> WeightsSource:
    """A checkpoint, verified in every byte, that holds all weights of its model. `step` None: the newest good one.

    CheckpointError: there is none, it is damaged, another run's, or of another model than it says.
    """
    refuse_no_checkpoint(run, step)
    reader = open_checkpoint(run.folder, run.spec, step)
    problems = _misfits(run, reader)
    if problems:
        reader.close()
        raise CheckpointError([f"{reader.path}: {problem}" for problem in first_of(problems)])
    return WeightsSource(run, reader)


def _misfits(run: SavedRun, reader: "Reader") -> list[str]:
    problems = []
    for name, shape in weight_shapes(run.spec.model.facts).items():
        if name not in reader:
            problems.append(f"holds no {name}, which is a weight of its model")
        elif reader.shape(name) != shape:
            problems.append(f"{name} has shape {list(reader.shape(name))}, its model says {list(shape)}")
    return problems


def write_taken(out: Path, weights: "Weights", run: SavedRun, taken: Sequence[TakenWeights]) -> None:
    """A run folder with `weights` alone, and all else of `run`: recipe, Spec and tokenizer. Raises as
    `write_weights_run`."""
    from megaspec.weights_run import write_weights_run

    content = run.recipe
    if content.get("run_dir", AUTO) != AUTO:
        # where the other run is
        content = content | {"run_dir": str(out)}
    write_weights_run(
        out,
        weights,
        recipe=Recipe.model_validate_json(json.dumps(content)),
        target=read_target(run.folder) or detect_target(),
        spec=run.spec.model_copy(update={"taken_from": tuple(taken)}),
        companions=kept_companions(run.folder),
    )
