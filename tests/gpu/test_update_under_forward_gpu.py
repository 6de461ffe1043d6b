"""An update on a stream of its own, beside the next forward pass: a slow one is waited for, and nothing else waits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspec.optim.under_forward import OptimizerInGroups
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.step import evaluate, train_step
from tests.parallelism.test_tables import BASE, micros_of
from tests.parity.cases import Case, spec_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]

STEPS = 4
# About 10 ms of a GPU's clock: what does not wait for the update has long run when it begins.
SLOW = 15_000_000
# Plain attention: what is fused sums its gradients in any order.
CASE = replace(
    BASE,
    n_layers=4,
    precision="bf16",
    cross_entropy="triton",
    attention="reference",
    also=(("kernels.adamw", "triton"), ("parallelism.bucket_mb", 0.005)),
)
CASES = [
    CASE,
    replace(CASE, tied=True),
    replace(CASE, compile="block"),
    # weights that are quantised once a step, at their first product
    replace(CASE, precision="fp8 tensorwise", cross_entropy="chunked", wide=True, also=(("kernels.adamw", "torch"),)),
]


def late(case: Case, *, sms: int = 24) -> Case:
    return replace(case, also=(*case.also, ("parallelism.update", "under_forward"), ("parallelism.update_sms", sms)))


def built_of(case: Case) -> TrainState:
    torch._dynamo.reset()
    mesh = Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=torch.device("cuda", 0))
    built = build(spec_of(case, device="cuda"), mesh=mesh)
    initialise(built)
    if isinstance(built.optimizer, OptimizerInGroups):
        for part in built.optimizer.parts:
            part.update = slow(part.update)
    return built


def slow(update: Callable[..., None]) -> Callable[..., None]:
    """An update that begins late, on the stream that it is given to."""

    def updated(*args: Any, **options: Any) -> None:
        torch.cuda._sleep(SLOW)
        update(*args, **options)

    return updated


def stepped(built: TrainState, case: Case, count: int = STEPS) -> list[torch.Tensor]:
    """The losses of some steps, still on the device."""
    micros = [micro.to(built.device) for micro in micros_of(built, case)]
    scaler = build_scaler(built.spec.precision, device=built.device)
    return [train_step(built, micros, lr=1e-2, weight_decay=0.1, scaler=scaler).loss for _ in range(count)]


def held(built: TrainState) -> dict[str, torch.Tensor]:
    """Copies of weights, masters and moments."""
    found = {f"master {name}": one.clone() for name, one in built.optimizer.masters.items()}
    for kind, tensors in built.optimizer.state().items():
        found |= {f"{kind} {name}": one.clone() for name, one in tensors.items()}
    with built.data_parallel.full_weights() as weights:
        found |= {name: one.detach().clone() for name, one in weights.items()}
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_slow_update_makes_the_same_weights_to_the_bit(case: Case) -> None:
    at_once = built_of(case)
    expected = stepped(at_once, case)
    again = built_of(case)
    assert torch.equal(torch.stack(stepped(again, case)), torch.stack(expected)), "steps are not the same twice"
    under_forward = built_of(late(case))
    assert torch.equal(torch.stack(stepped(under_forward, case)), torch.stack(expected))
    assert differing(held(under_forward), held(at_once)) == []
    assert under_forward.optimizer.updates == STEPS


def test_a_wait_that_is_left_out_is_seen() -> None:
    """The forward pass runs with the weights before the update, while that sleeps."""
    expected = torch.stack(stepped(built_of(CASE), CASE))
    planted = built_of(late(CASE))
    planted.data_parallel._gathers._before = lambda bucket: None
    found = torch.stack(stepped(planted, CASE))
    assert torch.equal(found[0], expected[0])
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("reads", ["evaluated", "held"])
def test_who_reads_weights_waits(reads: str) -> None:
    read = {"evaluated": evaluated, "held": held}[reads]
    at_once, under_forward = built_of(CASE), built_of(late(CASE))
    for built in (at_once, under_forward):
        stepped(built, CASE, 1)
    assert differing(read(under_forward), read(at_once)) == []


def evaluated(built: TrainState) -> dict[str, torch.Tensor]:
    micros = [micro.to(built.device) for micro in micros_of(built, CASE)]
    return {"loss": evaluate(built, micros)}


def test_the_first_units_run_before_the_last_ones_are_updated() -> None:
    """Beside, not one after the other. The order is the streams': the host has long gone on."""
    built = built_of(late(CASE))
    stepped(built, CASE, 1)
    ran = torch.cuda.Event(enable_timing=True)
    updated = torch.cuda.Event(enable_timing=True)
    last = built.optimizer.parts[-1]
    update = last.update

    def marked(*args: Any, **options: Any) -> None:
        update(*args, **options)
        updated.record()

    last.update = marked
    stepped(built, CASE, 1)
    last.update = update
    hook = built.model.layers["0"].register_forward_hook(lambda *_: ran.record())
    micros = [micro.to(built.device) for micro in micros_of(built, CASE)][:1]
    evaluate_without_joining(built, micros)
    hook.remove()
    torch.cuda.synchronize()
    assert ran.elapsed_time(updated) > 5.0, "the first layer waited for all of the update"


def evaluate_without_joining(built: TrainState, micros: list[Any]) -> None:
    """A forward pass as a step begins with it."""
    with torch.no_grad():
        built.model.loss(micros[0].tokens, micros[0].labels, micros[0].mask.to(built.wide))


def test_the_host_waits_for_nothing_in_a_step() -> None:
    """The first step makes tables that stay."""
    built = built_of(late(CASE))
    stepped(built, CASE, 1)
    micros = [micro.to(built.device) for micro in micros_of(built, CASE)]
    scaler = build_scaler(built.spec.precision, device=built.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler)
        train_step(built, micros, lr=1e-3, weight_decay=0.1, scaler=scaler)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sms", [1, 16, 132])
def test_any_number_of_sms_makes_the_same(sms: int) -> None:
    expected = built_of(CASE)
    stepped(expected, CASE, 2)
    found = built_of(late(CASE, sms=sms))
    stepped(found, CASE, 2)
    assert differing(held(found), held(expected)) == []


def test_it_holds_no_more_memory_than_one_at_once() -> None:
    """But for tables of addresses and scalars, in a pool of the stream's own."""
    peaks = []
    for case in (CASE, late(CASE)):
        built = built_of(case)
        stepped(built, case, 2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        stepped(built, case, 2)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del built
    assert peaks[1] <= peaks[0] + 2**20
