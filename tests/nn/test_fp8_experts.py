"""Experts' products in fp8 against factors that are put on the grid expert by expert, in fp64."""

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Memory, Fp8Shared, Fp8Use
from megaspec.nn.linear import WeightGradientQueue, WeightGradientSums
from megaspec.nn.moe.fp8 import Fp8Experts
from megaspec.nn.moe.module import GroupedLinear
from megaspec_kernels.fp8_cast.padding import padded_rows
from megaspec_kernels.registry import REGISTRY
from tests.kernels.fp8 import quantised
from tests.nn.test_fp8 import form_of

E4M3 = torch.float8_e4m3fn
RECIPES = ["tensorwise", "delayed", "rowwise"]
SIZES = (21, 0, 1, 40)
EXPERTS, N_IN, N_OUT = len(SIZES), 32, 48


def layer_in(recipe: str, *, dtype: torch.dtype = torch.float64) -> tuple[GroupedLinear, Fp8Experts]:
    torch.manual_seed(1)
    layer = GroupedLinear(EXPERTS, N_IN, N_OUT, kernel=REGISTRY["grouped"]["reference"]).to(dtype)
    with torch.no_grad():
        for expert, part in enumerate(layer.weight.chunk(EXPERTS)):
            part.copy_(torch.randn(part.shape) * torch.exp2(torch.randint(-8, 3, part.shape).float()) * 4**expert)
    memory = None
    if recipe == "delayed":
        memory = Fp8Memory(torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    fp8 = Fp8Experts(
        form_of(recipe), Fp8Shared(), memory=memory, n_experts=EXPERTS, grouped=REGISTRY["scaled_grouped"]["reference"]
    )
    layer.fp8 = Fp8Use(fp8.ticket, recipe, "e5m2")
    # in a run the strategy holds it
    layer.held = fp8
    return layer, fp8


def inputs(rest: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    rows = sum(SIZES) + rest

    def random(width: int, least: int) -> Tensor:
        sizes = torch.exp2(torch.randint(least, 3, (rows, width), generator=draw).float())
        return (torch.randn(rows, width, generator=draw) * sizes).to(dtype)

    ends = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    return random(N_IN, -8).requires_grad_(), random(N_OUT, -16), ends


@pytest.mark.parametrize("rest", [0, 7])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products(recipe: str, rest: int) -> None:
    layer, _ = layer_in(recipe)
    x, grad, ends = inputs(rest)
    y = layer(x, ends, whole=rest == 0)
    y.backward(grad)
    # every expert as a dense layer: see test_fp8.py
    lines = (1, None) if recipe == "rowwise" else (None, None)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        rows = slice(first, last)
        first = last
        weight = layer.weight.detach().chunk(EXPERTS)[expert]
        made = layer.weight.grad.chunk(EXPERTS)[expert]
        if rows.start == rows.stop:
            assert not made.any()
            continue
        x_RI = x.detach()[rows]
        grad_RO = grad[rows]
        expected_y = quantised(x_RI, E4M3, lines) @ quantised(weight, E4M3, lines).t()
        # e4m3, though the form says e5m2
        expected_x = quantised(grad_RO, E4M3, lines) @ quantised(weight.t(), E4M3, lines).t()
        expected_weight = quantised(grad_RO.t(), E4M3, lines) @ quantised(x_RI.t(), E4M3, lines).t()
        torch.testing.assert_close(y.detach()[rows], expected_y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad[rows], expected_x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(made, expected_weight, rtol=1e-12, atol=1e-12)
        # the grid is felt
        assert (expected_y - x_RI @ weight.t()).abs().max() > 1e-3
    assert not y[first:].any()
    assert not x.grad[first:].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_byte_of_each_row_is_kept(recipe: str) -> None:
    layer, _ = layer_in(recipe, dtype=torch.bfloat16)
    x, _, ends = inputs(dtype=torch.bfloat16)
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x, ends)
    assert y.requires_grad
    apart = (layer.weight.data_ptr(), ends.data_ptr())
    held = [one for one in kept.values() if one.data_ptr() not in apart]
    kept_bytes = padded_rows(x.shape[0], EXPERTS) * N_IN
    assert [one.untyped_storage().nbytes() for one in held if one.dtype == E4M3] == [kept_bytes]
    assert len(held) == 2
    # a frozen matrix has no use for it
    kept.clear()
    layer.weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, ends).sum().backward()
    assert not [one for one in kept.values() if one.dtype == E4M3]
    assert x.grad.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_are_summed_and_deferred(recipe: str) -> None:
    plain, _ = layer_in(recipe)
    x, grad, ends = inputs()
    plain(x, ends).backward(grad)
    layer, fp8 = layer_in(recipe)
    sums = WeightGradientSums()
    buffer = torch.full((EXPERTS * N_OUT, N_IN), float("nan"), dtype=torch.float64)
    one = sums.connect(layer, buffer, lambda: None)
    one.start()
    queue = WeightGradientQueue()
    for _ in range(2):
        with sums.defer(queue):
            layer(x.detach().requires_grad_(), ends).backward(grad)
    assert buffer.isnan().all()
    if fp8.memory is not None:
        # the next step's scales come before what was deferred
        fp8.memory.scales.mul_(8)
    queue.run()
    torch.testing.assert_close(buffer, 2 * plain.weight.grad, rtol=1e-13, atol=0)
    # a micro batch of which no token came here
    layer(x.detach()[:0].requires_grad_(), 0 * ends).sum().backward()
    torch.testing.assert_close(buffer, 2 * plain.weight.grad, rtol=1e-13, atol=0)


def test_delayed_scales_are_of_all_experts_and_rows_of_none_are_not_seen() -> None:
    layer, fp8 = layer_in("delayed")
    x, grad, ends = inputs(rest=5)
    loud = x.detach().clone()
    loud[-2] = 1e6
    fp8.shared.is_recording = True
    layer(loud.requires_grad_(), ends, whole=False).backward(grad)
    inside = slice(0, sum(SIZES))
    assert fp8.memory.seen.tolist() == [x[inside].abs().max().item(), grad[inside].abs().max().item()]
    assert fp8.memory.saturated.item() == 0
    fp8.memory.fresh = frozenset()
    fp8.memory.scales.copy_(torch.tensor([2.0**-8, 2.0**-12]))
    layer(loud, ends, whole=False).backward(grad)
    beyond = (x[inside].abs() > 448 * 2.0**-8).sum() + (grad[inside].abs() > 448 * 2.0**-12).sum()
    assert fp8.memory.saturated.item() == beyond.item() > 0


def test_a_rank_without_rows_looks_at_what_others_saw() -> None:
    """Ranks agree on which scales are known: what others have seen of a step, it has not."""
    layer, fp8 = layer_in("delayed")
    x = torch.zeros(0, N_IN, dtype=torch.float64, requires_grad=True)
    nowhere = torch.zeros(EXPERTS, dtype=torch.int32)
    fp8.shared.is_recording = True
    for role in ("input", "gradient"):
        fp8.memory.fresh = frozenset({role})
        fp8.shared.met_fresh = False
        layer(x, nowhere).sum().backward()
        assert fp8.shared.met_fresh
    fp8.memory.fresh = frozenset()
    fp8.shared.met_fresh = False
    layer(x, nowhere).sum().backward()
    assert not fp8.shared.met_fresh


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_quantised_once_for_each_version(recipe: str) -> None:
    layer, fp8 = layer_in(recipe)
    x, _, ends = inputs()
    before = layer(x, ends)
    held = fp8.weight(layer.weight)
    assert fp8.weight(layer.weight) is held
    with torch.no_grad():
        layer.weight.mul_(-3)
    # nobody said that it has changed
    assert torch.equal(layer(x, ends), before)
    fp8.shared.version += 1
    assert not torch.equal(layer(x, ends), before)
    fp8.forget_weight()
    assert fp8.weight(layer.weight) is not held


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_shows_in_its_own_expert(recipe: str) -> None:
    layer, fp8 = layer_in(recipe)
    x, grad, ends = inputs()
    bad = x.detach().clone()
    bad[3, 5] = float("inf")
    fp8.shared.is_recording = True
    y = layer(bad.requires_grad_(), ends)
    y.backward(grad)
    assert not torch.isfinite(y[3]).any()
    assert torch.isfinite(y[SIZES[0] :]).all()
    of_experts = layer.weight.grad.chunk(EXPERTS)
    assert not torch.isfinite(of_experts[0]).all()
    assert all(torch.isfinite(one).all() for one in of_experts[1:])
    if recipe == "delayed":
        assert torch.isfinite(fp8.memory.seen).all()
