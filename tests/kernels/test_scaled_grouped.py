"""Products of fp8 rows with the matrices of their groups: empty groups, rows of none, ragged ones."""

import pytest
import torch
from torch import Tensor

from megaspec_kernels.catalog import Use, choose, unmet
from megaspec_kernels.fp8_cast.groups import Groups
from megaspec_kernels.gate import check, filled_with_nan
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.scaled_grouped.bench import held
from tests.kernels.test_fp8_groups import ends_of

E4M3 = torch.float8_e4m3fn


def turned(ends: Tensor, *rows: Tensor) -> tuple[Groups, list[Tensor]]:
    """Rows in fp8 in columns, with the padding of groups."""
    kernel = REGISTRY["fp8_cast"]["reference"]
    groups = kernel.groups(ends, rows[0].shape[0])
    one = torch.ones(1, 1, device=ends.device)
    columns = []
    for values in rows:
        _, made = kernel.group_cast(values.float(), one, groups, dtype=E4M3, columns=True)
        columns.append(made)
    return groups, columns


def test_the_reference_in_fp64_is_one_product_a_group() -> None:
    sizes = (5, 0, 3, 8)
    ends = ends_of(sizes, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(*shape, generator=draw).to(E4M3)
        return values, values.double()

    x8, x = random(16, 32)
    weight8, weight = random(4, 48, 32)
    grad8, grad = random(16, 48)
    x_scale = torch.exp2(torch.randint(-9, 9, (16, 1), generator=draw).double())
    weight_scale = torch.exp2(torch.randint(-9, 9, (4, 48), generator=draw).double())
    kernel = REGISTRY["scaled_grouped"]["reference"]
    y = kernel.product(x8, weight8, x_scale, weight_scale, ends, dtype=torch.float64)
    groups, columns = turned(ends, grad8, x8)
    of_groups = torch.exp2(torch.randint(-9, 9, (4, 1), generator=draw).double())
    total = kernel.weight_product(*columns, weight_scale, of_groups, groups.padded, dtype=torch.float64)
    first = 0
    for e, last in enumerate(ends.tolist()):
        rows = slice(first, last)
        of_rows = (x * x_scale)[rows] @ (weight[e] * weight_scale[e][:, None]).t()
        torch.testing.assert_close(y[rows], of_rows, rtol=1e-13, atol=1e-13)
        of_weight = (grad * weight_scale[e])[rows].t() @ (x[rows] * of_groups[e])
        torch.testing.assert_close(total[e], of_weight, rtol=1e-13, atol=1e-13)
        first = last


@pytest.mark.parametrize("name", list(REGISTRY["scaled_grouped"]))
def test_rows_of_no_group_are_zero_and_empty_groups_have_no_gradient(name, device) -> None:
    if name == "torch" and (device.type == "cpu" or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("torch's scaled grouped product is Hopper's")
    kernel = REGISTRY["scaled_grouped"][name]
    x = torch.randn(20, 32, device=device).to(E4M3)
    weight = torch.randn(3, 48, 32, device=device).to(E4M3)
    one = torch.ones(1, 1, device=device)
    ends = ends_of((4, 0, 9), device)
    with filled_with_nan():
        y = kernel.product(x, weight, one, one.expand(3, 1), ends, dtype=torch.bfloat16, whole=False)
        groups, (columns,) = turned(ends, x)
        total = kernel.weight_product(columns, columns, one, one, groups.padded, dtype=torch.float32)
    assert y.shape == (20, 48)
    assert not y[13:].any()
    assert (y[:13] != 0).any(dim=1).all()
    # torch's rounds to bf16
    assert total.dtype == (torch.bfloat16 if name == "torch" else torch.float32)
    assert not total[1].any()
    rows = x[4:13].double()
    assert torch.allclose(total[2].double(), rows.t() @ rows, rtol=1e-2, atol=1e-1)
    assert kernel.product(x[:0], weight, one, one.expand(3, 1), 0 * ends, dtype=torch.bfloat16).shape == (0, 48)


def test_wide_models_and_other_gpus_take_the_reference() -> None:
    use = Use(precision="bf16", widths=(2880,))
    assert choose("scaled_grouped", device="cuda", sm=90, use=use) == "torch"
    assert choose("scaled_grouped", device="cuda", sm=90, use=Use(precision="fp64")) == "reference"
    assert unmet("scaled_grouped", "torch", device="cuda", sm=100, use=use) == "runs up to sm90, this GPU is sm100"
    odd = unmet("scaled_grouped", "torch", device="cuda", sm=90, use=Use(precision="bf16", widths=(2880, 24)))
    assert odd == "needs matrices whose widths are multiples of 16, one is 24 wide"


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
def test_ragged_groups_pass_the_gate_on_hopper(by_rows: bool) -> None:
    """The three products of experts through torch's kernel, in memory that holds NaN, beside the reference."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's scaled grouped product is Hopper's")
    device = torch.device("cuda")
    with filled_with_nan():
        comparisons = [one for one in held("torch", device) if ("rows" in one.name.rpartition("of")[2]) == by_rows]
    assert len(comparisons) == 3
    for one in comparisons:
        check(one.fast, one.plain, one.truth)
