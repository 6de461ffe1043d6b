"""Linear layers in fp8 through Transformer Engine: which matrices, scales and products a layer asks for, by one that
computes on a CPU in its place (tests/kernels/te.py)."""

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Memory, Fp8Shared, Fp8Use, fp8_columns, fp8_forward
from megaspec.nn.fp8_layouts import Role
from megaspec.nn.fp8_te import SCALES, TeFp8Form, TeFp8Linear
from megaspec.nn.linear import COMPILED, Linear
from megaspec_kernels.linear.te_fp8 import Scales
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import Fake, fake_transformer_engine
from tests.nn.casting_layers import hold_one_cast_of_a_weight, hold_sums, hold_sums_of_products, kept_by
from tests.source_patch import Patch, planted

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
RECIPES = list(SCALES)
SEQUENCES, TOKENS, N_IN, N_OUT = 2, 128, 256, 384


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def format_of(recipe: str) -> str:
    return "e4m3" if recipe == "blockwise" else "e5m2"


def layer_in(recipe: str, *, dtype: torch.dtype = torch.float64, bias: bool = False) -> tuple[Linear, TeFp8Linear]:
    torch.manual_seed(1)
    layer = Linear(N_IN, N_OUT, bias=bias).to(dtype)
    layer.products = REGISTRY["linear"]["te"]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.exp2(torch.randint(-4, 2, parameter.shape).float()))
    memory = None
    if recipe == "delayed":
        memory = Fp8Memory(torch.ones(2), torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    fp8 = TeFp8Linear(TeFp8Form(recipe, format_of(recipe), margin=0), Fp8Shared(), memory=memory)
    layer.fp8 = Fp8Use(fp8.ticket, recipe, format_of(recipe))
    # in a run the strategy holds it
    layer.held = fp8
    return layer, fp8


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(SEQUENCES, TOKENS, N_IN, generator=draw)
    grad = torch.randn(SEQUENCES, TOKENS, N_OUT, generator=draw) * 2e-3
    return x.to(dtype).requires_grad_(), grad.to(dtype)


def quantised(x_MK: Tensor, dtype: torch.dtype, scales: str) -> Tensor:
    """What a matrix becomes whose products sum over K, in fp64: of whole tensors by the format's largest number over
    amax, of blocks by the power of two below it."""
    wide = x_MK.float()
    if scales == "tensor":
        factor = LARGEST[dtype] / wide.abs().max()
        return ((wide * factor).to(dtype).double() / factor.double()).to(torch.float64)
    M, K = x_MK.shape
    high = 128 if scales == "squares" else 1
    blocks = wide.view(M // high, high, K // 128, 128)
    factor = torch.exp2(torch.log2(LARGEST[dtype] / blocks.abs().amax(dim=(1, 3), keepdim=True)).floor())
    return ((blocks * factor).to(dtype).double() / factor.double()).view(M, K)


def hold_products(recipe: str) -> None:
    """Holds a layer's three products to those of the numbers on the grid, by the recipe's own definition in fp64."""
    layer, _ = layer_in(recipe, bias=True)
    x, grad = inputs()
    y = layer(x)
    y.backward(grad)
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    lines = "lines" if recipe == "blockwise" else "tensor"
    of_weight = "squares" if recipe == "blockwise" else "tensor"
    form = E4M3 if recipe == "blockwise" else E5M2
    expected_y = quantised(x_MI, E4M3, lines) @ quantised(weight, E4M3, of_weight).t() + layer.bias
    expected_x = quantised(grad_MO, form, lines) @ quantised(weight.t(), E4M3, of_weight).t()
    expected_weight = quantised(grad_MO.t(), form, lines) @ quantised(x_MI.t(), E4M3, lines).t()
    # scales are in fp32, and so is their inverse
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(y.detach().flatten(0, 1), expected_y, **tolerance)
    torch.testing.assert_close(x.grad.flatten(0, 1), expected_x, **tolerance)
    torch.testing.assert_close(layer.weight.grad, expected_weight, **tolerance)
    torch.testing.assert_close(layer.bias.grad, grad_MO.sum(0))
    # the grid is felt
    assert (expected_y - (x_MI @ weight.t() + layer.bias)).abs().max() > 1e-2


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products(recipe: str, fake: Fake) -> None:
    hold_products(recipe)
    assert [call.layout for call in fake.products] == ["TN", "NN", "NT"]
    assert all(call.in_fp8 for call in fake.products)
    # as its recipes have it: fewer bits in the sums of the forward pass alone
    assert [call.split for call in fake.products] == [False, True, True]


LAYER = "megaspec.nn.fp8_te"
PACKAGE = "megaspec_kernels.linear.te_fp8"
OF_TENSORS = ("tensorwise", "delayed")
BLOCKWISE = ("blockwise",)
# Planted: wrong scales and swapped layouts that the package itself would take without a word.
BUGS = {
    "a scale twice as large": (
        Patch(LAYER, "scale = scale.view(1).to(torch.float32)", "scale = 2 * scale.view(1).to(torch.float32)"),
        OF_TENSORS,
    ),
    "a scale that is the factor": (
        Patch(PACKAGE, "fp8_scale_inv=factor.scale,", "fp8_scale_inv=1 / factor.scale,"),
        OF_TENSORS,
    ),
    "a factor twice as large, by which elements saturate": (
        Patch(PACKAGE, "factor = LARGEST[dtype] / amax / 2.0**margin", "factor = 2 * LARGEST[dtype] / amax"),
        ("delayed",),
    ),
    "columns as they lie in rows": (
        Patch(
            LAYER,
            "in_columns = Fp8Tensor(cast.columns.values, cast.columns.scale.view(1, 1))",
            "in_columns = Fp8Tensor(\n"
            "                cast.rows.values.reshape(cast.columns.values.shape), cast.columns.scale.view(1, 1)\n"
            "            )",
        ),
        OF_TENSORS,
    ),
    "a scale of blocks twice as large": (
        Patch(
            PACKAGE,
            "Factor(found._rowwise_data.view(dtype), found._rowwise_scale_inv)",
            "Factor(found._rowwise_data.view(dtype), 2 * found._rowwise_scale_inv)",
        ),
        BLOCKWISE,
    ),
    "scales of lines as they lie, not turned": (
        Patch(
            LAYER,
            "scale = scale.t().contiguous()\n        return Factor",
            "scale = scale.reshape(scale.shape[::-1])\n        return Factor",
        ),
        BLOCKWISE,
    ),
    "scales of the lines beside": (
        Patch(
            LAYER,
            "scale_in_columns(cast.columns.scale, BLOCKS",
            "scale_in_columns(cast.columns.scale.roll(1, 1), BLOCKS",
        ),
        BLOCKWISE,
    ),
    "columns of blocks as they lie in rows": (
        Patch(
            PACKAGE,
            "Factor(found._columnwise_data.view(dtype), found._columnwise_scale_inv)",
            "Factor(\n"
            "        found._rowwise_data.reshape(found._columnwise_data.shape).view(dtype),\n"
            "        found._columnwise_scale_inv,\n"
            "    )",
        ),
        BLOCKWISE,
    ),
}
PLANTED = [(name, recipe) for name, (_, recipes) in BUGS.items() for recipe in recipes]


@pytest.mark.parametrize(("name", "recipe"), PLANTED)
def test_wrong_scales_and_swapped_layouts_are_caught(name: str, recipe: str, fake: Fake) -> None:
    patch, _ = BUGS[name]
    with planted(patch), pytest.raises(AssertionError, match="Tensor-likes are not close"):
        hold_products(recipe)
    # all of its products were made
    assert len(fake.products) == 3


@pytest.mark.parametrize("tokens", [1, 9, 63, 130])
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens(recipe: str, tokens: int, fake: Fake) -> None:
    """As when a text is written; a product of Transformer Engine's takes 16 at a time. What stands behind them changes
    nothing: the products are those of the numbers on the grid."""
    layer, fp8 = layer_in(recipe)
    x, grad = inputs()
    x = x.detach().flatten(0, 1)[:tokens].requires_grad_()
    grad = grad.flatten(0, 1)[:tokens]
    y = layer(x)
    y.backward(grad)
    x_MI, x_IM = on_grid(fp8, x.detach(), "input")
    grad_MO, grad_OM = on_grid(fp8, grad, "gradient")
    weight_OI, weight_IO = on_grid(fp8, layer.weight.detach(), "weight")
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(y.detach(), x_MI @ weight_OI.t(), **tolerance)
    torch.testing.assert_close(x.grad, grad_MO @ weight_IO.t(), **tolerance)
    torch.testing.assert_close(layer.weight.grad, grad_OM @ x_IM.t(), **tolerance)
    # without a gradient no columns are made
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def on_grid(fp8: TeFp8Linear, matrix: Tensor, role: Role) -> tuple[Tensor, Tensor]:
    """What it casts a matrix to, in rows and in columns, in fp64."""
    pair = fp8.quantise(matrix, role)
    scales = fp8.form.scales(role)
    rows = wide(*pair.rows, scales)
    turned = pair.columns.scale
    if scales == "lines":
        # as they are handed on
        turned = turned.t()
    return rows, wide(pair.columns.values, turned, scales)


def wide(values: Tensor, scale: Tensor, scales: Scales) -> Tensor:
    """A matrix in one layout, in fp64; scales as Transformer Engine has them."""
    rows, inner = values.shape
    if scales == "lines":
        scale = scale[:, :rows].t()
    if scales != "tensor":
        scale = scale.repeat_interleave(128, 1)[:, :inner]
    if scales == "squares":
        scale = scale.repeat_interleave(128, 0)[:rows]
    return values.double() * scale.double()


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_are_added_in_the_product(recipe: str, fake: Fake) -> None:
    layer, _ = layer_in(recipe, dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    total = hold_sums(layer, x, grad)
    hold_sums_of_products([call for call in fake.products if call.layout == "NT"], total)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_is_cast_once_for_each_version(recipe: str, fake: Fake) -> None:
    layer, fp8 = layer_in(recipe, dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    hold_one_cast_of_a_weight(layer, fp8, fake, x, grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_byte_of_each_input_is_kept(recipe: str, fake: Fake) -> None:
    layer, _ = layer_in(recipe, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    held = kept_by(layer, x)
    assert [one.numel() for one in held if one.dtype == E4M3] == [x.numel()]
    scales = sum(one.numel() for one in held if one.dtype == torch.float32)
    assert scales == {"tensorwise": 1, "delayed": 1, "blockwise": 2 * N_IN}[recipe]
    assert len(held) == 2


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_of_an_input_are_gathered_to_the_whole(recipe: str, fake: Fake) -> None:
    """What two ranks keep of a sequence makes the columns that one rank keeps, by the same scales."""
    layer, _ = layer_in(recipe, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    x = x.detach()
    ticket = layer.fp8.ticket
    y, whole, scale = fp8_forward(x, layer.weight, ticket, recipe, True, 0, 1)
    kept = []
    for part in range(2):
        same, one, its_scale = fp8_forward(x, layer.weight, ticket, recipe, True, part, 2)
        assert torch.equal(same, y)
        assert one.shape == (SEQUENCES, TOKENS // 2, N_IN)
        assert torch.equal(its_scale, scale)
        kept.append(one.view(torch.uint8))
    gathered = fp8_columns(torch.cat(kept, dim=1).view(E4M3), ticket)
    assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_make_the_same_bits(recipe: str, fake: Fake) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        layer, _ = layer_in(recipe, dtype=torch.bfloat16)
        x, grad = inputs(torch.bfloat16)
        run = layer
        if compiled:
            run = torch.compile(lambda x, layer=layer: layer(x) * 2, options=COMPILED, fullgraph=True)
        y = run(x) if compiled else layer(x) * 2
        y.backward(grad)
        found.append((y.detach(), x.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        assert torch.equal(eager, traced)


def test_a_delayed_scale_is_known_before_its_elements(fake: Fake) -> None:
    layer, fp8 = layer_in("delayed")
    x, grad = inputs()
    fp8.shared.is_recording = True
    layer(x).backward(grad)
    # nothing is remembered: scales are those of the elements, which are seen
    assert torch.equal(fp8.memory.seen, torch.stack((x.detach().abs().max(), grad.abs().max())).float())
    fp8.memory.fresh = frozenset()
    fp8.memory.scales.copy_(torch.tensor([448.0 / 16, 57344.0 / 0.5]))
    y = layer(x)
    by_16 = (x.detach().flatten(0, 1).float() * 28).to(E4M3).double() / 28
    expected = by_16 @ quantised(layer.weight.detach(), E4M3, "tensor").t()
    torch.testing.assert_close(y.detach().flatten(0, 1), expected, rtol=1e-6, atol=1e-6)
    # what evaluations see is not remembered
    fp8.memory.seen.zero_()
    fp8.shared.is_recording = False
    layer(x)
    assert not fp8.memory.seen.any()


def test_ranks_that_divide_a_matrix_have_one_scale(fake: Fake) -> None:
    """Of a weight whose outputs ranks divide, the other rank's part has the larger element."""
    layer, fp8 = layer_in("tensorwise")
    asked = []

    def largest(amax: Tensor) -> Tensor:
        asked.append(amax)
        return 4 * amax

    fp8.split = "outputs"
    fp8.largest = largest
    x, grad = inputs()
    layer(x).backward(grad)
    # the weight, and the gradient of the outputs; the input is whole on each rank
    assert len(asked) == 2
    factor = 448.0 / (4 * layer.weight.detach().abs().max().float())
    assert torch.equal(fp8._weight.rows.scale, 1 / factor.view(1, 1))
