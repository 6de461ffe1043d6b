"""Gradients of the vocabulary's tables, summed in place in a step, against autograd's."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaspec.data.batch import Batch
from megaspec.estimate.tables import tables_in_place
from megaspec.nn.each_norm import each_norm
from megaspec.parallelism.mesh import Mesh
from megaspec.precision.scaler import build_scaler
from megaspec.runtime.build import TrainState, build, initialise
from megaspec.runtime.step import train_step
from megaspec.verify.parity import divide, gradient_errors
from megaspec_kernels import catalog
from megaspec_kernels.cross_entropy.reference import VocabShard
from megaspec_kernels.product import add_rows_
from megaspec_kernels.registry import REGISTRY
from tests.parity.cases import Case, batches_of, spec_of

CPU = torch.device("cpu")
BASE = Case(accumulate=3, mask="uneven", kv_heads=2, pad=8, cross_entropy="chunked")
# With the tables whose gradients autograd makes no more in a step.
CASES = [
    (BASE, {"embed.weight", "head.weight"}),
    (replace(BASE, tied=True), {"embed.weight"}),
    (replace(BASE, cross_entropy="reference"), {"embed.weight"}),
    # both or neither
    (replace(BASE, cross_entropy="reference", tied=True), set()),
    (replace(BASE, family="gpt", tied=True), {"embed.weight"}),
    (replace(BASE, strategy="fsdp"), set()),
    (replace(BASE, strategy="zero2", tied=True), set()),
    (replace(BASE, trainable="head"), {"head.weight"}),
]


def built_of(case: Case) -> TrainState:
    spec = spec_of(case)
    built = build(spec, mesh=Mesh({"tp": 1, "dp_replicate": 1}, rank=0, device=CPU))
    initialise(built)
    return built


def micros_of(built: TrainState, case: Case) -> list[Batch]:
    return divide(batches_of(case, [], 1)[0], mesh=built.mesh, micro_batch=built.spec.train.micro_batch)


def summed(built: TrainState, micros: list[Batch], *, in_step: bool) -> tuple[dict[str, Tensor], set[str]]:
    """Sums over the micro batches, and the parameters of which autograd has made a gradient."""
    data = built.data_parallel
    made = set()
    hooks = []
    for name, parameter in built.parameters.items():
        if parameter.requires_grad:
            hooks.append(parameter.register_hook(lambda grad, name=name: made.add(name) if grad is not None else None))
    data.start_step()
    with built.pipeline.sums.step() if in_step else nullcontext():
        for number, micro in enumerate(micros):
            loss = built.model.loss(micro.tokens, micro.labels, micro.mask.to(built.wide))
            data.start_backward(0, last=number == len(micros) - 1)
            loss.backward()
    data.finish_grads()
    for hook in hooks:
        hook.remove()
    return {name: gradient.clone() for name, gradient in data.gradients.items()}, made


@pytest.mark.parametrize(("case", "in_place"), CASES, ids=lambda one: str(one) if isinstance(one, Case) else "")
def test_a_step_sums_what_autograd_makes(case: Case, in_place: set[str]) -> None:
    built = built_of(case)
    micros = micros_of(built, case)
    expected, by_autograd = summed(built, micros, in_step=False)
    found, made = summed(built, micros, in_step=True)
    assert max(gradient_errors(found, expected).values()) <= 1e-13
    assert by_autograd - made == in_place
    # passes of both kinds behind each other forget each other's sums
    again, _ = summed(built, micros, in_step=False)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("case", "in_place"), CASES[:-1], ids=lambda one: str(one) if isinstance(one, Case) else "")
def test_the_plan_knows_which_tables_are_summed_in_place(case: Case, in_place: set[str]) -> None:
    plan = tables_in_place(spec_of(case))
    assert plan.embedding == ("embed.weight" in in_place)
    assert plan.head == (("embed.weight" if case.tied else "head.weight") in in_place)


def test_a_step_of_mixed_passes_adds_them_up() -> None:
    """A pass of one's own inside of a step, before `finish_grads`."""
    case = replace(BASE, tied=True)
    built = built_of(case)
    micros = micros_of(built, case)
    expected, _ = summed(built, micros, in_step=False)
    data = built.data_parallel
    data.start_step()
    for number, micro in enumerate(micros):
        with built.pipeline.sums.step() if number % 2 else nullcontext():
            loss = built.model.loss(micro.tokens, micro.labels, micro.mask.to(built.wide))
            data.start_backward(0, last=number == len(micros) - 1)
            loss.backward()
    data.finish_grads()
    assert max(gradient_errors(data.gradients, expected).values()) <= 1e-13


def test_bf16_rounds_no_gradient_of_the_head() -> None:
    """Summed in fp32 as the products make it; through autograd it is rounded to bf16 once a micro batch."""
    case = replace(BASE, precision="bf16")
    built = built_of(case)
    micros = micros_of(built, case)
    through, _ = summed(built, micros, in_step=False)
    found, _ = summed(built, micros[:1], in_step=True)
    once, _ = summed(built, micros[:1], in_step=False)
    is_rounded = once["head.weight"] == once["head.weight"].to(torch.bfloat16).to(torch.float32)
    assert is_rounded.all()
    # a CPU's product is in bf16 itself, a GPU's is not: see test_update_gpu.py
    torch.testing.assert_close(found["head.weight"], once["head.weight"], rtol=2**-7, atol=1e-6)
    assert through["head.weight"].dtype == found["head.weight"].dtype == torch.float32


def test_a_loss_that_is_scaled_behind_its_sum_is_refused() -> None:
    built = built_of(BASE)
    (micro, *_) = micros_of(built, BASE)
    built.data_parallel.start_step()
    with built.pipeline.sums.step():
        loss = built.model.loss(micro.tokens, micro.labels, micro.mask.to(built.wide))
        with pytest.raises(RuntimeError, match="weight_sum has its own already"):
            (2 * loss).backward()


@pytest.mark.parametrize("pieces", [1, 3])
def test_pieces_of_the_logits_add_up(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    M, D, V = 60, 8, 19
    monkeypatch.setattr(catalog, "LOGITS_BYTES", -(-M * V * 8 // pieces))
    torch.manual_seed(0)
    x_MD = torch.randn(M, D, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    labels_M = torch.randint(0, V, (M,))
    weights_M = torch.rand(M, dtype=torch.float64)
    loss = REGISTRY["cross_entropy"]["reference"](x_MD, weight_VD, labels_M, weights_M, VocabShard(0, V))
    grad_x, grad_weight = torch.autograd.grad(loss, (x_MD, weight_VD))

    class Sum:
        """Counts, and adds to what was there."""

        def __init__(self) -> None:
            self.total = torch.full((V, D), float("nan"), dtype=torch.float64)
            self.added = 0
            self.ended = 0

        def add(self, product) -> None:
            product(self.total, self.added == 0)
            self.added += 1

        def arrived(self) -> None:
            self.ended += 1

    one = Sum()
    chunked = REGISTRY["cross_entropy"]["chunked"]
    loss = chunked(x_MD, weight_VD, labels_M, weights_M, VocabShard(0, V), weight_sum=one)
    assert (one.added, one.ended) == (pieces, 0)
    found_x, found_weight = torch.autograd.grad(loss, (x_MD, weight_VD), allow_unused=True)
    assert (found_weight, one.ended) == (None, 1)
    torch.testing.assert_close(found_x, grad_x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(one.total, grad_weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("overwrite", [False, True])
def test_rows_of_equal_places_add_up(overwrite: bool) -> None:
    torch.manual_seed(1)
    places = torch.randint(0, 5, (4, 9))
    rows = torch.randn(4, 9, 3, dtype=torch.bfloat16)
    total = torch.full((7, 3), float("nan"), dtype=torch.float32) if overwrite else torch.randn(7, 3)
    by_place = torch.nn.functional.one_hot(places.flatten(), 7).to(torch.float64)
    expected = by_place.t() @ rows.flatten(0, 1).to(torch.float64)
    if not overwrite:
        expected += total
    add_rows_(total, places, rows, overwrite=overwrite)
    torch.testing.assert_close(total.to(torch.float64), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "fsdp"])
def test_norms_are_known_behind_the_backward_pass(strategy: str) -> None:
    case = replace(BASE, tied=True, strategy=strategy)
    built = built_of(case)
    found, _ = summed(built, micros_of(built, case), in_step=True)
    data = built.data_parallel
    assert data.norms.keys() == data.gradients.keys()
    again = each_norm(found)
    assert all(torch.equal(data.norms[name], again[name]) for name in again)


def test_who_looks_at_gradients_may_change_them() -> None:
    built = built_of(BASE)
    micros = micros_of(built, BASE)
    scaler = build_scaler(built.spec.precision, device=CPU)

    def double() -> None:
        for gradient in built.data_parallel.gradients.values():
            gradient.mul_(2)

    plain, doubled = (
        train_step(built, micros, lr=0.0, weight_decay=0.0, scaler=scaler, on_gradients=what) for what in (None, double)
    )
    torch.testing.assert_close(doubled.grad_norm, 2 * plain.grad_norm, rtol=1e-14, atol=0)
