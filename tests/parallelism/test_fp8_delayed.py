"""Delayed scales of what nothing is remembered of: in the first step all, later what was all zero or not finite."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.nn.fp8 import REMEMBERED
from megaspec.parallelism.fp8 import Fp8
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise, mesh_of
from megaspec.runtime.step import train_step
from megaspec.verify.parity import divide
from tests.parity.cases import Case, batches_of, spec_of

CASE = Case(precision="fp8 delayed", accumulate=1)
(BATCH,) = batches_of(CASE, (), 1)
# where nothing counts, all gradients are zero
EMPTY = replace(BATCH, mask=torch.zeros_like(BATCH.mask))


def begun(case: Case = CASE) -> TrainState:
    spec = spec_of(case)
    built = build(spec, mesh=mesh_of(spec, rank=0, device=torch.device("cpu")))
    initialise(built)
    return built


def gradients(built: TrainState, batch: Batch, *, loss_scale: float = 1.0) -> dict[str, Tensor]:
    """Of a step that changes no weight."""
    found: dict[str, Tensor] = {}
    scaler = build_scaler(built.spec.precision, device=built.device)
    scaler.scale = loss_scale * scaler.scale

    def keep() -> None:
        found.update({name: grad.clone() for name, grad in built.data_parallel.gradients.items()})

    train_step(
        built,
        divide(batch, mesh=built.mesh, micro_batch=built.spec.train.micro_batch),
        lr=0.0,
        weight_decay=0.0,
        scaler=scaler,
        on_gradients=keep,
    )
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert torch.equal(found[name], gradient), name


def fresh(built: TrainState) -> dict[str, frozenset[str]]:
    return {name: linear.memory.fresh for name, linear in built.fp8.linears.items()}


def test_what_a_step_saw_nothing_of_has_scales_of_its_own_in_the_next() -> None:
    """By the scale of nothing, 1, gradients of a mean over many tokens would all be rounded to zero."""
    expected = gradients(begun(), BATCH)
    built = begun()
    assert not any(gradient.any() for gradient in gradients(built, EMPTY).values())
    assert set(fresh(built).values()) == {frozenset({"gradient"})}
    # as after a resume
    again = begun()
    again.fp8.load_state({name: largest.clone() for name, largest in built.fp8.state().items()})
    assert fresh(again) == fresh(built)
    assert_same(gradients(built, BATCH), expected)
    assert_same(gradients(again, BATCH), expected)
    assert set(fresh(built).values()) == {frozenset()}


@pytest.mark.parametrize("role", REMEMBERED)
def test_one_layer_may_have_nothing_to_remember(role: str) -> None:
    """As the gradients of layers that a fork trains and that were frozen."""
    built = begun()
    expected = gradients(built, BATCH)
    state = {name: largest.clone() for name, largest in built.fp8.state().items()}
    name = next(iter(state))
    state[name][REMEMBERED.index(role)] = 0
    again = begun()
    again.fp8.load_state(state)
    assert fresh(again) == {one: frozenset({role} if one == name else ()) for one in state}
    # the same tokens and weights: scales of the step before are those of the tensors
    assert_same(gradients(again, BATCH), expected)
    assert torch.equal(again.fp8.state()[name][:, 0], built.fp8.state()[name][:, 0])


@pytest.mark.parametrize("before", [0, 1])
def test_a_step_that_is_left_out_is_not_remembered(before: int) -> None:
    """Its largest finite element may be of any size: as long as it were remembered, gradients would be rounded to
    zero."""
    built = begun()
    expected = gradients(built, BATCH)
    if not before:
        built = begun()
    remembered = built.fp8.largest.clone()
    huge = gradients(built, BATCH, loss_scale=1e200)
    assert all(gradient.isfinite().all() for gradient in huge.values())
    assert max(gradient.abs().max() for gradient in huge.values()) > 1e150
    # taken to be as the one before it
    assert torch.equal(built.fp8.largest[..., 0], remembered[..., 0])
    assert torch.equal(built.fp8.largest[..., 1:], remembered[..., :-1])
    assert_same(gradients(built, BATCH), expected)


@pytest.mark.parametrize("trainable", ["", "upper"])
def test_the_host_looks_behind_the_first_step_alone(trainable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers that nothing trains below have no gradients, and nobody waits for them."""
    looks = []
    find = Fp8._find_fresh

    def counted(fp8: Fp8) -> None:
        looks.append(fp8)
        find(fp8)

    monkeypatch.setattr(Fp8, "_find_fresh", counted)
    built = begun(replace(CASE, n_layers=4, trainable=trainable))
    counts = []
    for _ in range(3):
        gradients(built, BATCH)
        counts.append(len(looks))
    assert counts == [1, 1, 1]
    has_frozen = any(of_layer == frozenset({"gradient"}) for of_layer in fresh(built).values())
    assert has_frozen is (trainable == "upper")
