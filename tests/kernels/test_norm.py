"""Norms against their equations in fp64: outputs, the gradients of both streams, of the weight and of the bias."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check, filled_with_nan, in_dtype, results
from megaspec_kernels.norm import triton as triton
from megaspec_kernels.norm.form import NormForm
from megaspec_kernels.registry import REGISTRY, NormKernel
from tests.kernels.fp8_producers import check_rows, check_written, known_of
from tests.kernels.te import Fake, fake_transformer_engine, te_runs

INTERPRETED = triton.triton is not None and triton.triton.knobs.runtime.interpret
FORMS = [
    NormForm("rms", "scale", 1e-5),
    NormForm("rms", "one_plus", 1e-6, scale=0.7),
    NormForm("rms", "none", 1e-5),
    NormForm("layer", "scale", 1e-5),
    NormForm("layer", "one_plus", 1e-3, scale=0.7),
    NormForm("layer", "none", 1e-5),
]
Run = Callable[..., Tensor]


@pytest.fixture(params=list(REGISTRY["norm"]))
def implementation(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "triton" and device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    if request.param == "te":
        te_runs(torch.bfloat16, device)
    return request.param


def inputs_of(M: int, D: int, form: NormForm, *, bias: bool, device: torch.device) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(M + D)

    def made(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=draw).bfloat16().double() + mean).to(device)

    inputs = {"x": made(M, D, mean=0.5), "term": made(M, D)}
    if form.gain != "none":
        inputs["weight"] = made(D)
    if bias:
        inputs["bias"] = made(D)
    return inputs


def by_equation(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> Tensor:
    if form.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + form.eps).sqrt()
    if form.gain != "none":
        y = y * (weight + (form.gain == "one_plus"))
    return y if bias is None else y + bias


def equations(form: NormForm) -> dict[str, Run]:
    """Streams and what is normed of them, side by side, by the name of the function."""

    def alone(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return by_equation(x, weight, bias, form)

    def of_stream(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return torch.cat((x, by_equation(x, weight, bias, form)), dim=-1)

    def of_sum(x: Tensor, term: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        total = x + form.scale * term
        return torch.cat((total, by_equation(total, weight, bias, form)), dim=-1)

    return {"norm": alone, "norm_of_stream": of_stream, "norm_of_sum": of_sum}


def functions(kernel: NormKernel, form: NormForm) -> dict[str, Run]:
    """The same of an implementation."""

    def alone(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return kernel.norm(x, weight, bias, form=form)

    def of_stream(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return torch.cat(kernel.norm_of_stream(x, weight, bias, form=form), dim=-1)

    def of_sum(x: Tensor, term: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return torch.cat(kernel.norm_of_sum(x, term, weight, bias, form=form), dim=-1)

    return {"norm": alone, "norm_of_stream": of_stream, "norm_of_sum": of_sum}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize(("M", "D"), [(1, 1), (63, 100), (5, 4097)])
def test_equations_and_their_gradients(
    implementation: str, dtype: torch.dtype, form: NormForm, M: int, D: int, device: torch.device
) -> None:
    check_equations(implementation, dtype, form, M, D, device)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
def test_plain_operations_in_fp64(form: NormForm, device: torch.device) -> None:
    check_equations("reference", torch.float64, form, 63, 100, device)


def check_equations(
    implementation: str, dtype: torch.dtype, form: NormForm, M: int, D: int, device: torch.device
) -> None:
    inputs = inputs_of(M, D, form, bias=form.kind == "layer", device=device)
    draw = torch.Generator().manual_seed(7)
    for name, equation in equations(form).items():
        mine = dict(inputs)
        if name != "norm_of_sum":
            del mine["term"]
        shape = equation(**mine).shape
        grad = torch.randn(*shape, generator=draw).bfloat16().double().to(device)
        fast = results(functions(REGISTRY["norm"][implementation], form)[name], in_dtype(mine, dtype), grad)
        plain = results(functions(REGISTRY["norm"]["reference"], form)[name], in_dtype(mine, dtype), grad)
        check(fast, plain, results(equation, mine, grad))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
def test_transformer_engine_is_asked_for_the_equations(form: NormForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes on a CPU in its place. The gradient of the stream goes into its backward kernel."""
    fake: Fake = fake_transformer_engine(monkeypatch)
    inputs = inputs_of(63, 100, form, bias=form.kind == "layer", device=torch.device("cpu"))
    draw = torch.Generator().manual_seed(7)
    for name, equation in equations(form).items():
        mine = dict(inputs)
        if name != "norm_of_sum":
            del mine["term"]
        grad = torch.randn(*equation(**mine).shape, generator=draw).bfloat16().double()
        narrow = in_dtype(mine, torch.bfloat16)
        fast = results(functions(REGISTRY["norm"]["te"], form)[name], narrow, grad)
        plain = results(functions(REGISTRY["norm"]["reference"], form)[name], narrow, grad)
        check(fast, plain, results(equation, mine, grad))
    if form.kind == "rms":
        assert fake.norms == ["rmsnorm_fwd", "rmsnorm_bwd", *["rmsnorm_fwd", "rmsnorm_bwd_add"] * 2]
    else:
        assert fake.norms == ["layernorm_fwd", "layernorm_bwd"] * 3


@pytest.mark.parametrize("name", ["norm_of_stream", "norm_of_sum"])
def test_rows_that_lie_apart(implementation: str, name: str, device: torch.device) -> None:
    """Every second column of a wider tensor, and gradients that are spread over rows."""
    form = FORMS[0]
    wide = inputs_of(9, 64, form, bias=False, device=device)
    if name == "norm_of_stream":
        del wide["term"]
    truth_run = equations(form)[name]
    fast_run = functions(REGISTRY["norm"][implementation], form)[name]
    plain_run = functions(REGISTRY["norm"]["reference"], form)[name]

    def apart(run: Run) -> Run:
        def through(x: Tensor, **others: Tensor) -> Tensor:
            return run(x.repeat_interleave(2, dim=1)[:, ::2], **others)

        return through

    grad = torch.randn(1, 128, dtype=torch.float64, device=device).bfloat16().double().expand(9, 128)
    narrow = in_dtype(wide, torch.bfloat16)
    check(
        results(apart(fast_run), narrow, grad),
        results(apart(plain_run), narrow, grad),
        results(apart(truth_run), wide, grad),
    )


def test_what_is_normed_is_the_kept_sum(implementation: str, device: torch.device) -> None:
    """The sum is rounded first, so that the backward pass norms the same numbers."""
    kernel = REGISTRY["norm"][implementation]
    inputs = in_dtype(inputs_of(8, 512, FORMS[0], bias=False, device=device), torch.bfloat16)
    total, y = kernel.norm_of_sum(inputs["x"], inputs["term"], inputs["weight"], None, form=FORMS[0])
    # Triton's interpreter cuts off what a bf16 does not hold; GPUs round
    step = torch.finfo(torch.bfloat16).eps if INTERPRETED else 0.0
    torch.testing.assert_close(total, inputs["x"] + inputs["term"], rtol=step, atol=0.0)
    assert torch.equal(y, kernel.norm(total, inputs["weight"], None, form=FORMS[0]))


def test_a_frozen_weight_has_no_gradient(implementation: str, device: torch.device) -> None:
    kernel = REGISTRY["norm"][implementation]
    form = NormForm("layer", "scale", 1e-5)
    inputs = in_dtype(inputs_of(8, 64, form, bias=True, device=device), torch.float32)
    x = inputs["x"].requires_grad_()
    bias = inputs["bias"].requires_grad_()
    kernel.norm(x, inputs["weight"], bias, form=form).square().sum().backward()
    assert inputs["weight"].grad is None
    y = kernel.norm(x.detach(), inputs["weight"], bias.detach(), form=form)
    torch.testing.assert_close(bias.grad, 2 * y.sum(0), rtol=1e-5, atol=1e-5)


def test_the_same_bits_each_time(implementation: str, device: torch.device) -> None:
    """The weight's gradient is summed in one order."""
    kernel = REGISTRY["norm"][implementation]
    form = FORMS[0]
    found = []
    for _ in range(2):
        inputs = in_dtype(inputs_of(700, 96, form, bias=False, device=device), torch.bfloat16)
        x, weight = inputs["x"].requires_grad_(), inputs["weight"].requires_grad_()
        kernel.norm(x, weight, None, form=form).square().sum().backward()
        found.append((x.grad, weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_no_rows(implementation: str, device: torch.device) -> None:
    x = torch.zeros(2, 0, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)
    stream, y = REGISTRY["norm"][implementation].norm_of_stream(x, weight, None, form=FORMS[0])
    (stream.sum() + y.sum()).backward()
    assert y.shape == x.grad.shape == (2, 0, 16)
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("M", "D"), [(1, 16), (63, 1000), (48, 272), (32, 256)])
def test_triton_writes_fp8(
    dtype: torch.dtype, form: NormForm, adds: bool, M: int, D: int, device: torch.device
) -> None:
    """By a scale that a few elements are too large for."""
    check_fp8(dtype, form, M, D, device, adds=adds, columns=True)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3]], ids=lambda form: form.code.replace(" ", "-"))
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("M", "D"), [(1, 16), (7, 1000), (16, 2064), (16, 1024)])
def test_triton_writes_rows_of_fp8_alone(form: NormForm, adds: bool, M: int, D: int, device: torch.device) -> None:
    """Features that fill a tile, and that do not."""
    check_fp8(torch.bfloat16, form, M, D, device, adds=adds, columns=False)


def check_fp8(
    dtype: torch.dtype, form: NormForm, M: int, D: int, device: torch.device, *, adds: bool, columns: bool
) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    inputs = in_dtype(inputs_of(M, D, form, bias=form.kind == "layer", device=device), dtype)
    term = inputs["term"] if adds else None
    weight, bias = inputs.get("weight"), inputs.get("bias")
    known = known_of(2.0**-8, torch.float8_e4m3fn, device)
    with filled_with_nan():
        made = triton.norm_forward_in_fp8(inputs["x"], term, weight, bias, form.code, known=known, columns=columns)
    total = inputs["x"]
    if adds:
        total = made.total
        exact = inputs["x"].double() + form.scale * term.double()
        torch.testing.assert_close(total.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    wide = {name: None if one is None else one.double() for name, one in (("weight", weight), ("bias", bias))}
    truth = by_equation(total.double(), wide["weight"], wide["bias"], form)
    if columns:
        check_written(made.written, truth, known)
    else:
        check_rows(made.written, truth, known)
        assert made.written.columns.shape == (0,)
    # what the backward pass takes
    *_, statistics = triton.norm_forward(total, None, weight, bias, form.code)
    torch.testing.assert_close(made.statistics, statistics, rtol=1e-5, atol=1e-6)


def test_triton_leaves_numbers_out_of_fp8_that_are_none(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    x = torch.ones(33, 64, device=device)
    x[3, 5] = float("nan")
    x[32, 1] = float("inf")
    known = known_of(2.0**-6, torch.float8_e4m3fn, device, seen=3.0)
    made = triton.norm_forward_in_fp8(x, None, None, None, NormForm("rms", "none", 1e-5).code, known=known)
    bad = made.written.rows.float().isnan()
    assert bad[3].all()
    assert bad[32, 1]
    assert not bad[:3].any()
    assert not bad[4:32].any()
    # what was seen before was larger
    assert known.seen.item() == 3.0
    assert not known.saturated


def test_triton_records_nothing_outside_of_steps(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("runs under TRITON_INTERPRET=1: test_triton_interpreted.py")
    known = known_of(0.5, torch.float8_e4m3fn, device, seen=None)
    x = torch.randn(8, 32, device=device)
    triton.norm_forward_in_fp8(x, None, None, None, FORMS[2].code, known=known)
    assert known.scale.item() == 0.5
