"""What to say about a step whose loss or gradient is NaN or Inf."""

from collections.abc import Sequence
from math import isfinite

import torch

from megaspec.checkpoint.comm import Comm
from megaspec.core.errors import NonFiniteError
from megaspec.runtime.build import TrainState
from megaspec.runtime.step import StepResult


def explain(
    built: TrainState, comm: Comm, *, step: int, loss: float, norm: float, result: StepResult, samples: range
) -> NonFiniteError:
    """The error that names step, what, where and which rank. All ranks call this together.

    The nearest cause wins: a weight, else the loss of a rank, else the first gradient that the backward pass made so.
    `samples`: positions of the step's sequences in the data order.
    """
    is_loss_finite = isfinite(float(result.local_loss))
    reports = comm.gather([is_loss_finite, _first_gradient(built, result), _first_weight(built)])
    # of each rank, in rank order
    losses_finite, gradients, weights = zip(*reports, strict=True)
    broken = [rank for rank, is_finite in enumerate(losses_finite) if not is_finite]
    if any(weights):
        where = f"weight {_first(weights)}"
    elif broken:
        where = f"loss of {_ranks(broken, len(reports))}"
    else:
        where = f"gradient of {_first(gradients)}"
    what = f"gradient norm={norm}" if isfinite(loss) else f"loss={loss}"
    return NonFiniteError(
        f"step {step}: {what} is not finite, first seen in the {where}; the update was not applied. Lower "
        f"optim.lr={built.spec.optim.lr}, lengthen the warm-up, or look at samples {samples[0]} to {samples[-1]}"
    )


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


def _first(names: Sequence[str]) -> str:
    """The name that the first rank reports, and the ranks that report it. `names`: of each rank, "" for none."""
    reported = next(filter(None, names))
    ranks = [rank for rank, name in enumerate(names) if name == reported]
    return f"{reported} on {_ranks(ranks, len(names))}"


def _ranks(ranks: Sequence[int], of: int) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {', '.join(map(str, ranks))} of {of}"
