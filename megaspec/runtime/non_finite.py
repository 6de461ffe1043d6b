"""What to say about a step whose loss or gradient is NaN or Inf."""

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
    weight = next((n for n, p in built.data_parallel.weights.items() if not bool(torch.isfinite(p).all())), "")
    bad = (~torch.isfinite(result.norms)).nonzero().flatten().tolist()
    # buckets hold gradients in the order in which the backward pass makes them
    gradient = list(built.data_parallel.gradients)[bad[0]] if bad else ""
    reports = comm.gather([isfinite(float(result.local_loss)), gradient, weight])
    broken = [i for i, (is_finite, _, _) in enumerate(reports) if not is_finite]
    what = f"gradient norm={norm}" if isfinite(loss) else f"loss={loss}"
    if any(name for _, _, name in reports):
        where = f"weight {_first([name for _, _, name in reports])}"
    elif broken:
        where = f"loss of {_ranks(broken, len(reports))}"
    else:
        where = f"gradient of {_first([name for _, name, _ in reports])}"
    return NonFiniteError(
        f"step {step}: {what} is not finite, first seen in the {where}; the update was not applied. Lower "
        f"optim.lr={built.spec.optim.lr}, lengthen the warm-up, or look at samples {samples[0]} to {samples[-1]}"
    )


def _first(names: list[str]) -> str:
    """The name that the first rank reports, and the ranks that report it."""
    name = next(n for n in names if n)
    return f"{name} on {_ranks([i for i, n in enumerate(names) if n == name], len(names))}"


def _ranks(ranks: list[int], of: int) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {of}"
