"""Between the last weight gradient and the next forward pass: sums of tables, norms, the update in one kernel."""

from dataclasses import replace

import pytest
import torch

from megaspec.nn.each_norm import each_norm
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.step import StepResult, train_step
from megaspec_kernels.product import add_rows_
from tests.parallelism.test_tables import BASE, micros_of, summed
from tests.parity.cases import Case, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

# Plain attention: what is fused sums its gradients in any order.
CASE = replace(BASE, precision="bf16", cross_entropy="triton", attention="reference")


def built_of(case: Case) -> TrainState:
    built = build(spec_of(case), mesh=Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=torch.device("cuda", 0)))
    initialise(built)
    return built


def micros_on(built: TrainState, case: Case):
    return [micro.to(built.device) for micro in micros_of(built, case)]


@pytest.mark.parametrize("overwrite", [False, True])
def test_rows_are_added_the_same_to_the_bit(overwrite: bool) -> None:
    """Many tokens of few kinds, in any order of threads."""
    torch.manual_seed(0)
    places = torch.randint(0, 40, (2, 4096), device="cuda")
    rows = torch.randn(2, 4096, 512, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(64, 512, device="cuda")
    totals = []
    for _ in range(3):
        total = torch.full_like(start, float("nan")) if overwrite else start.clone()
        add_rows_(total, places, rows, overwrite=overwrite)
        totals.append(total)
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])
    expected = torch.zeros_like(start, dtype=torch.float64) if overwrite else start.to(torch.float64)
    expected.index_add_(0, places.flatten(), rows.flatten(0, 1).to(torch.float64))
    torch.testing.assert_close(totals[0].to(torch.float64), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_rounds_no_gradient_of_a_table(tied: bool) -> None:
    """Each micro batch's is a sum in fp32; autograd's is rounded to bf16, and no other gradient differs."""
    case = replace(CASE, tied=tied)
    built = built_of(case)
    micros = micros_on(built, case)[:1]
    by_autograd, _ = summed(built, micros, in_step=False)
    found, made = summed(built, micros, in_step=True)
    tables = {"embed.weight"} if tied else {"embed.weight", "head.weight"}
    assert not made & tables
    for name, expected in by_autograd.items():
        if name in tables:
            assert torch.equal(expected, expected.to(torch.bfloat16).to(torch.float32))
            assert not torch.equal(found[name], found[name].to(torch.bfloat16).to(torch.float32))
            size = expected.abs().max()
            torch.testing.assert_close(found[name], expected, rtol=2**-7, atol=float(2**-8 * size))
        elif name.startswith("norm"):
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-9)


def test_norms_that_are_taken_beside_the_backward_pass_are_those_of_its_end() -> None:
    built = built_of(CASE)
    found, _ = summed(built, micros_on(built, CASE), in_step=True)
    data = built.data_parallel
    assert data.norms.keys() == data.gradients.keys()
    again = each_norm(found)
    assert all(torch.equal(data.norms[name], again[name]) for name in again)


@pytest.mark.parametrize("adamw", ["torch", "triton"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_host_waits_for_nothing_in_a_step(adamw: str, tied: bool) -> None:
    """Neither for the places of tokens, the norm nor the update; the first step makes tables that stay."""
    case = replace(CASE, tied=tied, also=(("kernels.adamw", adamw),))
    built = built_of(case)
    micros = micros_on(built, case)
    scaler = build_scaler(built.spec.precision, device=built.device)
    train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def three_steps(adamw: str, *, clip: float) -> tuple[TrainState, list[StepResult]]:
    case = replace(CASE, also=(("kernels.adamw", adamw), ("optim.clip", clip)))
    built = built_of(case)
    micros = micros_on(built, case)
    scaler = build_scaler(built.spec.precision, device=built.device)
    return built, [train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler) for _ in range(3)]


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_one_pass_updates_as_torch_does(clip: float) -> None:
    """With gradients that are clipped and with such as are not; weights are masters, rounded to the nearest."""
    plain, expected = three_steps("torch", clip=clip)
    fused, found = three_steps("triton", clip=clip)
    assert (float(found[0].grad_norm) > clip) == (clip < 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-3, atol=0)
    assert fused.optimizer.updates == plain.optimizer.updates == 3
    for name, master in fused.optimizer.masters.items():
        wanted = plain.optimizer.masters[name]
        # three steps of 1e-3 at most, whose direction may be that of a rounding where the gradient is no more
        off = (master - wanted).abs()
        assert off.max() <= 6.1e-3, name
        assert (off > 1e-4).to(torch.float32).mean() < 0.02, name
        assert torch.equal(fused.data_parallel.weights[name], master.to(torch.bfloat16)), name


def test_a_step_that_is_skipped_changes_nothing() -> None:
    """The kernel runs and finds tensors of no elements."""
    built, _ = three_steps("triton", clip=1.0)
    optimizer = built.optimizer
    before = [one.clone() for one in optimizer.masters.values()]
    before += [one.clone() for moments in optimizer.state().values() for one in moments.values()]
    gradients = {name: torch.full_like(one, float("nan")) for name, one in built.data_parallel.gradients.items()}
    one = torch.ones((), device=built.device)
    optimizer.update(gradients, lr=1.0, weight_decay=0.1, divide_by=one, skip=one)
    after = list(optimizer.masters.values())
    after += [one for moments in optimizer.state().values() for one in moments.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer.updates == 3
