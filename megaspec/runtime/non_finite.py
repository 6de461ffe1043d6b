"""What to say about a step whose loss or gradient is NaN or Inf, or spikes."""

from collections.abc import Sequence
from math import isfinite

import torch

from megaspec.checkpoint.comm import Comm
from megaspec.core.errors import NonFiniteError
from megaspec.runtime.build import TrainState
from megaspec.runtime.step import StepResult
from megaspec.train.guard import Guard, Verdict


def first_seen(built: TrainState, comm: Comm, *, verdict: Verdict, result: StepResult) -> str:
    """Where the numbers of a step went wrong, in words. All ranks call this together.

    The nearest cause wins: a weight, else the loss of a rank, else the first gradient that the backward pass made so.
    Of a spike it is the largest gradient.
    """
    if verdict.kind == "spike":
        return _largest_gradient(built, comm, result)
    is_loss_finite = isfinite(float(result.local_loss))
    reports = comm.gather([is_loss_finite, _first_gradient(built, result), _first_weight(built)])
    # of each rank, in rank order
    losses_finite, gradients, weights = zip(*reports, strict=True)
    broken = [rank for rank, is_finite in enumerate(losses_finite) if not is_finite]
    if any(weights):
        return f"weight {_first(weights)}"
    if broken:
        return f"loss of {_ranks(broken, len(reports))}"
    if any(gradients):
        return f"gradient of {_first(gradients)}"
    # each gradient's norm is finite, and the sum of their squares is not
    return "sum of all ranks' gradients"


def explain(
    built: TrainState, guard: Guard, verdict: Verdict, *, loss: float, norm: float, where: str, samples: range
) -> NonFiniteError:
    """The error that names step, what, where and which rank. `samples`: positions of the step's sequences in the data
    order."""
    text = f"step {verdict.step}: {_what(verdict, loss=loss, norm=norm)}, first seen in the {where}; "
    text += "the update was not applied"
    spec = guard.spec
    if spec.skips or spec.rollbacks:
        text += f", as {len(verdict.recent)} within {spec.within} steps (train.numbers.skips={spec.skips}), "
        text += f"and the run went back {guard.rollbacks} times (train.numbers.rollbacks={spec.rollbacks})"
    text += f". Lower optim.lr={built.spec.optim.lr}, lengthen the warm-up, or look at samples {samples[0]} to "
    return NonFiniteError(f"{text}{samples[-1]}")


def explain_end(guard: Guard, *, steps: range, lr: float) -> NonFiniteError | None:
    """The error with which a run ends that has done all its `steps`, and has learned nothing in them, or nothing in the
    last of them; None for any other. What it saved is whole."""
    way_out = f"Lower optim.lr={lr}, lengthen the warm-up, or look at the steps in metrics.jsonl"
    if len(steps) > 0 and guard.skipped == len(steps):
        text = f"steps {steps[0]} to {steps[-1]}: each was skipped or left out, so that nothing was trained"
        return NonFiniteError(f"{text}. {way_out}")
    last = guard.last_skips(steps.stop - 1)
    if not last:
        return None
    text = f"steps {last[0]} to {last[-1]}, the last of the run, were all skipped for their numbers: as many as "
    text += f"train.numbers.skips={guard.spec.skips} allows, so that nobody knows whether the run would have gone on. "
    text += f"The last checkpoint holds the weights from before step {last[0]}"
    return NonFiniteError(f"{text}. {way_out}")


def _what(verdict: Verdict, *, loss: float, norm: float) -> str:
    """Which number was too much."""
    if verdict.kind == "nonfinite":
        if not isfinite(loss):
            return f"loss={loss} is not finite"
        return f"gradient norm={norm} is not finite"
    limits = verdict.limits
    if loss > limits.loss:
        return f"loss={loss:.6g} is a spike, above {limits.loss:.6g}"
    return f"gradient norm={norm:.6g} is a spike, above {limits.grad_norm:.6g}"


def _first_weight(built: TrainState) -> str:
    """Name of this rank's first weight that is not finite; "" where all are."""
    for name, weight in built.data_parallel.weights.items():
        if not bool(torch.isfinite(weight).all()):
            return name
    return ""


def _first_gradient(built: TrainState, result: StepResult) -> str:
    """Name of the first gradient that the backward pass made not finite on this rank; "" where all are."""
    bad = (~torch.isfinite(result.norms)).nonzero().flatten().tolist()
    if not bad:
        return ""
    # buckets hold gradients in the order in which the backward pass makes them
    return list(built.data_parallel.gradients)[bad[0]]


def _largest_gradient(built: TrainState, comm: Comm, result: StepResult) -> str:
    """The name of the gradient with the largest norm of all, and the ranks that have it."""
    name, norm = "", -1.0
    if result.norms.numel():
        number = int(result.norms.argmax())
        name = list(built.data_parallel.gradients)[number]
        norm = float(result.norms[number])
    reports = comm.gather([name, norm])
    largest = max(reports, key=lambda report: report[1])
    ranks = [rank for rank, report in enumerate(reports) if report == largest]
    return f"gradient of {largest[0]}, the largest, on {_ranks(ranks, len(reports))}"


def _first(names: Sequence[str]) -> str:
    """The name that the first rank reports, and the ranks that report it. `names`: of each rank, "" for none."""
    reported = next(filter(None, names))
    ranks = [rank for rank, name in enumerate(names) if name == reported]
    return f"{reported} on {_ranks(ranks, len(names))}"


def _ranks(ranks: Sequence[int], of: int) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {', '.join(map(str, ranks))} of {of}"
