"""Which checkpoints stay. Torch-free."""

from collections.abc import Iterable, Mapping
from math import isfinite

from megaspec.checkpoint.spec import CheckpointSpec


def kept_beside_newest(steps: Iterable[int], spec: CheckpointSpec, losses: Mapping[int, float]) -> set[int]:
    """Of the steps of checkpoints, those that `keep_every` and `keep_best` keep.

    `losses`: of steps that were evaluated. Of equal losses the newer one is the better: it has seen more. Every one of
    `spec.every` was evaluated before it was saved (rules): where its loss is not known, since what told it was lost, it
    may be the best, and stays.
    """
    kept = set()
    evaluated = []
    for step in steps:
        if spec.keep_every and step % spec.keep_every == 0:
            kept.add(step)
        if step in losses and isfinite(losses[step]):
            evaluated.append(step)
        elif spec.keep_best and spec.every and step % spec.every == 0 and step not in losses:
            kept.add(step)
    evaluated.sort(key=lambda step: (losses[step], -step))
    kept.update(evaluated[: spec.keep_best])
    return kept


def kept(steps: Iterable[int], spec: CheckpointSpec, losses: Mapping[int, float]) -> set[int]:
    """Of the steps of checkpoints, all that stay: the newest, and those beside them."""
    ascending = sorted(steps)
    if spec.keep == "all":
        return set(ascending)
    return {*ascending[-spec.keep :], *kept_beside_newest(ascending, spec, losses)}
