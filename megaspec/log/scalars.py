"""The numbers of an event under the names by which services and TensorBoard draw them. Torch-free.

Those of a step are called as in metrics.jsonl. Others are called by their event, by what tells several of it apart, and
by their key in metrics.jsonl: eval/loss, eval/NAME/loss, routers/entropy/layers.1, profile/rank0/attention/seconds,
which is of one step.
"""

from dataclasses import asdict

from megaspec.log.events import CheckpointSaved, EvalDone, Event, PaceMeasured, RoutersDone, StepDone, StepsProfiled

SPLIT = "valid"
"""What the evaluated share of the training data is called, where no set has a name of its own."""


def scalars(event: Event) -> dict[str, float]:
    """Name -> number; without those that are not known, and empty for an event that has none. A yes or no is 1 or 0."""
    match event:
        case StepDone():
            return _known(event)
        case RoutersDone():
            return _of_routers(event)
        case StepsProfiled():
            return _of_profile(event)
        case PaceMeasured():
            return _of_pace(event)
        case EvalDone():
            return _of_evaluation(event)
        case CheckpointSaved():
            found = {"checkpoint/seconds": event.seconds}
            if event.stall_seconds is not None:
                found["checkpoint/stall_seconds"] = event.stall_seconds
            return found
        case _:
            return {}


def _known(event: StepDone) -> dict[str, float]:
    found = {}
    for name, value in asdict(event).items():
        if name not in ("step", "steps") and value is not None:
            found[name] = float(value)
    return found


def _of_pace(event: PaceMeasured) -> dict[str, float]:
    found = {}
    for phase, one in event.phases.items():
        found[f"pace/{phase}/median"] = one.median
        found[f"pace/{phase}/slowest"] = one.slowest
    return found


def _of_evaluation(event: EvalDone) -> dict[str, float]:
    """The mean of the sets, and each set's own loss where there are several, or one that has a name."""
    found = {"eval/loss": event.loss, "eval/seconds": event.seconds}
    if set(event.sets) != {SPLIT}:
        for name, loss in event.sets.items():
            found[f"eval/{name}/loss"] = loss
    return found


def _of_routers(event: RoutersDone) -> dict[str, float]:
    kinds = {"max_violation": event.max_violation, "drops": event.drops, "entropy": event.entropy, **event.losses}
    found = {}
    for kind, values in kinds.items():
        for layer, value in zip(event.layers, values, strict=True):
            found[f"routers/{kind}/{layer}"] = value
    return found


def _of_profile(event: StepsProfiled) -> dict[str, float]:
    """Of one step, on average."""
    found = {}
    for kind, one in event.kinds.items():
        found[f"profile/rank{event.rank}/{kind.replace(' ', '_')}/seconds"] = one.seconds / event.steps
    if event.clock_mhz is not None:
        found[f"profile/rank{event.rank}/clock_mhz"] = event.clock_mhz
    if event.power_watts is not None:
        found[f"profile/rank{event.rank}/power_watts"] = event.power_watts
    return found
