"""A linear layer costs three matrix products a step, whenever its weight gradient is made."""

from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile

from megaspec.nn.linear import (
    COMPILED,
    COMPILED_FOR_LATER,
    Linear,
    WeightGradientQueue,
    WeightGradientSum,
    WeightGradientSums,
)

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


def summed(linear: Linear, sums: WeightGradientSums) -> tuple[WeightGradientSum, list[int]]:
    """Lets a layer's weight gradient be summed; -> the sum, and a list that grows with each gradient."""
    arrived: list[int] = []
    buffer = torch.full((7, 6), float("nan"), dtype=torch.float64)
    return sums.connect(linear, buffer, lambda: arrived.append(1)), arrived


@pytest.mark.parametrize("bias", [False, True])
def test_deferred(bias: bool) -> None:
    linear, x, grad = layer(bias)
    expected = truth(linear, x, grad)
    sums = WeightGradientSums()
    _, arrived = summed(linear, sums)
    queue = WeightGradientQueue()

    def backward() -> None:
        y = linear(x)
        with sums.defer(queue):
            y.backward(grad)

    assert products(backward) == 2
    assert torch.allclose(x.grad, expected["x"], rtol=1e-13)
    assert (len(queue), arrived) == (1, [])
    assert linear.main_grad.buffer.isnan().all()
    assert products(queue.run) == 1
    assert (len(queue), arrived) == (0, [1])
    assert torch.allclose(linear.main_grad.buffer, expected["weight"], rtol=1e-13)
    assert linear.weight.grad is None
    linear(x).backward(grad)
    assert len(queue) == 0, "deferred outside of defer"
    assert torch.allclose(linear.main_grad.buffer, 2 * expected["weight"], rtol=1e-13)


def test_summed_inside_the_product() -> None:
    linear, x, grad = layer(False)
    expected = truth(linear, x, grad)["weight"]
    sum_, arrived = summed(linear, WeightGradientSums())
    assert products(lambda: linear(x).backward(grad)) == 3
    assert torch.allclose(linear.main_grad.buffer, expected, rtol=1e-13)
    linear(x).backward(grad)
    assert torch.allclose(linear.main_grad.buffer, 2 * expected, rtol=1e-13)
    assert len(arrived) == 2
    sum_.start()
    linear(x).backward(grad)
    assert torch.allclose(linear.main_grad.buffer, expected, rtol=1e-13)
    assert linear.weight.grad is None


def test_the_oldest_ones_run_first() -> None:
    queue, sums, order = WeightGradientQueue(), WeightGradientSums(), []
    for i in range(3):
        linear, x, grad = layer(False)
        sums.connect(linear, torch.zeros(7, 6, dtype=torch.float64), lambda i=i: order.append(i))
        with sums.defer(queue):
            linear(x).backward(grad)
    queue.run()
    assert order == [0, 1, 2]


def test_what_waits_in_a_queue_is_what_was_there_when_it_was_put() -> None:
    """Compiled: memory that the backward pass no longer needs must not go to something else while products wait."""
    torch.manual_seed(1)
    plain = nn.Sequential(*(m for _ in range(3) for m in (Linear(16, 16), nn.GELU()))).double()
    for p in plain.parameters():
        nn.init.normal_(p, std=0.3)
    x, grad = torch.randn(2, 4, 8, 16, dtype=torch.float64).unbind()
    expected = torch.autograd.grad(plain(x), list(plain.parameters()), grad)
    linears = [m for m in plain if isinstance(m, Linear)]
    owner, sums = WeightGradientSums(), []
    for linear in linears:
        buffer = torch.full((16, 16), float("nan"), dtype=torch.float64)
        sums.append(owner.connect(linear, buffer, lambda: None))
    with functorch_config.patch(donated_buffer=False):
        compiled = torch.compile(plain, fullgraph=True, options=COMPILED_FOR_LATER)
        for _ in range(3):
            queues = [WeightGradientQueue() for _ in range(2)]
            for sum_ in sums:
                sum_.start()
            for queue in queues:
                with owner.defer(queue):
                    compiled(x.clone().requires_grad_()).backward(grad)
            for queue in queues:
                assert len(queue) == 3
                queue.run()
            for linear, g in zip(linears, expected, strict=True):
                assert torch.allclose(linear.main_grad.buffer, 2 * g, rtol=1e-12)


def compiled_layers(count: int) -> tuple[list[Linear], WeightGradientSums]:
    """Equal layers, each compiled as a block of a model is, with the sums of one model."""
    owner, layers = WeightGradientSums(), []
    for _ in range(count):
        linear, _, _ = layer(False)
        owner.connect(linear, torch.full((7, 6), float("nan"), dtype=torch.float64), lambda: None)
        linear.compile(fullgraph=True, options=COMPILED_FOR_LATER)
        layers.append(linear)
    return layers, owner


def test_one_compiled_block_serves_all_layers_of_models_side_by_side() -> None:
    """Each finds its own sum, and a queue of one model takes nothing of the other."""
    torch._dynamo.reset()
    _, x, grad = layer(False)
    (mine, mine_owner), (others, _) = compiled_layers(3), compiled_layers(2)
    layers = [*mine, *others]
    expected = truth(layers[0], x, grad)["weight"]
    counters.clear()
    queue = WeightGradientQueue()
    with functorch_config.patch(donated_buffer=False):
        outputs = [linear(x) for linear in layers]
        with mine_owner.defer(queue):
            for number, y in enumerate(outputs):
                y.backward((number + 1) * grad)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(queue) == len(mine)
    assert all(linear.main_grad.buffer.isnan().all() for linear in mine)
    queue.run()
    for number, linear in enumerate(layers):
        assert torch.allclose(linear.main_grad.buffer, (number + 1) * expected, rtol=1e-13)


def test_a_gradient_that_has_nowhere_to_go_is_told() -> None:
    linear, x, grad = layer(False)
    sum_, arrived = summed(linear, WeightGradientSums())
    sum_.stop()
    with pytest.raises(AssertionError, match=r"a weight gradient \(7, 6\) came while its sum has no memory"):
        linear(x).backward(grad)
    assert arrived == []


def test_gradcheck() -> None:
    linear, x, _ = layer(True)
    linear.requires_grad_(True)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.func.functional_call(linear, {"weight": w, "bias": b}, (x,))

    assert torch.autograd.gradcheck(f, (x, linear.weight, linear.bias))


def test_rows_that_the_compiler_would_pad() -> None:
    """Compiled, at a width that 128 bytes do not divide, padded as on a GPU: all gradients are those of eager mode."""
    torch.manual_seed(1)
    width = 1040
    block = nn.Sequential(nn.RMSNorm(width, eps=1e-5), Linear(width, 32), nn.GELU(), Linear(32, width, bias=True))
    last = nn.RMSNorm(width, eps=1e-5)
    for p in [*block.parameters(), *last.parameters()]:
        nn.init.normal_(p, std=0.1)
    x, grad, grad_normed = torch.randn(3, 2, 16, width).unbind()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + block(x)
        return h, last(h)

    def gradients(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        owner, buffers = WeightGradientSums(), []
        sums = []
        for linear in (block[1], block[3]):
            buffers.append(torch.full(tuple(linear.weight.shape), float("nan")))
            sums.append(owner.connect(linear, buffers[-1], lambda: None))
        leaf = x.clone().requires_grad_()
        torch.autograd.backward(function(leaf), [grad, grad_normed])
        return [leaf.grad, *buffers]

    expected = gradients(forward)
    with inductor_config.patch(disable_padding_cpu=False):
        found = gradients(torch.compile(forward, fullgraph=True, options=COMPILED))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
