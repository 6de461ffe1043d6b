"""Gated activations against their equations in fp64, beside their bounds and where their slopes break."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check, filled_with_nan, results
from megaspec_kernels.gated import triton as triton
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import REGISTRY
from tests.kernels.fp8_producers import check_written, known_of

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared")
FORMS = [*(GatedForm(name) for name in ACTIVATIONS), GatedForm(limit=0.5, alpha=1.702)]


def by_equation(gate_up: Tensor, form: GatedForm) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return (up + 1) * gate / (1 + torch.exp(-form.alpha * gate))
    positive = torch.where(gate > 0, gate, 0)
    by_name = {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": gate * (1 + torch.erf(gate / math.sqrt(2))) / 2,
        "gelu_tanh": gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2,
        "quick_gelu": gate / (1 + torch.exp(-1.702 * gate)),
        "relu": positive,
        "relu_squared": positive**2,
    }
    return by_name[form.activation] * up


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", torch.float64),
        *product(REGISTRY["gated"], (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize(("M", "F"), [(1, 1), (63, 100), (3, 1025)])
def test_equations_and_their_gradients(
    implementation: str, dtype: torch.dtype, form: GatedForm, M: int, F: int, device: torch.device
) -> None:
    if implementation == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    draw = torch.Generator().manual_seed(M + F)
    gate_up = (3 * torch.randn(M, 2 * F, generator=draw)).bfloat16().double().to(device)
    if F > 1:
        # where slopes break, and far out
        gate_up[0, :4] = torch.tensor([-80.0, 0.0, 0.5, 80.0], device=device)
    grad = torch.randn(M, F, generator=draw).bfloat16().double().to(device)

    def apart(run: object, gate_up: Tensor) -> Tensor:
        # every second column of a wider tensor: not contiguous
        return run(gate_up.repeat_interleave(2, dim=1)[:, ::2], form=form)

    mine = {"gate_up": gate_up.to(dtype)}
    fast = results(partial(apart, REGISTRY["gated"][implementation].gated), mine, grad)
    plain = results(partial(apart, REGISTRY["gated"]["reference"].gated), mine, grad)
    check(fast, plain, results(partial(by_equation, form=form), {"gate_up": gate_up}, grad))


@pytest.mark.parametrize("implementation", list(REGISTRY["gated"]))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
def test_no_number_stays_none(implementation: str, form: GatedForm, device: torch.device) -> None:
    """So that the loss shows it."""
    if implementation == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    gate_up = torch.ones(2, 4, device=device)
    gate_up[0, 0] = math.nan
    gate_up[1, 3] = math.nan
    bad = REGISTRY["gated"][implementation].gated(gate_up, form=form).isnan()
    assert bad.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
# the last three are read in pairs where they are bf16, the last one in more tiles than lie below each other in a grid
@pytest.mark.parametrize(("M", "F"), [(1, 16), (63, 200), (144, 80), (128, 64), (592, 16)])
def test_triton_writes_fp8(dtype: torch.dtype, form: GatedForm, M: int, F: int, device: torch.device) -> None:
    """Forward and backward, by scales that a few elements are too large for."""
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    draw = torch.Generator().manual_seed(M + F)
    gate_up = (3 * torch.randn(M, 2 * F, generator=draw)).bfloat16().double().to(device)
    grad = torch.randn(M, F, generator=draw).bfloat16().double().to(device)
    if form == FORMS[0]:
        gate_up[0, 0] = math.nan
        grad[M - 1, 1] = math.inf
    truth = results(partial(by_equation, form=form), {"gate_up": gate_up}, grad)
    with filled_with_nan():
        known = known_of(2.0**-7, torch.float8_e4m3fn, device)
        check_written(triton.gated_forward_in_fp8(gate_up.to(dtype), form.code, known=known), truth["out"], known)
        for format in (torch.float8_e5m2, torch.float8_e4m3fn):
            known = known_of(2.0**-7, format, device)
            written = triton.gated_backward_in_fp8(grad.to(dtype), gate_up.to(dtype), form.code, known=known)
            check_written(written, truth["gate_up"], known)
