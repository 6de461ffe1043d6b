"""What a sweep is: `sweep.*` on the command line. No part of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from megaspec.core.frozen import Auto, Frozen, NonNegativeCount, PositiveCount, PositiveInt

# What a sweep that goes on can't change.
KEPT = ("kind", "name", "folder", "seed", "metric", "direction")
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class SweepSpec(Frozen):
    """How the points of a sweep are chosen and run."""

    kind: Literal["grid", "optuna"] = "grid"
    """grid: every combination of the values. optuna: a search, with intervals too."""
    name: Auto[Name] = "auto"
    """Name of the sweep, and beginning of the names of its runs. auto: the recipe, the keys and a hash of the words, so
    that the same command finds its sweep again."""
    folder: Auto[str] = "auto"
    """Folder of the sweep. auto: sweeps/<name>."""
    slots: Auto[PositiveInt] = "auto"
    """Points that run at once. auto: as many as find GPUs; without a GPU, one per 2 cores. When it is set, a point is
    planned for its share of the GPUs."""
    gpus: Auto[PositiveInt] = "auto"
    """GPUs that the sweep may use, the first that are visible. auto: all."""
    keep_going: bool = True
    """Whether the other points are run when one has failed."""
    again: Literal["unfinished", "failed"] = "unfinished"
    """What a sweep that is started again runs: points without an end, or those that failed as well."""
    metric: Auto[Literal["loss", "valid_loss", "tokens_per_second"]] = "auto"
    """Number that points are compared by. auto: valid_loss where every point evaluates, else loss."""
    direction: Auto[Literal["minimize", "maximize"]] = "auto"
    """What is better. auto: more tokens per second, less loss."""
    trials: PositiveCount = 20
    """Points of a search, those that no rule allows counted."""
    seed: NonNegativeCount = 0
    """Of a search."""
    pruner: Literal["none", "median"] = "none"
    """median: a point of a search that is worse at a step than the median of the earlier ones is stopped."""
    pruner_points: PositiveCount = 5
    """Points that have to be done before one is stopped."""
    pruner_steps: NonNegativeCount = 0
    """Steps that every point may run."""
