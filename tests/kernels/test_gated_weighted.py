"""Experts' gated activations times the weights of rows, against their equation in fp64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megaspec.nn.moe.activation import WeightedActivationOp, weighted_by
from megaspec_kernels.gate import Results, check, results
from megaspec_kernels.gated import triton as triton
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import REGISTRY
from tests.kernels.test_gated import FORMS, by_equation

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
KERNEL = REGISTRY["gated"]["triton"].weighted


def equation(gate_up: Tensor, weights: Tensor, form: GatedForm) -> Tensor:
    return by_equation(gate_up, form) * weights[:, None]


def plain(gate_up: Tensor, weights: Tensor, form: GatedForm) -> Tensor:
    """In the wider format of both, rounded once."""
    return equation(gate_up.to(weights.dtype), weights, form).to(gate_up.dtype)


def by_kernel(gate_up: Tensor, weights: Tensor, form: GatedForm) -> Tensor:
    return WeightedActivationOp.apply(gate_up, weights, weighted_by(KERNEL, form), True)


def run(function: object, inputs: dict[str, Tensor], grad: Tensor, form: GatedForm) -> Results:
    return results(partial(function, form=form), inputs, grad)


def check_device(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize(("R", "F"), [(1, 1), (63, 100), (3, 2049)])
def test_triton_computes_the_equation_and_its_gradients(
    dtype: torch.dtype, form: GatedForm, R: int, F: int, device: torch.device
) -> None:
    check_device(device)
    draw = torch.Generator().manual_seed(R + F)
    gate_up = (2 * torch.randn(R, 2 * F, generator=draw)).bfloat16().double().to(device)
    weights = torch.rand(R, generator=draw, dtype=torch.float64).float().double().to(device)
    grad = torch.randn(R, F, generator=draw).bfloat16().double().to(device)
    mine = {"gate_up": gate_up.to(dtype), "weights": weights.float()}
    truth = run(equation, {"gate_up": gate_up, "weights": weights}, grad, form)
    check(run(by_kernel, mine, grad, form), run(plain, mine, grad, form), truth)


def test_triton_takes_one_weight_for_all_rows_and_no_rows(device: torch.device) -> None:
    check_device(device)
    form = GatedForm()
    gate_up = torch.randn(5, 12, device=device)
    one = torch.ones((), device=device).expand(5)
    assert torch.equal(KERNEL.forward(gate_up, one, form=form), KERNEL.forward(gate_up, one.clone(), form=form))
    none = gate_up[:0]
    assert KERNEL.forward(none, one[:0], form=form).shape == (0, 6)
    by_gate_up, by_weights = KERNEL.gradients(none[:, :6], none, one[:0], form=form)
    assert by_gate_up.shape == (0, 12)
    assert by_weights.shape == (0,)
