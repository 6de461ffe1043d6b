"""Products in fp8 against factors that are put on the grid by the definition, in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp8 import REMEMBERED, Fp8Form, Fp8Linear, Fp8Memory, Fp8Shared, Fp8Use, fp8_columns, fp8_forward
from megaspec.nn.fp8_layouts import BLOCKS
from megaspec.nn.linear import COMPILED, Linear, WeightGradientQueue, WeightGradientSums
from megaspec_kernels.registry import REGISTRY
from megaspec_kernels.scaled_product.scales import as_read
from tests.kernels.fp8 import quantised
from tests.nn.casting_layers import kept_by

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
RECIPES = list(BLOCKS)
SEQUENCES, TOKENS, N_IN, N_OUT = 2, 96, 160, 272


def form_of(recipe: str, *, gradient_format: str = "e5m2") -> Fp8Form:
    return Fp8Form(
        recipe=recipe,
        gradient_format=gradient_format,
        margin=0,
        cast=REGISTRY["fp8_cast"]["reference"],
        product=REGISTRY["scaled_product"]["reference"],
    )


def layer_in(
    recipe: str, *, dtype: torch.dtype = torch.float64, gradient_format: str = "e5m2", bias: bool = False
) -> tuple[Linear, Fp8Linear]:
    torch.manual_seed(1)
    layer = Linear(N_IN, N_OUT, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.exp2(torch.randint(-8, 3, parameter.shape).float()))
    memory = None
    if recipe == "delayed":
        wide = torch.promote_types(dtype, torch.float32)
        memory = Fp8Memory(torch.ones(2, dtype=wide), torch.zeros(2, dtype=wide), torch.zeros(1, dtype=torch.int64))
    form = form_of(recipe, gradient_format=gradient_format)
    fp8 = Fp8Linear(form, Fp8Shared(), memory=memory)
    layer.fp8 = Fp8Use(fp8.ticket, recipe, gradient_format)
    # in a run the strategy holds it
    layer.held = fp8
    return layer, fp8


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(SEQUENCES, TOKENS, N_IN, generator=draw) * torch.exp2(
        torch.randint(-8, 3, (SEQUENCES, TOKENS, N_IN), generator=draw).float()
    )
    grad = torch.randn(SEQUENCES, TOKENS, N_OUT, generator=draw) * torch.exp2(
        torch.randint(-20, 3, (SEQUENCES, TOKENS, N_OUT), generator=draw).float()
    )
    return x.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize("gradient_format", ["e5m2", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products(recipe: str, gradient_format: str) -> None:
    layer, _ = layer_in(recipe, gradient_format=gradient_format, bias=True)
    x, grad = inputs()
    y = layer(x)
    y.backward(grad)
    # written out by role: lines along which each product sums, in their own order
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    whole = (None, None)
    lines = {"tensorwise": whole, "delayed": whole, "rowwise": (1, None), "blockwise": (1, 128)}[recipe]
    of_weight = (128, 128) if recipe == "blockwise" else lines
    form = E5M2 if gradient_format == "e5m2" else E4M3
    expected_y = quantised(x_MI, E4M3, lines) @ quantised(weight, E4M3, of_weight).t() + layer.bias
    expected_x = quantised(grad_MO, form, lines) @ quantised(weight.t(), E4M3, of_weight).t()
    expected_weight = quantised(grad_MO.t(), form, lines) @ quantised(x_MI.t(), E4M3, lines).t()
    torch.testing.assert_close(y.detach().flatten(0, 1), expected_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad.flatten(0, 1), expected_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.weight.grad, expected_weight, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, grad_MO.sum(0), rtol=1e-12, atol=1e-12)
    # the grid is felt
    assert (expected_y - (x_MI @ weight.t() + layer.bias)).abs().max() > 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_byte_of_each_input_is_kept(recipe: str) -> None:
    layer, _ = layer_in(recipe, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    held = kept_by(layer, x)
    values = [one for one in held if one.dtype == E4M3]
    assert [one.numel() for one in values] == [x.numel()]
    scales = sum(one.numel() for one in held if one.dtype == torch.float32)
    assert scales == {"tensorwise": 1, "delayed": 1, "rowwise": N_IN, "blockwise": 2 * N_IN}[recipe]
    assert len(held) == 2


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_layers_make_the_same_bits(recipe: str, frozen: bool) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        layer, _ = layer_in(recipe, dtype=torch.bfloat16)
        layer.weight.requires_grad_(not frozen)
        x, grad = inputs(torch.bfloat16)
        run = torch.compile(lambda x, layer=layer: layer(x) * 2, options=COMPILED) if compiled else None
        y = run(x) if compiled else layer(x) * 2
        y.backward(grad)
        found.append((y.detach(), x.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        if eager is None:
            assert traced is None
        else:
            assert torch.equal(eager, traced)


def test_layers_share_one_compiled_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def run(layer: Linear, x: Tensor) -> Tensor:
        return layer(x)

    compiled = torch.compile(run, backend=counter)
    layers = []
    for _ in range(3):
        layer, _ = layer_in("tensorwise", dtype=torch.bfloat16)
        layers.append(layer)
        compiled(layer, inputs(torch.bfloat16)[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_are_summed_and_deferred(recipe: str) -> None:
    plain, _ = layer_in(recipe)
    x, grad = inputs()
    plain(x).backward(grad)
    layer, _ = layer_in(recipe)
    sums = WeightGradientSums()
    buffer = torch.full((N_OUT, N_IN), float("nan"), dtype=torch.float64)
    one = sums.connect(layer, buffer, lambda: None)
    one.start()
    queue = WeightGradientQueue()
    for _ in range(2):
        with sums.defer(queue):
            layer(x.detach().requires_grad_()).backward(grad)
    assert buffer.isnan().all()
    assert len(queue) == 2
    queue.run()
    torch.testing.assert_close(buffer, 2 * plain.weight.grad, rtol=1e-13, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECIPES)
def test_of_gathered_tokens_a_rank_keeps_its_own(recipe: str) -> None:
    layer, fp8 = layer_in(recipe)
    x = inputs()[0].detach()[:1]
    whole = fp8_forward(x, layer.weight, fp8.ticket, recipe, True, 0, 1)[1]
    parts = [fp8_forward(x, layer.weight, fp8.ticket, recipe, True, part, 2)[1] for part in range(2)]
    assert [part.untyped_storage().nbytes() for part in parts] == [x.numel() // 2] * 2
    gathered = torch.cat([part.view(torch.uint8) for part in parts], 1).view(whole.dtype)
    assert torch.equal(fp8_columns(gathered, fp8.ticket).view(torch.uint8), whole.view(torch.uint8))


# who divides what: nobody, inputs of a weight (rows go across ranks), tokens (columns do)
@pytest.mark.parametrize("divided", ["nothing", "rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_layouts_at_once_are_those_of_each(recipe: str, dtype: torch.dtype, divided: str) -> None:
    asked = []

    def largest(amax: Tensor) -> Tensor:
        asked.append(tuple(amax.shape))
        # another rank has larger ones
        return 8 * amax

    fp8 = Fp8Linear(
        form_of(recipe),
        Fp8Shared(),
        split="inputs" if divided == "rows" else "none",
        largest=largest,
        of_tokens=frozenset({"input"}) if divided == "columns" else frozenset(),
    )
    x_MI = inputs(dtype)[0].detach().flatten(0, 1)
    both = fp8.quantise(x_MI, "input")
    crossed = list(asked)
    rows = fp8.quantise(x_MI, "input", columns=False).rows
    columns = fp8.quantise(x_MI, "input", rows=False).columns
    for found, alone in ((both.rows, rows), (both.columns, columns)):
        assert torch.equal(found.values.view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(found.scale, alone.scale)
        assert found.values.is_contiguous()
        # a product reads scales where they lie
        block = fp8.form.blocks("input").rows
        assert as_read(found.scale, block).data_ptr() == found.scale.data_ptr()
    if recipe == "rowwise":
        assert crossed == {"nothing": [], "rows": [(x_MI.shape[0], 1)], "columns": [(1, x_MI.shape[1])]}[divided]
    if recipe == "blockwise":
        assert not crossed


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_quantised_once_for_each_version(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, fp8 = layer_in(recipe)
    counted = []
    quantise = Fp8Linear.quantise

    def counting(self: Fp8Linear, x: Tensor, role: str, **layouts: bool):
        counted.append(role)
        return quantise(self, x, role, **layouts)

    monkeypatch.setattr(Fp8Linear, "quantise", counting)
    x, grad = inputs()
    for _ in range(3):
        layer(x).backward(grad)
    assert counted.count("weight") == 1
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(-3)
    # nobody said that it has changed
    assert torch.equal(layer(x), before)
    fp8.shared.version += 1
    assert not torch.equal(layer(x), before)
    assert counted.count("weight") == 2
    fp8.forget_weight()
    layer(x)
    assert counted.count("weight") == 3


def test_delayed_scales_are_those_of_steps_before_and_what_is_larger_saturates() -> None:
    layer, fp8 = layer_in("delayed")
    x, grad = inputs()
    fp8.shared.is_recording = True
    layer(x).backward(grad)
    assert fp8.memory.seen.tolist() == [x.abs().max().item(), grad.abs().max().item()]
    assert fp8.memory.saturated.item() == 0
    fp8.memory.fresh = frozenset()
    # the largest number of each format by scales that are too small
    fp8.memory.scales.copy_(torch.tensor([2.0**-8, 2.0**-20]))
    held = fp8.memory.scales.untyped_storage().data_ptr()
    # what the operation returns is its own
    with torch.no_grad():
        made = fp8_forward(x, layer.weight, fp8.ticket, "delayed", True, 0, 1)
    assert held not in {tensor.untyped_storage().data_ptr() for tensor in made}
    fp8.memory.saturated.zero_()
    y = layer(x)
    beyond = (x.abs() > 448 * 2.0**-8).sum() + (grad.abs() > 57344 * 2.0**-20).sum()
    y.backward(grad)
    assert fp8.memory.saturated.item() == beyond.item() > 0
    clamped = x.detach().clamp(-448 * 2.0**-8, 448 * 2.0**-8)
    fp8.memory.fresh = frozenset(REMEMBERED)
    fp8.shared.is_recording = False
    torch.testing.assert_close(layer(clamped), y, rtol=0.1, atol=0.5)
    # an evaluation leaves no trace
    seen = fp8.memory.seen.clone()
    layer(1e3 * x)
    assert torch.equal(fp8.memory.seen, seen)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_shows(recipe: str, value: float) -> None:
    layer, fp8 = layer_in(recipe)
    x, grad = inputs()
    bad = x.detach().clone()
    bad[1, 3, 5] = value
    fp8.shared.is_recording = True
    y = layer(bad.requires_grad_())
    assert not torch.isfinite(y[1, 3]).any()
    layer.weight.grad = None
    y.backward(grad)
    assert not torch.isfinite(layer.weight.grad).all()
    if recipe == "delayed":
        assert torch.isfinite(fp8.memory.seen).all()


def test_nothing_but_zeros() -> None:
    for recipe in RECIPES:
        layer, _ = layer_in(recipe)
        x, grad = inputs()
        zeros = torch.zeros_like(x).requires_grad_()
        y = layer(zeros)
        y.backward(torch.zeros_like(grad))
        assert not y.any()
        assert not layer.weight.grad.any()
        assert replace(form_of(recipe), margin=1).margin == 1
