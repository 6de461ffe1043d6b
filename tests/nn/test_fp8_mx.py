"""Linear layers in MXFP8: which matrices, scales and products a layer asks for, of the reference and of Transformer
Engine, by one that computes on a CPU in its place (tests/kernels/te.py)."""

import pytest
import torch
from torch import Tensor

from megaspec.nn.fp8 import Fp8Shared, Fp8Use, columns_of_tokens, fp8_forward
from megaspec.nn.fp8_mx import MxFp8Form, MxFp8Linear
from megaspec.nn.linear import COMPILED, Linear
from megaspec_kernels.linear import mxfp8
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import Fake, fake_transformer_engine
from tests.nn.casting_layers import hold_one_cast_of_a_weight, hold_sums, hold_sums_of_products, kept_by
from tests.source_patch import Patch, planted

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
KERNELS = ["reference", "te"]
# tokens fill three blocks, widths an odd number of them
SEQUENCES, TOKENS, N_IN, N_OUT = 2, 48, 160, 96


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def layer_in(
    kernel: str, *, gradient: str = "e4m3", dtype: torch.dtype = torch.float64, bias: bool = False
) -> tuple[Linear, MxFp8Linear]:
    torch.manual_seed(1)
    layer = Linear(N_IN, N_OUT, bias=bias).to(dtype)
    layer.products = REGISTRY["linear"][kernel]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * torch.exp2(torch.randint(-4, 2, parameter.shape).float()))
    fp8 = MxFp8Linear(MxFp8Form(gradient, layer.products.mxfp8), Fp8Shared())
    layer.fp8 = Fp8Use(fp8.ticket, "mxfp8", gradient)
    # in a run the strategy holds it
    layer.held = fp8
    return layer, fp8


def inputs(dtype: torch.dtype = torch.float64, *, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(SEQUENCES, tokens, N_IN, generator=draw) * 8
    grad = torch.randn(SEQUENCES, tokens, N_OUT, generator=draw) * 2e-3
    return x.to(dtype).requires_grad_(), grad.to(dtype)


def quantised(x_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """What a matrix becomes whose products sum over K, in fp64: each 32 by the smallest power of two by which the
    largest fits; what is missing in the last of them is zero."""
    M, K = x_MK.shape
    blocks = torch.nn.functional.pad(x_MK.double(), (0, -K % 32)).view(M, -1, 32)
    amax = blocks.abs().amax(2, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(amax / LARGEST[dtype])))
    return ((blocks / scale).float().to(dtype).double() * scale).view(M, -1)[:, :K]


def hold_products(kernel: str, gradient: str = "e4m3", tokens: int = TOKENS) -> None:
    """Holds a layer's three products to those of the numbers on the grid, by the recipe's own definition in fp64."""
    layer, _ = layer_in(kernel, gradient=gradient, bias=True)
    x, grad = inputs(tokens=tokens)
    y = layer(x)
    y.backward(grad)
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    form = FORMATS[gradient]
    expected_y = quantised(x_MI, E4M3) @ quantised(weight, E4M3).t() + layer.bias
    expected_x = quantised(grad_MO, form) @ quantised(weight.t(), E4M3).t()
    expected_weight = quantised(grad_MO.t(), form) @ quantised(x_MI.t(), E4M3).t()
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(y.detach().flatten(0, 1), expected_y, **tolerance)
    torch.testing.assert_close(x.grad.flatten(0, 1), expected_x, **tolerance)
    torch.testing.assert_close(layer.weight.grad, expected_weight, **tolerance)
    torch.testing.assert_close(layer.bias.grad, grad_MO.sum(0))
    # the grid is felt
    assert (expected_y - (x_MI @ weight.t() + layer.bias)).abs().max() > 1e-2


@pytest.mark.parametrize("gradient", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 48, 65])
@pytest.mark.parametrize("kernel", KERNELS)
def test_three_products(kernel: str, tokens: int, gradient: str, fake: Fake) -> None:
    hold_products(kernel, gradient, tokens)
    if kernel == "te":
        assert [call.layout for call in fake.products] == ["TN", "NN", "NT"]
        assert all(call.in_fp8 for call in fake.products)
        # fewer bits in the sums of the forward pass alone
        assert [call.split for call in fake.products] == [False, True, True]


LAYER = "megaspec.nn.fp8_mx"
PACKAGE = "megaspec_kernels.linear.te_mxfp8"
REFERENCE = "megaspec_kernels.linear.mxfp8"
# Planted: wrong scales and swapped layouts that the package itself would take without a word. With the kernels in
# which they are felt.
BUGS = {
    "a scale twice as large": (
        Patch(PACKAGE, "in_rows = Factor(found._rowwise_data[:M].view(dtype), scale)",
              "in_rows = Factor(found._rowwise_data[:M].view(dtype), scale + 1)"),
        ["te"],
    ),
    "scales of the blocks beside": (
        Patch(PACKAGE, "scale = found._columnwise_scale_inv[: -(-M // BLOCK), :K].contiguous()",
              "scale = found._columnwise_scale_inv[: -(-M // BLOCK), :K].roll(1, 0)"),
        ["te"],
    ),
    "scales of the features beside": (
        Patch(PACKAGE, "scale = found._columnwise_scale_inv[: -(-M // BLOCK), :K].contiguous()",
              "scale = found._columnwise_scale_inv[: -(-M // BLOCK), :K].roll(1, 1)"),
        ["te"],
    ),
    "what is behind the scales": (
        Patch(PACKAGE, "found._rowwise_scale_inv[:M, : K // BLOCK]", "found._rowwise_scale_inv[:M, -K // BLOCK :]"),
        ["te"],
    ),
    "columns of rows": (
        Patch(LAYER, "in_columns = Fp8Tensor(*cast.columns)",
              "in_columns = Fp8Tensor(cast.rows.values if rows else cast.columns.values, cast.columns.scale)"),
        KERNELS,
    ),
    "gradients in the format of inputs": (
        Patch(LAYER, 'self.gradient_format if role == "gradient" else "e4m3"', '"e4m3"'),
        KERNELS,
    ),
    "a scale that lets the largest saturate": (
        Patch(REFERENCE, "+ (mantissa > 0.875) + BIAS", "+ BIAS"),
        ["reference"],
    ),
    "a scale that is larger than it has to be": (
        Patch(REFERENCE, "+ (mantissa > 0.875) + BIAS", "+ 1 + BIAS"),
        ["reference"],
    ),
}  # fmt: skip
PLANTED = [(name, kernel) for name, (_, kernels) in BUGS.items() for kernel in kernels]


@pytest.mark.parametrize(("name", "kernel"), PLANTED)
def test_wrong_scales_and_swapped_layouts_are_caught(name: str, kernel: str, fake: Fake) -> None:
    patch, _ = BUGS[name]
    with planted(patch), pytest.raises(AssertionError, match="Tensor-likes are not close"):
        hold_products(kernel, "e5m2")


@pytest.mark.parametrize("kernel", KERNELS)
def test_weight_gradients_are_added_in_the_product(kernel: str, fake: Fake) -> None:
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    total = hold_sums(layer, x, grad)
    if kernel == "te":
        hold_sums_of_products([call for call in fake.products if call.layout == "NT"], total)


def test_a_weight_is_cast_once_for_each_version(fake: Fake) -> None:
    layer, fp8 = layer_in("te", dtype=torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    hold_one_cast_of_a_weight(layer, fp8, fake, x, grad)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_byte_of_each_input_is_kept_and_one_of_32(kernel: str, fake: Fake) -> None:
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    held = kept_by(layer, x)
    assert [one.numel() for one in held if one.dtype == E4M3] == [x.numel()]
    assert [one.numel() for one in held if one.dtype == torch.uint8] == [x.numel() // 32]
    assert len(held) == 2
    # and nothing larger behind them
    assert sum(one.untyped_storage().nbytes() for one in held) == x.numel() * 33 // 32


@torch.no_grad()
@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_of_an_input_are_gathered_to_the_whole(kernel: str, fake: Fake) -> None:
    """What two ranks keep of a sequence makes the columns that one rank keeps, by the same scales: of blocks that go
    across the border between them, too."""
    layer, _ = layer_in(kernel, dtype=torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    x = x.detach()
    ticket = layer.fp8.ticket
    y, whole, scale = fp8_forward(x, layer.weight, ticket, "mxfp8", True, 0, 1)
    kept = []
    for part in range(2):
        same, one, its_scale = fp8_forward(x, layer.weight, ticket, "mxfp8", True, part, 2)
        assert torch.equal(same, y)
        assert one.shape == (SEQUENCES, TOKENS // 2, N_IN)
        assert torch.equal(its_scale, scale)
        kept.append(one.view(torch.uint8))
    gathered = columns_of_tokens(torch.cat(kept, dim=1).view(E4M3), layer.fp8, N_IN)
    assert torch.equal(gathered.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("tokens", [48, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_layers_make_the_same_bits(kernel: str, tokens: int, fake: Fake) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        layer, _ = layer_in(kernel, dtype=torch.bfloat16)
        x, grad = inputs(torch.bfloat16, tokens=tokens)
        run = layer
        if compiled:
            run = torch.compile(lambda x, layer=layer: layer(x) * 2, options=COMPILED, fullgraph=True)
        y = run(x) if compiled else layer(x) * 2
        y.backward(grad)
        found.append((y.detach(), x.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        assert torch.equal(eager, traced)


def test_the_package_makes_what_the_reference_does(fake: Fake) -> None:
    """Sums in fp64, of the same numbers on the grid."""
    found = []
    for kernel in KERNELS:
        layer, _ = layer_in(kernel)
        x, grad = inputs()
        y = layer(x)
        y.backward(grad)
        found.append((y.detach(), x.grad, layer.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_ranks_ask_nobody_for_a_scale(fake: Fake) -> None:
    """A rank that has half of the outputs makes the same of them as one that has all."""
    layer, fp8 = layer_in("te")
    whole = fp8.quantise(layer.weight.detach(), "weight")
    half = fp8.quantise(layer.weight.detach()[: N_OUT // 3], "weight")
    for of_all, of_some in zip(whole, half, strict=True):
        tokens = of_some.values.shape[0]
        assert torch.equal(of_all.values.view(torch.uint8)[:tokens], of_some.values.view(torch.uint8))
    assert mxfp8.BLOCK == N_OUT // 3
    assert torch.equal(whole.columns.scale[:1], half.columns.scale)
