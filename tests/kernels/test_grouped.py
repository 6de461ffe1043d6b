"""Grouped products against one product a group, in fp64, with empty groups and rows of no group."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaspec.nn.moe.module import GroupedLinear
from megaspec_kernels.gate import Results, check, in_dtype, results
from megaspec_kernels.grouped.add import add_, add_with_triton
from megaspec_kernels.grouped.empty_groups import zero_empty_groups, zero_with_triton
from megaspec_kernels.registry import REGISTRY, GroupedKernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# rows of each group: many and few, none at all, the first and the last empty
SIZES = [(5, 0, 3, 8), (0, 1, 0), (0, 0), (63, 1000, 0, 1, 17), (0, 40)]


def one_by_one(x_RI: Tensor, weight_EOI: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Row by row, each with the matrix of its group."""
    group_R = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(x_RI.device)
    return torch.einsum("ri,roi->ro", x_RI, weight_EOI[group_R])


def ends_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def inputs_of(sizes: tuple[int, ...], width: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)

    inputs = {"x_RI": random(sum(sizes), width), "weight_EOI": random(len(sizes), 2 * width, width)}
    return inputs, random(sum(sizes), 2 * width)


def through_layer(kernel: GroupedKernel, sizes: tuple[int, ...], ends_E: Tensor) -> Callable[..., Tensor]:
    """The product as the layer makes it, with its own gradients."""

    def function(x_RI: Tensor, weight_EOI: Tensor) -> Tensor:
        E, O, I = weight_EOI.shape  # noqa: E741
        layer = GroupedLinear(E, I, O, kernel=kernel)
        return torch.func.functional_call(layer, {"weight": weight_EOI.flatten(0, 1)}, (x_RI, ends_E))

    return function


def run(function: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor, dtype: torch.dtype) -> Results:
    return results(function, in_dtype(inputs, dtype), grad)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    inputs, grad = inputs_of(sizes, 6, cpu)

    def plain(x_RI: Tensor, weight_EOI: Tensor) -> Tensor:
        return one_by_one(x_RI, weight_EOI, sizes)

    fast = run(through_layer(REGISTRY["grouped"]["reference"], sizes, ends_of(sizes, cpu)), inputs, grad, dtype)
    check(fast, run(plain, inputs, grad, dtype), run(plain, inputs, grad, torch.float64))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_torch(sizes: tuple[int, ...], device: torch.device) -> None:
    """On the CPU, too, where torch runs one product after the other."""
    inputs, grad = inputs_of(sizes, 24, device)
    ends_E = ends_of(sizes, device)
    fast = run(through_layer(REGISTRY["grouped"]["torch"], sizes, ends_E), inputs, grad, torch.bfloat16)
    plain = run(through_layer(REGISTRY["grouped"]["reference"], sizes, ends_E), inputs, grad, torch.bfloat16)
    truth = run(through_layer(REGISTRY["grouped"]["reference"], sizes, ends_E), inputs, grad, torch.float64)
    check(fast, plain, truth)


@pytest.mark.parametrize("name", REGISTRY["grouped"])
def test_rows_of_no_group_are_zero(name: str, device: torch.device) -> None:
    kernel = REGISTRY["grouped"][name].product
    a = torch.randn(20, 16, device=device, dtype=torch.bfloat16)
    b = torch.randn(3, 16, 8, device=device, dtype=torch.bfloat16)
    out = kernel(a, b, ends_of((4, 0, 9), device), whole=False)
    assert out.shape == (20, 8)
    assert (out[13:] == 0).all()
    assert (out[:13] != 0).any(dim=1).all()
    total = kernel(a.t(), torch.ones_like(a), ends_of((4, 0, 9), device))
    assert torch.allclose(total[2, :, 0].to(torch.float32), a[4:13].to(torch.float32).sum(0), atol=0.1)
    assert (total[1] == 0).all()


@pytest.mark.parametrize("way", ["any", "triton"])
@pytest.mark.parametrize("sizes", [*SIZES, (0, 3, 0)], ids=str)
@pytest.mark.parametrize("width", [1, 24, 200])
def test_empty_groups_are_zeroed_alone(way: str, sizes: tuple[int, ...], width: int, device: torch.device) -> None:
    zero = {"any": zero_empty_groups, "triton": zero_with_triton}[way]
    if way == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    out = torch.full((len(sizes), width, 48), torch.nan, device=device, dtype=torch.bfloat16)
    zero(out, ends_of(sizes, device))
    for group, size in zip(out, sizes, strict=True):
        if size == 0:
            assert (group == 0).all()
        else:
            assert group.isnan().all()


@pytest.mark.gpu
def test_experts_without_tokens_have_no_gradient_in_used_memory() -> None:
    """At a size at which a block of the GPU computes one group after the other, in memory that held NaN."""
    device = torch.device("cuda")
    sizes = tuple(0 if number % 5 == 3 else 37 * number for number in range(32))
    rows, width = sum(sizes), 1440
    a = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    b = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    ends_E = ends_of(sizes, device)
    for _ in range(20):
        torch.full((32, width, width), torch.nan, device=device, dtype=torch.bfloat16)
        out = REGISTRY["grouped"]["torch"].product(a.t(), b, ends_E)
        assert out.isfinite().all()
        for group, size in zip(out, sizes, strict=True):
            assert (size > 0) == bool((group != 0).any())


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (4, 4096), (1, 8193)], ids=str)
def test_gradients_are_added_up_as_torch_adds_them(
    shape: tuple[int, int], dtype: torch.dtype, overwrite: bool, device: torch.device
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=draw).to(dtype).to(device)
    into = torch.randn(*shape, generator=draw).to(device)
    if overwrite:
        into.fill_(float("nan"))
    expected = x.to(torch.float32) if overwrite else into + x
    add_(into, x, overwrite=overwrite)
    assert torch.equal(into, expected)


@pytest.mark.skipif(not INTERPRETED, reason="the kernel runs here under TRITON_INTERPRET=1")
@pytest.mark.parametrize("overwrite", [True, False])
def test_the_kernel_adds_up_bf16(overwrite: bool) -> None:
    x = torch.randn(3, 4099).to(torch.bfloat16)
    into = torch.randn(3, 4099)
    expected = x.to(torch.float32) if overwrite else into + x
    add_with_triton(into, x, overwrite=overwrite)
    assert torch.equal(into, expected)
