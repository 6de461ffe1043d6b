"""An evaluation between two steps: its loss is that which training has of the same batch, and it leaves no trace.

That each layout's evaluation is one rank's is compared with everything else, see checks.py.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megaspec.parallelism.expert import buffers_of
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import build, initialise, mesh_of
from megaspec.runtime.step import StepResult, evaluate, train_step
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, empty_of, spec_of
from tests.parity.tasks import without_cpp
from tests.ranks import RankPool
from tests.source_patch import Patch, check

STEP = "megaspec.runtime.step"
STEPS = 3
# Whatever a layout or a part keeps from pass to pass: sums and biases of routers, largest elements and quantised
# weights of fp8, gathered weights, messages between stages.
CASES = [
    Case(dp=2, strategy="fsdp", router="softmax", precision="fp8 delayed", accumulate=2, mask="uneven"),
    Case(tp=2, sequence=True, ep=2, router="sigmoid", drop="probs", shared="gate", accumulate=2, mask="uneven"),
    Case(router="first", precision="fp32", compile="block", mask="uneven", documents=True, options="sinks"),
    Case(pp=2, schedule="zb_v", virtual=2, n_layers=4, precision="bf16", accumulate=3, tied=True, mask="uneven"),
    Case(cp=2, precision="fp8 rowwise", accumulate=2, also=(("parallelism.recompute.kind", "full"),)),
]
# What training draws an evaluation does not.
DRAWN = Case(dp=2, dropout=True, attention="reference", router="root", accumulate=2)
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-6}
"""Of a relative error, by what losses are summed in: bf16's are summed in fp32. In a step each token's loss is divided
by their number before the sum, in an evaluation behind it."""


class Life(NamedTuple):
    """What one rank saw in some steps."""

    evaluated: list[float]
    """The loss of each step's batch before the step; empty without evaluations."""
    trained: list[float]
    """The loss that the step says."""
    numbers: list[list[float]]
    """All else that a step says."""
    state: dict[str, Tensor]
    """What is left behind the last step: weights, and what routers and scales remember."""


def live(rank: int, case: Case, evaluates: bool) -> Life:
    """Trains a case, with an evaluation of other data and one of the same in front of each step, or without."""
    spec = spec_of(case)
    mesh = mesh_of(spec, rank=rank, device=torch.device("cpu"))
    empty = empty_of(case)
    batches = []
    for batch in batches_of(case, empty.sequences, STEPS, places=empty.places):
        batches.append(divide(batch, mesh=mesh, micro_batch=spec.train.micro_batch))
    torch._dynamo.reset()
    life = Life([], [], [], {})
    with without_cpp():
        built = build(spec, mesh=mesh)
        initialise(built)
        scaler = build_scaler(spec.precision, device=built.device)
        for step, batch in enumerate(batches):
            if evaluates:
                evaluate(built, batches[step - 1])
                life.evaluated.append(evaluate(built, batch).item())
            result = train_step(built, batch, lr=spec.optim.lr, weight_decay=spec.optim.weight_decay, scaler=scaler)
            life.trained.append(result.loss.item())
            life.numbers.append(told(result))
    life.state.update(built.optimizer.masters)
    life.state.update(buffers_of(built.chunks))
    for name, largest in built.fp8.state().items():
        life.state[f"largest of {name}"] = largest
    return life


def told(result: StepResult) -> list[float]:
    numbers = [result.grad_norm.item(), result.skipped.item()]
    if result.saturated is not None:
        numbers += result.saturated.tolist()
    routers = result.routers
    if routers is not None:
        for of_layers in (routers.loads_LE, routers.drops_L, routers.entropy_L, *routers.losses.values()):
            numbers += of_layers.flatten().tolist()
    return numbers


def hold(pool: RankPool, case: Case) -> list[Life]:
    """That evaluations leave no trace, to the bit. -> the lives with them."""
    plain = pool.run(live, case, False, ranks=case.ranks)
    found = pool.run(live, case, True, ranks=case.ranks)
    for here, expected in zip(found, plain, strict=True):
        assert here.trained == expected.trained
        assert here.numbers == expected.numbers
        assert here.state.keys() == expected.state.keys()
        for name, tensor in here.state.items():
            assert torch.equal(tensor, expected.state[name]), name
    return found


def hold_losses(pool: RankPool, case: Case) -> None:
    """That evaluations say what steps say, too."""
    tolerance = TOLERANCES["fp64" if case.precision.startswith("fp8") else case.precision]
    for life in hold(pool, case):
        assert life.evaluated == pytest.approx(life.trained, rel=tolerance, abs=0)


def hold_undrawn(pool: RankPool, case: Case) -> None:
    """That they say something else where steps draw."""
    for life in hold(pool, case):
        for evaluated, trained in zip(life.evaluated, life.trained, strict=True):
            assert abs(evaluated - trained) > 1e-4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_loss_is_the_steps_and_it_leaves_no_trace(pool: RankPool, case: Case) -> None:
    hold_losses(pool, case)


def test_it_draws_nothing(pool: RankPool) -> None:
    hold_undrawn(pool, DRAWN)


def test_a_sum_of_routers_that_counts_what_is_evaluated_is_caught() -> None:
    bug = Patch(STEP, "window[micro], x, weight=one)", "window[micro], x, weight=one, aux_weight=one)")
    check(bug)
    with RankPool(patches=(bug,)) as ranks, pytest.raises(AssertionError):
        hold_losses(ranks, CASES[1])


def test_dropout_in_an_evaluation_is_caught() -> None:
    bug = Patch(STEP, "noise = None if aux_weight is None else Noise", "noise = Noise")
    check(bug)
    with RankPool(patches=(bug,)) as ranks, pytest.raises(AssertionError):
        hold_undrawn(ranks, DRAWN)
