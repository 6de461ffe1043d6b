"""A linear layer costs three matrix products a step, whenever its weight gradient is made."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megaspec.nn.linear import Linear, WeightGradientQueue, WeightGradientSum

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def products(function: Callable[[], object]) -> int:
    """Matrix products that ran, inside custom operations too."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return sum(e.name.rstrip("_") in PRODUCTS for e in seen.events())


def layer(bias: bool) -> tuple[Linear, Tensor, Tensor]:
    torch.manual_seed(1)
    linear = Linear(6, 4, 3, bias=bias).double()
    for p in linear.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    return linear, x, torch.randn(2, 5, 7, dtype=torch.float64)


def truth(linear: Linear, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Gradients by autograd through the equation."""
    leaves = {"x": x, **dict(linear.named_parameters())}
    y = x @ linear.weight.t() + (0 if linear.bias is None else linear.bias)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_at_once(bias: bool) -> None:
    linear, x, grad = layer(bias)
    expected = truth(linear, x, grad)
    assert products(lambda: linear(x).backward(grad)) == 3
    for name, g in {"x": x.grad, **{n: p.grad for n, p in linear.named_parameters()}}.items():
        assert torch.allclose(g, expected[name], rtol=1e-13), name


@pytest.mark.parametrize("bias", [False, True])
def test_put_off(bias: bool) -> None:
    linear, x, grad = layer(bias)
    expected = truth(linear, x, grad)
    linear.queue = WeightGradientQueue()
    assert products(lambda: linear(x).backward(grad)) == 2
    assert linear.weight.grad is None
    assert len(linear.queue) == 1
    assert torch.allclose(x.grad, expected["x"], rtol=1e-13)
    assert products(linear.queue.run) == 1
    assert torch.allclose(linear.weight.grad, expected["weight"], rtol=1e-13)
    assert len(linear.queue) == 0


@pytest.mark.parametrize("queued", [False, True])
def test_summed_inside_the_product(queued: bool) -> None:
    linear, x, grad = layer(False)
    expected = truth(linear, x, grad)["weight"]
    total = torch.full((7, 6), float("nan"), dtype=torch.float64)
    arrived = []
    sum_ = WeightGradientSum(total, lambda: arrived.append(1))
    linear.total = total
    linear.queue = WeightGradientQueue() if queued else None

    def step() -> None:
        linear(x).backward(grad)
        if queued:
            linear.queue.run()

    assert products(step) == 3
    assert torch.allclose(total, expected, rtol=1e-13)
    step()
    assert torch.allclose(total, 2 * expected, rtol=1e-13)
    assert len(arrived) == 2
    sum_.start()
    step()
    assert torch.allclose(total, expected, rtol=1e-13)
    assert linear.weight.grad is None


def test_the_oldest_ones_run_first() -> None:
    queue = WeightGradientQueue()
    layers = [layer(False) for _ in range(3)]
    for linear, x, grad in layers:
        linear.queue = queue
        linear(x).backward(grad)
    queue.run(2)
    assert [linear.weight.grad is not None for linear, _, _ in layers] == [True, True, False]
    assert len(queue) == 1
    queue.run()
    assert layers[2][0].weight.grad is not None


def test_gradcheck() -> None:
    linear, x, _ = layer(True)
    linear.requires_grad_(True)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.func.functional_call(linear, {"weight": w, "bias": b}, (x,))

    assert torch.autograd.gradcheck(f, (x, linear.weight, linear.bias))
