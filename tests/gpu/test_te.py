"""Transformer Engine on a GPU: its numbers against what they are said to be, its losses beside ours, going on to a bit.

The gates of its products, norms and attention against fp64 stand with those of all implementations: tests/kernels.
"""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from megaspec.estimate.target import Target
from megaspec.nn.linear import WeightGradientSums
from megaspec_kernels import te_package
from megaspec_kernels.attention import te as te_attention
from megaspec_kernels.gate import check
from megaspec_kernels.scaled_product.bench import by_tensor_cores
from tests.conftest import Tell
from tests.gpu.test_fp8 import fp8, losses
from tests.kernels.wrong_te import needs_blackwell
from tests.nn import test_fp4 as fp4
from tests.nn import test_fp8_mx as mx
from tests.nn.test_fp8_te import RECIPES, format_of, inputs, layer_in, on_grid, quantised
from tests.parity.cases import Case
from tests.parity.checks import check_low
from tests.ranks import RankPool
from tests.runtime import lives
from tests.runtime.specs import spec

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
CUDA = torch.device("cuda")
TE = {"linear": "te", "norm": "te", "attention": "te"}


def _missing() -> str:
    """Why these tests can't run here; empty when they can."""
    if torch.cuda.device_count() < 1:
        return "needs a GPU"
    return te_package.missing() or ""


pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def installed() -> None:
    lacks = _missing()
    if lacks:
        pytest.skip(lacks)


def size(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_numbers_on_the_grid(recipe: str, tell: Tell) -> None:
    """In fp64, of factors that were put on the grid by the recipe's own definition: scales, layouts and formats are
    told right, since any other would be as far off as the grid is. The weight gradient is summed in fp32."""
    layer, fp8_layer = layer_in(recipe, dtype=torch.bfloat16)
    layer = layer.to(CUDA)
    if fp8_layer.memory is not None:
        memory = fp8_layer.memory
        memory.scales = memory.scales.to(CUDA)
        memory.seen = memory.seen.to(CUDA)
    total = torch.full(layer.weight.shape, float("nan"), device=CUDA)
    sums = WeightGradientSums()
    sums.connect(layer, total, lambda: None)
    x, grad = inputs(torch.bfloat16)
    x = x.detach().to(CUDA).requires_grad_()
    grad = grad.to(CUDA)
    y = layer(x)
    y.backward(grad)
    once = total.clone()
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    lines = "lines" if recipe == "blockwise" else "tensor"
    of_weight = "squares" if recipe == "blockwise" else "tensor"
    form = E5M2 if format_of(recipe) == "e5m2" else E4M3
    of_grid = {
        "out": quantised(x_MI, E4M3, lines) @ quantised(weight, E4M3, of_weight).t(),
        "x": quantised(grad_MO, form, lines) @ quantised(weight.t(), E4M3, of_weight).t(),
        "weight": quantised(grad_MO.t(), form, lines) @ quantised(x_MI.t(), E4M3, lines).t(),
    }
    exact = {
        "out": x_MI.double() @ weight.double().t(),
        "x": grad_MO.double() @ weight.double(),
        "weight": grad_MO.double().t() @ x_MI.double(),
    }
    found = {"out": y.detach().flatten(0, 1), "x": x.grad.flatten(0, 1), "weight": once}
    for name, truth in of_grid.items():
        error = size(found[name] - truth)
        felt = size(truth - exact[name])
        tell(f"{recipe}, {name}: {error / felt:.3f} of what the grid is off")
        # bf16's rounding of what is returned is a twentieth of it; sums in fp32 have next to none
        assert error <= (0.05 if name == "weight" else 0.25) * felt, name
    layer(x).backward(grad)
    torch.testing.assert_close(total, 2 * once, rtol=1e-5, atol=1e-5 * once.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens(recipe: str, tokens: int) -> None:
    """Its own checks let the products pass, and the gate: of the numbers that its casts have made."""
    layer, fp8_layer = layer_in(recipe, dtype=torch.bfloat16)
    layer = layer.to(CUDA)
    if fp8_layer.memory is not None:
        fp8_layer.memory.scales = fp8_layer.memory.scales.to(CUDA)
        fp8_layer.memory.seen = fp8_layer.memory.seen.to(CUDA)
    draw = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.weight.shape[1], generator=draw).to(CUDA, torch.bfloat16).requires_grad_()
    grad = (torch.randn(tokens, layer.weight.shape[0], generator=draw) * 2e-3).to(CUDA, torch.bfloat16)
    y = layer(x)
    y.backward(grad)
    x_MI, x_IM = on_grid(fp8_layer, x.detach(), "input")
    grad_MO, grad_OM = on_grid(fp8_layer, grad, "gradient")
    weight_OI, weight_IO = on_grid(fp8_layer, layer.weight.detach(), "weight")
    factors = {"out": (x_MI, weight_OI), "x": (grad_MO, weight_IO), "weight": (grad_OM, x_IM)}
    found = {"out": y.detach(), "x": x.grad, "weight": layer.weight.grad}
    plain = {name: by_tensor_cores(a, b, dtype=torch.bfloat16) for name, (a, b) in factors.items()}
    truth = {name: a @ b.t() for name, (a, b) in factors.items()}
    if recipe != "blockwise":
        # fewer bits in the sums of the forward pass, as its recipes have it: 2^-7 of the terms, as of torch's
        a, b = factors["out"]
        terms = (a.abs() @ b.abs().t()).max()
        assert (found.pop("out").double() - truth.pop("out")).abs().max() <= 2**-7 * terms
    check(found, plain, truth)


def test_amax_is_seen_and_the_scale_is_the_formulas() -> None:
    layer, fp8_layer = layer_in("delayed", dtype=torch.bfloat16)
    layer = layer.to(CUDA)
    memory = fp8_layer.memory
    memory.scales = torch.tensor([448.0 / 16, 57344.0 / 0.5], device=CUDA)
    memory.seen = torch.zeros(2, device=CUDA)
    fp8_layer.shared.is_recording = True
    memory.fresh = frozenset()
    x, grad = inputs(torch.bfloat16)
    x = x.detach().to(CUDA).requires_grad_()
    grad = grad.to(CUDA)
    # two micro batches: the largest of both
    layer(x).backward(grad)
    layer((x.detach() * 2).requires_grad_()).backward(grad / 2)
    expected = torch.stack((2 * x.detach().abs().max(), grad.abs().max())).float()
    assert torch.equal(memory.seen, expected)
    rows = fp8_layer.quantise(x.detach().flatten(0, 1), "input", columns=True)
    assert torch.equal(rows.rows.values.view(torch.uint8).t(), rows.columns.values.view(torch.uint8))
    by_28 = (x.detach().flatten(0, 1).float() * 28).clamp(-448, 448).to(E4M3)
    assert torch.equal(rows.rows.values.view(torch.uint8), by_28.view(torch.uint8))


@lru_cache
def learned(recipe: str, compile: str, by: str) -> list[float]:
    """Losses of eight steps. `recipe`: of fp8, or bf16. `by`: te, torch, or reference."""
    precision = {"kind": "bf16"} if recipe == "bf16" else fp8(recipe)
    others = {"te": TE, "reference": {"linear": "reference"}}.get(by)
    return losses(precision, compile=compile, others=others)


def rounded(values: list[float]) -> list[float]:
    return [round(one, 4) for one in values]


@pytest.mark.parametrize("compile", ["none", "block"])
def test_bf16_losses_are_torchs(compile: str, tell: Tell) -> None:
    plain = learned("bf16", compile, "torch")
    found = learned("bf16", compile, "te")
    tell(f"bf16 {compile}: torch {rounded(plain)}, te {rounded(found)}")
    assert found[0] == pytest.approx(plain[0], rel=1e-3)
    assert found[3] == pytest.approx(plain[3], rel=1e-2)
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_model_learns_as_in_bf16(recipe: str, compile: str, tell: Tell) -> None:
    plain = learned("bf16", compile, "te")
    found = learned(recipe, compile, "te")
    tell(f"{recipe} {compile}: bf16 {rounded(plain)}, fp8 {rounded(found)}")
    assert found[0] == pytest.approx(plain[0], rel=5e-3)
    assert found[0] != plain[0]
    assert found[3] == pytest.approx(plain[3], rel=3e-2)
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_losses_are_beside_ours(recipe: str, tell: Tell) -> None:
    """Other scales, the same recipe."""
    ours = learned(recipe, "none", "torch")
    found = learned(recipe, "none", "te")
    tell(f"{recipe}: ours {rounded(ours)}, te {rounded(found)}")
    assert found[0] == pytest.approx(ours[0], rel=5e-3)
    assert found[3] == pytest.approx(ours[3], rel=3e-2)


STEPS = 6
H200 = Target(gpus=1, gpu="NVIDIA H200", sm=90, cores=2, versions={"transformer-engine": "2.20.2"})
B200 = H200.model_copy(update={"gpu": "NVIDIA B200", "sm": 100})
BASE = {
    "train.steps": STEPS,
    "train.deterministic": True,
    "model": {
        "kind": "decoder", "n_layers": 3, "d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_head": 32, "d_ffn": 256,
        "vocab_size": 37,
    },
    "data": {"kind": "synthetic", "vocab_size": 37, "seq_len": 128},
    "kernels": TE | {"compile": "none"},
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_run_that_is_stopped_goes_on_to_the_bit(recipe: str, tmp_path, gpu_pool: RankPool) -> None:
    """With what delayed scales are made of, which its checkpoints hold."""
    precision = {"kind": "fp8", "recipe": recipe, "first_layers_bf16": 1}
    if recipe == "delayed":
        precision["amax_history"] = 3
    text = spec(BASE | {"precision": precision}, H200).model_dump_json()
    undisturbed = gpu_pool.run(lives.live, text, str(tmp_path / "whole"), ranks=1)[0]
    stopped = gpu_pool.run(lives.lives, text, str(tmp_path / "stopped"), stops=2, ranks=1)[0]
    assert [e["step"] for e in undisturbed if "samples" in e] == list(range(1, STEPS + 1))
    assert stopped == undisturbed
    assert lives.read_all(tmp_path / "stopped")[STEPS] == lives.read_all(tmp_path / "whole")[STEPS]


def test_what_cudnn_does_not_take_is_told() -> None:
    sizes = {"n_heads": 4, "n_kv_heads": 2, "tokens": 128, "dtype": torch.bfloat16, "device": CUDA}
    assert te_attention.is_refused(**sizes, d_head=64, documents=False) is None
    assert te_attention.is_refused(**sizes, d_head=64, documents=True) is None
    assert te_attention.is_refused(**sizes, d_head=520, documents=False)


@pytest.fixture
def blackwell() -> None:
    """Where these run: on other GPUs the tests that ask for it are skipped, with the reason."""
    needs_blackwell("mxfp8")


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("gradient", mx.FORMATS)
@pytest.mark.parametrize("tokens", [1, 48, 500])
def test_mxfp8_products_are_those_of_the_numbers_on_the_grid(tokens: int, gradient: str, tell: Tell) -> None:
    """As test_products_are_those_of_the_numbers_on_the_grid: in fp64, by the recipe's own definition."""
    layer, _ = mx.layer_in("te", gradient=gradient, dtype=torch.bfloat16)
    layer = layer.to(CUDA)
    total = torch.full(layer.weight.shape, float("nan"), device=CUDA)
    sums = WeightGradientSums()
    sums.connect(layer, total, lambda: None)
    x, grad = mx.inputs(torch.bfloat16, tokens=tokens)
    x = x.detach().to(CUDA).requires_grad_()
    grad = grad.to(CUDA)
    y = layer(x)
    y.backward(grad)
    once = total.clone()
    x_MI, grad_MO, weight = x.detach().flatten(0, 1), grad.flatten(0, 1), layer.weight.detach()
    form = mx.FORMATS[gradient]
    of_grid = {
        "out": mx.quantised(x_MI, E4M3) @ mx.quantised(weight, E4M3).t(),
        "x": mx.quantised(grad_MO, form) @ mx.quantised(weight.t(), E4M3).t(),
        "weight": mx.quantised(grad_MO.t(), form) @ mx.quantised(x_MI.t(), E4M3).t(),
    }
    exact = {
        "out": x_MI.double() @ weight.double().t(),
        "x": grad_MO.double() @ weight.double(),
        "weight": grad_MO.double().t() @ x_MI.double(),
    }
    found = {"out": y.detach().flatten(0, 1), "x": x.grad.flatten(0, 1), "weight": once}
    for name, truth in of_grid.items():
        error = size(found[name] - truth)
        felt = size(truth - exact[name])
        tell(f"mxfp8 {gradient}, {tokens} tokens, {name}: {error / felt:.3f} of what the grid is off")
        assert error <= (0.05 if name == "weight" else 0.25) * felt, name
    layer(x).backward(grad)
    torch.testing.assert_close(total, 2 * once, rtol=1e-5, atol=1e-5 * once.abs().max().item())


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("tokens", [1, 48, 500])
def test_nvfp4_products_are_those_of_the_numbers_on_the_grid(tokens: int, tell: Tell) -> None:
    """The same, where gradients are rounded to nearest."""
    layer, _ = fp4.layer_in("te", dtype=torch.bfloat16)
    layer = layer.to(CUDA)
    x, grad = fp4.inputs(torch.bfloat16, tokens=tokens)
    x = x.detach().to(CUDA).requires_grad_()
    grad = grad.to(CUDA)
    y = layer(x)
    y.backward(grad)
    x_MI, grad_MO, weight = x.detach().flatten(0, 1).cpu(), grad.flatten(0, 1).cpu(), layer.weight.detach().cpu()
    weight_grid = fp4.quantised(weight, squares=True)
    turned_grad, turned_x = fp4.turned(grad_MO).bfloat16(), fp4.turned(x_MI).bfloat16()
    of_grid = {
        "out": fp4.quantised(x_MI) @ weight_grid.t(),
        "x": fp4.quantised(grad_MO) @ weight_grid,
        "weight": fp4.quantised(turned_grad) @ fp4.quantised(turned_x).t(),
    }
    exact = {
        "out": x_MI.double() @ weight.double().t(),
        "x": grad_MO.double() @ weight.double(),
        "weight": grad_MO.double().t() @ x_MI.double(),
    }
    found = {"out": y.detach().flatten(0, 1), "x": x.grad.flatten(0, 1), "weight": layer.weight.grad}
    for name, truth in of_grid.items():
        error = size(found[name].cpu() - truth)
        felt = size(truth - exact[name])
        tell(f"nvfp4, {tokens} tokens, {name}: {error / felt:.3f} of what the grid is off")
        assert error <= 0.1 * felt, name


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_small_model_learns_in_blocks_as_in_bf16(recipe: str, compile: str, tell: Tell) -> None:
    plain = learned("bf16", compile, "te")
    found = learned(recipe, compile, "te")
    by_definition = learned(recipe, "none", "reference")
    tell(f"{recipe} {compile}: bf16 {rounded(plain)}, {rounded(found)}, the reference {rounded(by_definition)}")
    assert found[0] == pytest.approx(plain[0], rel=5e-3 if recipe == "mxfp8" else 2e-2)
    assert found[0] != plain[0]
    assert found[3] == pytest.approx(plain[3], rel=3e-2 if recipe == "mxfp8" else 0.1)
    assert found[-1] < 0.5 * found[0]
    assert found[0] == pytest.approx(by_definition[0], rel=1e-3 if recipe == "mxfp8" else 5e-3)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_run_in_blocks_that_is_stopped_goes_on_to_the_bit(recipe: str, tmp_path, gpu_pool: RankPool) -> None:
    precision = {"kind": "fp8", "recipe": recipe, "first_layers_bf16": 1}
    text = spec(BASE | {"precision": precision}, B200).model_dump_json()
    undisturbed = gpu_pool.run(lives.live, text, str(tmp_path / "whole"), ranks=1)[0]
    stopped = gpu_pool.run(lives.lives, text, str(tmp_path / "stopped"), stops=2, ranks=1)[0]
    assert stopped == undisturbed
    assert lives.read_all(tmp_path / "stopped")[STEPS] == lives.read_all(tmp_path / "whole")[STEPS]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_two_gpus_are_as_one_in_blocks(recipe: str, gpu_pool: RankPool, tell: Tell) -> None:
    """Of the first step the forward pass, in which nothing is drawn."""
    one = learned(recipe, "none", "te")
    two = gpu_pool.run(divided, recipe, ranks=2)
    tell(f"{recipe}: one {rounded(one)}, two {rounded(two[0])}")
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=2e-3)
    assert two[0][3] == pytest.approx(one[3], rel=3e-2 if recipe == "mxfp8" else 0.1)


def divided(rank: int, recipe: str) -> list[float]:
    """On two ranks that divide layers and sequences."""
    precision = {"kind": "bf16"} if recipe == "bf16" else fp8(recipe)
    return losses(precision, compile="none", tp=2, rank=rank, others=TE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_two_gpus_are_as_one(recipe: str, gpu_pool: RankPool, tell: Tell) -> None:
    """Tensor and sequence parallel: the same scales, so that bf16's rounding of sums is all that differs."""
    one = learned(recipe, "none", "te")
    two = gpu_pool.run(divided, recipe, ranks=2)
    tell(f"{recipe}: one {rounded(one)}, two {rounded(two[0])}")
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=2e-3)
    assert two[0][3] == pytest.approx(one[3], rel=3e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("layout", ["tp2 sp", "zb_h1"])
def test_bf16_is_as_close_to_the_truth_as_one_gpu(layout: str, gpu_pool: RankPool, tell: Tell) -> None:
    also = tuple((f"kernels.{name}", value) for name, value in TE.items())
    cases = {
        "tp2 sp": Case(tp=2, sequence=True, mask="uneven", kv_heads=2, d_head=64, accumulate=2, also=also),
        # weight gradients that are put off
        "zb_h1": Case(pp=2, schedule="zb_h1", n_layers=4, accumulate=3, mask="uneven", d_head=64, also=also),
    }
    check_low(gpu_pool, cases[layout], tell, device="cuda")
