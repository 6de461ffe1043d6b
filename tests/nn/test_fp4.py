"""Linear layers in NVFP4: which matrices, scales and products a layer asks for, of the reference and of Transformer
Engine, by one that computes on a CPU in its place (tests/kernels/te.py)."""

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp4 import Fp4Form, Fp4Linear
from megaspec.nn.fp8 import Fp8Shared, Fp8Use, columns_of_tokens, fp8_forward
from megaspec.nn.linear import COMPILED, Linear
from megaspec_kernels.linear.nvfp4 import HEAD
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import FP4, Fake, fake_transformer_engine
from tests.nn.casting_layers import hold_one_cast_of_a_weight, hold_sums, hold_sums_of_products, kept_by
from tests.source_patch import Patch, planted

KERNELS = ["reference", "te"]
SEQUENCES, TOKENS, N_IN, N_OUT = 2, 48, 160, 96
GRID = torch.tensor(FP4, dtype=torch.float64)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def layer_in(
    kernel: str, *, rounding: str = "nearest", dtype: torch.dtype = torch.float64, bias: bool = False
) -> tuple[Linear, Fp4Linear]:
    torch.manual_seed(1)
    layer = Linear(N_IN, N_OUT, bias=bias).to(dtype)
    layer.products = REGISTRY["linear"][kernel]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.exp2(torch.randint(-2, 2, parameter.shape).float()))
    fp4 = Fp4Linear(Fp4Form(rounding, layer.products.nvfp4), Fp8Shared())
    layer.fp8 = Fp8Use(fp4.ticket, "nvfp4", "e4m3")
    # in a run the strategy holds it
    layer.held = fp4
    return layer, fp4


def inputs(dtype: torch.dtype = torch.float64, *, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(SEQUENCES, tokens, N_IN, generator=draw)
    grad = torch.randn(SEQUENCES, tokens, N_OUT, generator=draw) * 2e-3
    return x.to(dtype).requires_grad_(), grad.to(dtype)


def quantised(lines: Tensor, *, squares: bool = False) -> Tensor:
    """What lines become along which a product sums, in fp64: the paper's equations, with scales in their formats."""
    L, N = lines.shape
    amax = lines.abs().max().float()
    high = 16 if squares else 1
    blocks = lines.double().view(L // high, high, N // 16, 16)
    encode = torch.tensor(2688.0) / amax
    scale = blocks.abs().amax((1, 3), keepdim=True).float() * (encode * torch.tensor(1 / 6))
    decode = scale.clamp(max=448).to(torch.float8_e4m3fn).double() * amax.double() / 2688
    scaled = (blocks / decode).clamp(-6, 6)
    nearest = GRID[(scaled.abs()[..., None] - GRID).abs().argmin(-1)] * scaled.sign()
    return (nearest * decode).view(L, N)


def turned(x_MK: Tensor) -> Tensor:
    """Columns as weight gradients sum over them."""
    x_KM = torch.nn.functional.pad(x_MK, (0, 0, 0, -len(x_MK) % 32)).t().contiguous().double()
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    whole = torch.kron(torch.kron(one, one), torch.kron(one, one)) / 4
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float64)
    return ((x_KM.view(-1, 16) * signs) @ whole).view(x_KM.shape)


def hold_products(kernel: str, tokens: int = TOKENS) -> None:
    """Holds a layer's three products to those of the numbers on the grid, by the recipe's own definition in fp64."""
    layer, _ = layer_in(kernel, bias=True)
    x, grad = inputs(tokens=tokens)
    y = layer(x)
    y.backward(grad)
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    weight_grid = quantised(weight, squares=True)
    expected_y = quantised(x_MI) @ weight_grid.t() + layer.bias
    expected_x = quantised(grad_MO) @ weight_grid
    expected_weight = quantised(turned(grad_MO)) @ quantised(turned(x_MI)).t()
    # scales are inverted in fp32
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(y.detach().flatten(0, 1), expected_y, **tolerance)
    torch.testing.assert_close(x.grad.flatten(0, 1), expected_x, **tolerance)
    torch.testing.assert_close(layer.weight.grad, expected_weight, **tolerance)
    torch.testing.assert_close(layer.bias.grad, grad_MO.sum(0))
    # the grid is felt
    assert (expected_y - (x_MI @ weight.t() + layer.bias)).abs().max() > 1e-1


@pytest.mark.parametrize("tokens", [1, 16, 48, 65])
@pytest.mark.parametrize("kernel", KERNELS)
def test_three_products(kernel: str, tokens: int, fake: Fake) -> None:
    hold_products(kernel, tokens)
    if kernel == "te":
        assert all(call.in_fp8 for call in fake.products)
        assert len(fake.products) == 3


LAYER = "megaspec.nn.fp4"
PACKAGE = "megaspec_kernels.linear.te_nvfp4"
REFERENCE = "megaspec_kernels.linear.nvfp4"
# Planted: wrong scales and swapped layouts that the package itself would take without a word.
BUGS = {
    "scales of the lines beside": (
        Patch(PACKAGE, "scale = found._columnwise_scale_inv[:K, : x_MK.shape[0] // BLOCK]",
              "scale = found._columnwise_scale_inv[:K, : x_MK.shape[0] // BLOCK].roll(1, 0)"),
        ["te"],
    ),
    "the matrix scale of the other layout": (
        Patch(PACKAGE, "packed_scale(scale, found._amax_columnwise)", "packed_scale(scale, found._amax_rowwise)"),
        ["te"],
    ),
    "columns that are not rotated": (
        Patch(PACKAGE, 'rotates = columns and role != "weight"', "rotates = False"),
        ["te"],
    ),
    "weights in blocks of 1x16": (
        Patch(PACKAGE, 'with_2d_quantization=role == "weight"', "with_2d_quantization=False"),
        ["te"],
    ),
    "inputs in blocks of 16x16": (
        Patch(REFERENCE, 'squares=role == "weight", at_random', "squares=True, at_random"),
        ["reference"],
    ),
    "only inputs that are rotated": (
        Patch(REFERENCE, 'if role != "weight":\n', 'if role == "input":\n'),
        ["reference"],
    ),
    "a gradient in the place of an input": (
        Patch(LAYER, "kernel.cast(x_MK, role,", 'kernel.cast(x_MK, "weight" if role == "gradient" else role,'),
        KERNELS,
    ),
}  # fmt: skip
PLANTED = [(name, kernel) for name, (_, kernels) in BUGS.items() for kernel in kernels]


@pytest.mark.parametrize(("name", "kernel"), PLANTED)
def test_wrong_scales_and_swapped_layouts_are_caught(name: str, kernel: str, fake: Fake) -> None:
    patch, _ = BUGS[name]
    with planted(patch), pytest.raises(AssertionError, match="Tensor-likes are not close"):
        hold_products(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_rounded_at_random_and_nothing_else(kernel: str, fake: Fake) -> None:
    layer, _ = layer_in(kernel, rounding="stochastic")
    plain, _ = layer_in(kernel)
    found = []
    for _ in range(64):
        x, grad = inputs()
        y = layer(x)
        y.backward(grad)
        found.append((y.detach(), x.grad))
    assert all(torch.equal(y, found[0][0]) for y, _ in found), "forward passes round to nearest"
    assert not torch.equal(found[0][1], found[1][1])
    x, grad = inputs()
    plain(x).backward(grad)
    weight_grid = quantised(layer.weight.detach(), squares=True)
    exact = grad.flatten(0, 1) @ weight_grid
    mean = torch.stack([one for _, one in found]).mean(0).flatten(0, 1)
    # what is lost is less in the mean of many, and that to nearest is lost each time
    assert (mean - exact).norm() < 0.35 * (x.grad.flatten(0, 1) - exact).norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_weight_gradients_are_added_in_the_product(kernel: str, fake: Fake) -> None:
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    total = hold_sums(layer, x, grad)
    if kernel == "te":
        hold_sums_of_products([call for call in fake.products if call.out is not None], total)


def test_a_weight_is_cast_once_for_each_version(fake: Fake) -> None:
    layer, fp4 = layer_in("te", dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    hold_one_cast_of_a_weight(layer, fp4, fake, x, grad)


@pytest.mark.parametrize("kernel", KERNELS)
def test_half_a_byte_of_each_input_is_kept_and_one_of_16(kernel: str, fake: Fake) -> None:
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    held = kept_by(layer, x)
    sizes = sorted(one.untyped_storage().nbytes() for one in held)
    assert sizes == [HEAD + x.numel() // 16, x.numel() // 2]


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_of_an_input_are_gathered_to_the_whole(kernel: str, fake: Fake) -> None:
    """What two ranks keep of a sequence makes the columns that one rank keeps, by the same scales: of blocks that go
    across the border between them, too."""
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    x = x.detach()
    ticket = layer.fp8.ticket
    y, whole, scale = fp8_forward(x, layer.weight, ticket, "nvfp4", True, 0, 1)
    kept = []
    for part in range(2):
        same, one, its_scale = fp8_forward(x, layer.weight, ticket, "nvfp4", True, part, 2)
        assert torch.equal(same, y)
        assert one.numel() == x.numel() // 4
        assert torch.equal(its_scale, scale)
        kept.append(one)
    gathered = columns_of_tokens(torch.cat(kept, dim=1), layer.fp8, N_IN)
    assert torch.equal(gathered, whole)


@pytest.mark.parametrize("tokens", [48, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_layers_make_the_same_bits(kernel: str, tokens: int, fake: Fake) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        layer, _ = layer_in(kernel, rounding="stochastic", dtype=torch.bfloat16)
        x, grad = inputs(torch.bfloat16, tokens=tokens)
        run = layer
        if compiled:
            run = torch.compile(lambda x, layer=layer: layer(x) * 2, options=COMPILED, fullgraph=True)
        y = run(x) if compiled else layer(x) * 2
        torch.manual_seed(5)
        y.backward(grad)
        found.append((y.detach(), x.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        assert torch.equal(eager, traced)


def test_ranks_that_divide_a_matrix_have_one_scale(fake: Fake) -> None:
    """Of a weight whose outputs ranks divide, the other rank's part has the larger element."""
    layer, fp4 = layer_in("reference")
    asked = []

    def largest(amax: Tensor) -> Tensor:
        asked.append(amax)
        return 4 * amax

    fp4.split = "outputs"
    fp4.largest = largest
    x, grad = inputs()
    layer(x).backward(grad)
    # the weight, and the gradient of the outputs, each in both layouts; the input is whole on each rank
    assert [one.shape for one in asked] == [(2,), (2,)]
    amax = fp4._weight.rows.scale[:4].view(torch.float32)
    assert amax == 4 * layer.weight.detach().abs().max().float()
