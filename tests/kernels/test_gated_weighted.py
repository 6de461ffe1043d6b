"""Experts' gated activations times the weights of rows, against their equation in fp64."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from megaspec.nn.moe.activation import WeightedActivationOp, weighted_by
from megaspec_kernels.fp8_cast.formats import Known
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.fp8_cast.tile import Written
from megaspec_kernels.gate import Results, check, filled_with_nan, results
from megaspec_kernels.gated import triton as triton
from megaspec_kernels.gated.form import GatedForm
from megaspec_kernels.registry import REGISTRY
from tests.kernels.fp8_producers import check_written, known_of
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


# rows of each expert, and rows of none behind them; the first ones in more tiles than lie below each other in a grid
GROUPS = [((1200, 3), 5), ((5, 0, 3, 40, 1, 0), 0), ((0, 130, 7), 9)]


# formats and widths that are taken in pairs of neighbours, and those that are not
@pytest.mark.parametrize(("dtype", "F"), [(torch.bfloat16, 144), (torch.bfloat16, 20), (torch.float32, 48)], ids=str)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize(("sizes", "rest"), GROUPS, ids=str)
def test_triton_writes_fp8_of_groups(
    dtype: torch.dtype, F: int, form: GatedForm, sizes: tuple[int, ...], rest: int, device: torch.device
) -> None:
    """Forward and backward, by scales that a few elements are too large for: rows of fp8, and the same in columns with
    the padding of each group."""
    check_device(device)
    R = sum(sizes) + rest
    draw = torch.Generator().manual_seed(R + F)
    gate_up = (3 * torch.randn(R, 2 * F, generator=draw)).bfloat16().double().to(device)
    weights = torch.rand(R, generator=draw, dtype=torch.float64).float().double().to(device)
    grad = torch.randn(R, F, generator=draw).bfloat16().double().to(device)
    if form == FORMS[0]:
        gate_up[0, 0] = math.nan
        grad[sum(sizes) - 1, 1] = math.inf
    truth = run(equation, {"gate_up": gate_up, "weights": weights}, grad, form)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    groups = REGISTRY["fp8_cast"]["triton"].groups(ends, R)
    inside = sum(sizes)
    mine = {"gate_up_RF": gate_up.to(dtype), "weights_R": weights.float(), "groups": groups, "form": form}
    with filled_with_nan():
        known = known_of(2.0**-7, torch.float8_e4m3fn, device)
        written = KERNEL.forward_in_fp8(**mine, known=known)
        check_groups(written, truth["out"], inside, groups, known)
        known = known_of(2.0**-7, torch.float8_e4m3fn, device)
        written, grad_weights = KERNEL.gradients_in_fp8(grad.to(dtype), **mine, known=known)
        check_groups(written, truth["gate_up"], inside, groups, known)
    _, plain_weights = KERNEL.gradients(grad.to(dtype), mine["gate_up_RF"], mine["weights_R"], form=form)
    finite = torch.isfinite(truth["weights"])
    finite[inside:] = False
    size = truth["weights"][finite].abs().max().item()
    torch.testing.assert_close(grad_weights[finite].double(), truth["weights"][finite], rtol=1e-5, atol=2e-6 * size)
    assert torch.equal(torch.isfinite(grad_weights[:inside]), torch.isfinite(plain_weights[:inside]))


def check_groups(written: Written, truth: Tensor, inside: int, groups: Groups, known: Known) -> None:
    """Rows of groups as dense ones; rows of none are zero; columns are the rows with the padding."""
    rows = written.rows.view(torch.uint8)
    assert not rows[inside:].any()
    _, columns = REGISTRY["fp8_cast"]["reference"].group_cast(
        written.rows.float().cpu(),
        torch.ones(1, 1),
        REGISTRY["fp8_cast"]["reference"].groups(groups.ends.cpu(), groups.rows),
        dtype=known.dtype,
        columns=True,
    )
    found = written.columns.view(torch.uint8).cpu()
    is_number = ~columns.float().isnan()
    assert torch.equal(found[is_number], columns.view(torch.uint8)[is_number])
    assert torch.equal(written.columns.float().isnan().cpu(), ~is_number)
    dense = Written(written.rows[:inside], rows[:inside].t().contiguous().view(known.dtype), written.scale)
    check_written(dense, truth[:inside], known)


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
