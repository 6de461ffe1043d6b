"""Products of linear layers against fp64, and what Transformer Engine is asked for."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megaspec
import megaspec_kernels
from megaspec_kernels import te_package
from megaspec_kernels.attention.documents import documents_of
from megaspec_kernels.attention.scoring import Scoring
from megaspec_kernels.catalog import Use, choose, unmet
from megaspec_kernels.gate import Results, check, in_dtype, results
from megaspec_kernels.linear import te, te_fp8
from megaspec_kernels.registry import REGISTRY
from tests.kernels.te import Fake, fake_transformer_engine, te_runs

HERE = frozenset({"transformer-engine"})
SHAPES = [((1, 1), 16, 8), ((2, 63), 48, 80), ((3, 5, 7), 64, 16), ((1, 1000), 32, 128)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def inputs_of(shape: tuple[int, ...], n_in: int, n_out: int, device: torch.device) -> dict[str, Tensor]:
    """Normal numbers that bf16 holds exactly; inputs and gradients lie apart."""
    draw = torch.Generator().manual_seed(n_in + n_out)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).bfloat16().double().to(device)

    return {
        "x": normal(*shape, 2 * n_in)[..., ::2],
        "weight": normal(n_out, n_in),
        "bias": normal(n_out),
        "grad": normal(n_out, *shape).movedim(0, -1),
    }


def products_of(name: str, given: dict[str, Tensor]) -> Results:
    """All of an implementation's products; the sum is made twice, of which the first overwrites what is no number."""
    kernel = REGISTRY["linear"][name]
    x, weight, bias, grad = given.values()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.full(weight.shape, float("nan"), dtype=wide, device=x.device)
    kernel.add_weight_gradient(total, grad, x, overwrite=True)
    kernel.add_weight_gradient(total, grad, x, overwrite=False)
    return {
        "out": kernel.forward(x, weight, None),
        "with bias": kernel.forward(x, weight, bias),
        "x": kernel.input_gradient(grad, weight),
        "weight": kernel.weight_gradient(grad, x),
        "sum": total,
    }


def words(given: dict[str, Tensor], *, sums_narrow: bool = False, by_tensor_cores: bool = False) -> Results:
    """The same, said once more in another way. `sums_narrow`: each of two gradients is rounded before it is added.
    `by_tensor_cores`: a sum in fp32 is as wrong as theirs may be. They cut off what they add up in fp32, 16 products at
    a time, where plain operations round: of some 64 such steps about 2^-22 of the products' sizes is lost.
    """
    x, weight, bias, grad = given.values()
    wide = torch.promote_types(x.dtype, torch.float32)
    into = x.dtype if sums_narrow else wide
    rows = x.reshape(-1, x.shape[-1])
    of_rows = grad.reshape(-1, grad.shape[-1])
    total = 2 * torch.einsum("mo,mi->oi", of_rows.to(into), rows.to(into)).to(wide)
    if by_tensor_cores:
        total += 2 * 2.0**-22 * torch.einsum("mo,mi->oi", of_rows.abs().to(wide), rows.abs().to(wide))
    return {
        "out": torch.einsum("...i,oi->...o", x, weight),
        "with bias": torch.einsum("...i,oi->...o", x, weight) + bias,
        "x": torch.einsum("...o,oi->...i", grad, weight),
        "weight": torch.einsum("mo,mi->oi", of_rows, rows),
        "sum": total,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(REGISTRY["linear"]))
def test_gate(name: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    if name == "te":
        te_runs(dtype, device)
    given = inputs_of(*shape, device)
    mine = in_dtype(given, dtype)
    # on CPUs torch has no product that adds to a wider sum
    sums_narrow = name == "torch" and device.type == "cpu"
    plain = words(mine, sums_narrow=sums_narrow, by_tensor_cores=device.type == "cuda" and dtype == torch.bfloat16)
    check(products_of(name, mine), plain, words(given))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transformer_engine_is_asked_for_the_same_products(shape: tuple, fake: Fake) -> None:
    given = inputs_of(*shape, torch.device("cpu"))
    mine = in_dtype(given, torch.bfloat16)
    check(products_of("te", mine), words(mine), words(given))
    assert [(call.layout, call.accumulate) for call in fake.products] == [
        ("NT", False),
        ("NT", True),
        ("TN", False),
        ("TN", False),
        ("NN", False),
        ("NT", False),
    ]
    first, second = fake.products[:2]
    assert first.out.data_ptr() == second.out.data_ptr(), "the sum is written in place"
    assert not any(call.in_fp8 for call in fake.products)


# Planted: what general_gemm takes without a word where all sizes are the same. Product -> its layout, a wrong one.
SWAPPED = {"out": ("TN", "NN"), "x": ("NN", "TN"), "weight": ("NT", "NN"), "sum": ("NT", "NN")}


@pytest.mark.parametrize("product", SWAPPED)
def test_swapped_layouts_are_caught(product: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs_of((16,), 16, 16, torch.device("cpu"))
    mine = in_dtype(given, torch.bfloat16)
    truth = words(given)
    check(products_of("te", mine), words(mine), truth)
    package = te.transformer_engine()
    layouts = dict([SWAPPED[product]])

    def swapped(A: Tensor, B: Tensor, *, layout: str, grad: bool = False, **rest: object) -> tuple:
        asked = layouts.get(layout, layout)
        return package.general_gemm(A, B, layout=asked, grad=asked != "TN", **rest)

    monkeypatch.setattr(te, "transformer_engine", lambda: replace(package, general_gemm=swapped))
    found = products_of("te", mine)
    with pytest.raises(AssertionError, match=f"^{product}: .* from the truth"):
        check({product: found[product]}, words(mine), {product: truth[product]})


def test_a_sum_that_lies_apart_is_refused(fake: Fake) -> None:
    given = in_dtype(inputs_of((4,), 16, 16, torch.device("cpu")), torch.bfloat16)
    apart = torch.zeros(16, 32)[:, ::2]
    with pytest.raises(AssertionError, match="a sum of weight gradients with strides"):
        REGISTRY["linear"]["te"].add_weight_gradient(apart, given["grad"], given["x"], overwrite=True)


def test_tensors_without_numbers_need_no_package() -> None:
    kernel = REGISTRY["linear"]["te"]
    x = torch.empty(2, 3, 16, device="meta")
    weight = torch.empty(8, 16, device="meta")
    y = kernel.forward(x, weight, None)
    assert y.shape == (2, 3, 8)
    assert kernel.input_gradient(y, weight).shape == x.shape
    assert kernel.weight_gradient(y, x).shape == weight.shape
    kernel.add_weight_gradient(weight, y, x, overwrite=True)


@pytest.mark.parametrize("documents", [None, ((5, 30, 5), (40,))], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_asked_for_what_the_reference_computes(
    documents: tuple | None, window: int | None, sinks: bool, fake: Fake
) -> None:
    """By the equations in the package's place: layouts, lengths, windows and the log-sum-exp are as it has them."""
    draw = torch.Generator().manual_seed(2)
    q = torch.randn(2, 40, 4, 32, generator=draw, dtype=torch.float64)[..., ::2]
    k, v = torch.randn(2, 2, 40, 2, 16, generator=draw, dtype=torch.float64).unbind()
    given = {"q": q, "k": k, "v": v}
    if sinks:
        given["sinks"] = torch.randn(4, generator=draw, dtype=torch.float64)
    packed = None
    if documents is not None:
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
        packed = documents_of(torch.stack(rows).to(torch.int32))
    grad = torch.randn(2, 40, 4, 16, generator=draw, dtype=torch.float64)

    def attend(name: str) -> Callable[..., Tensor]:
        attention = REGISTRY["attention"][name].attend
        options = {"documents": packed, "window": window, "scoring": Scoring(scale=0.3)}
        return lambda q, k, v, sinks=None: attention(q, k, v, sinks=sinks, **options)

    mine = results(attend("te"), given, grad)
    truth = results(attend("reference"), given, grad)
    for name, found in mine.items():
        # the log-sum-exp is in fp32, as the package tells it
        assert (found - truth[name]).abs().max() <= 1e-5 * truth[name].abs().max(), name
    layout = "bshd_bshd_bshd" if documents is None else "thd_thd_thd"
    assert fake.attentions == [layout]


def test_a_compiled_layer_calls_it_as_well(fake: Fake) -> None:
    given = in_dtype(inputs_of((2, 8), 32, 16, torch.device("cpu")), torch.bfloat16)
    kernel = REGISTRY["linear"]["te"]

    def all_of_it(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        y = kernel.forward(x, weight, None)
        return y, kernel.input_gradient(grad, weight), kernel.weight_gradient(grad, x)

    expected = all_of_it(given["x"], given["weight"], given["grad"])
    found = torch.compile(all_of_it, fullgraph=True)(given["x"], given["weight"], given["grad"])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(fake.products) == 6


@pytest.mark.parametrize(
    ("amax", "margin", "factor"),
    [(448.0, 0, 1.0), (7.0, 0, 64.0), (7.0, 2, 16.0), (0.0, 3, 1.0), (float("inf"), 0, 1.0), (float("nan"), 0, 1.0)],
)
def test_a_delayed_factor_is_the_formula_of_its_recipe(amax: float, margin: int, factor: float) -> None:
    found = te_fp8.factor_of(torch.tensor([amax]), torch.float8_e4m3fn, margin=margin)
    assert found.item() == factor
    assert te_fp8.factor_of(torch.tensor([1e-40]), torch.float8_e4m3fn).isfinite().all()


def test_what_is_not_taken_is_named() -> None:
    said = {
        (("linear", "te"), ("cpu", 0), "bf16"): "needs cuda, the target is cpu",
        (("linear", "te"), ("cuda", 75), "bf16"): "needs sm80, this GPU is sm75",
        (("linear", "te"), ("cuda", 90), "fp32"): "needs bf16 or fp16, the model is in fp32",
        (("linear", "te"), ("cuda", 90), "fp64"): "needs bf16 or fp16, the model is in fp64",
        (("attention", "te"), ("cuda", 80), "bf16"): "needs sm90, this GPU is sm80",
    }
    for ((operation, name), (device, sm), precision), text in said.items():
        assert unmet(operation, name, device=device, sm=sm, use=Use(precision=precision), packages=HERE) == text
    hopper = {"device": "cuda", "sm": 90, "packages": HERE}
    assert unmet("attention", "te", **hopper, use=Use(score_cap=True)) == "caps no scores"
    assert unmet("attention", "te", **hopper, use=Use(attention_dropout=True)) == "has no attention dropout"
    assert "60" in unmet("attention", "te", **hopper, use=Use(head_size=60))
    assert "512" in unmet("attention", "te", **hopper, use=Use(head_size=512))
    assert unmet("linear", "te", **hopper, use=Use(fp8_recipe="rowwise")) == (
        "needs precision.recipe=tensorwise, delayed, blockwise, mxfp8 or nvfp4, it is rowwise"
    )
    for operation in ("linear", "norm", "attention"):
        assert unmet(operation, "te", device="cuda", sm=90) == (
            "needs the package transformer-engine, which is not installed (pip install 'megaspec[te]')"
        )
    assert unmet("linear", "te", **hopper, use=Use(precision="bf16")) is None
    # it is named or not used, installed or not
    assert choose("linear", **hopper, use=Use(precision="bf16")) == "torch"
    assert choose("attention", **hopper, use=Use(precision="bf16", hides_keys=True)) == "flex"


def test_what_is_missing_names_the_extra() -> None:
    if importlib.util.find_spec(te_package.PACKAGE) is not None:
        pytest.skip("it is installed here")
    assert te_package.missing() == "needs the package transformer-engine: pip install 'megaspec[te]'"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModuleNotFoundError("No module named 'x'", name="onnx"), "needs transformer-engine, which needs the module"),
        (OSError("libcublasLt.so.13: undefined symbol"), "which can't be loaded: libcublasLt.so.13"),
        (RuntimeError("requires cuDNN 9.12"), "which can't be loaded: requires cuDNN 9.12"),
    ],
)
def test_why_it_can_not_be_loaded_is_told(error: Exception, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(te_package, "transformer_engine", fails)
    assert text in te_package.missing()


def test_nothing_imports_it_before_it_is_called() -> None:
    for package in (megaspec, megaspec_kernels):
        for file in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [one.name for one in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not any(name.startswith(te_package.PACKAGE) for name in names), file
    code = "import sys, megaspec.runtime.build; print([n for n in sys.modules if n.startswith('transformer_engine')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
