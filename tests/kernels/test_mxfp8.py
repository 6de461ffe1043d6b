"""Casts to MXFP8 and their products: the reference against the format's definition, Transformer Engine against the
reference, by one that computes on a CPU in its place, and what a run asks before it trains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec_kernels.fp8_cast import reference as fp8_cast
from megaspec_kernels.gate import check
from megaspec_kernels.linear import mxfp8, mxfp8_check, te_mxfp8
from megaspec_kernels.linear.factors import Factor, Layout
from megaspec_kernels.te_package import TransformerEngine
from tests.kernels.te import TORCH, Fake, MXFP8TensorStorage, fake_transformer_engine
from tests.kernels.wrong_te import needs_blackwell, never_adds, refuses, sums_in_bf16, with_products
from tests.source_patch import Patch, planted

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = [E4M3, E5M2]
CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def rounded_up(value: Tensor) -> Tensor:
    """The bytes of E8M0 of the smallest power of two that is not below numbers in fp32, by their bits, as Transformer
    Engine's kernels do it."""
    bits = value.view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    is_smallest = (exponent == 0) & (mantissa <= 0x400000)
    return exponent + ((mantissa > 0) & ~is_smallest).int()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("of", ["bf16", "fp16", "mantissas of fp32"])
def test_scales_are_transformer_engines(of: str, dtype: torch.dtype) -> None:
    """Of every positive number of 16 bits, and of every mantissa of fp32."""
    if of == "bf16":
        amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    elif of == "fp16":
        amax = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    else:
        amax = (torch.arange(1 << 23, dtype=torch.int32) + (130 << 23)).view(torch.float32)
    expected = rounded_up(amax * torch.tensor(1 / LARGEST[dtype]))
    assert torch.equal(mxfp8.scale_of(amax, dtype).int(), expected)


def test_scales_of_what_has_none() -> None:
    amax = torch.tensor([0.0, float("inf"), 448.0, 449.0, 2.0**-140, torch.finfo(torch.float32).max])
    assert mxfp8.scale_of(amax, E4M3).tolist() == [0, 254, 127, 128, 0, 247]
    scales = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    expected = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, float("nan")])
    torch.testing.assert_close(mxfp8.in_numbers(scales), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_shows() -> None:
    x = torch.ones(1, 64)
    x[0, 3] = float("nan")
    x[0, 35] = float("inf")
    found = mxfp8.dequantised(mxfp8.cast(x, E4M3, columns=False).rows, in_rows=True, dtype=torch.float32)
    assert found[0, 3].isnan()
    assert found[0, 35].isinf()
    # one that is no number makes no scale
    assert torch.equal(found[0, 4:32], torch.ones(28))


def drawn(rows: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Blocks of many sizes."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=draw)
    sizes = torch.exp2(torch.randint(-6, 7, (-(-rows // 32), columns // 32), generator=draw).float())
    numbers *= sizes.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)
    return numbers.to(dtype)


def on_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., 32] by one scale, in fp64, one number after the other: the largest is at most the format's, and twice
    the scale would be too large."""
    amax = x.abs().amax(-1, keepdim=True).double()
    scale = torch.exp2(torch.ceil(torch.log2(amax / LARGEST[dtype])))
    assert ((amax / scale <= LARGEST[dtype]) & (2 * amax / scale > LARGEST[dtype])).all()
    return (x / scale).to(dtype).double() * scale


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 31, 32, 63, 130])
def test_the_cast_is_the_definition(rows: int, dtype: torch.dtype) -> None:
    x = drawn(rows, 96)
    cast = mxfp8.cast(x, dtype)
    assert cast.rows.values.shape == cast.columns.values.shape == (rows, 96)
    assert cast.rows.scale.shape == (rows, 3)
    assert cast.columns.scale.shape == (-(-rows // 32), 96)
    by_rows = on_grid(x.view(rows, 3, 32), dtype).view(rows, 96)
    assert torch.equal(mxfp8.dequantised(cast.rows, in_rows=True, dtype=torch.float64), by_rows)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % 32))
    by_columns = on_grid(padded.view(-1, 32, 96).transpose(1, 2), dtype).transpose(1, 2).reshape(-1, 96)[:rows]
    assert torch.equal(mxfp8.dequantised(cast.columns, in_rows=False, dtype=torch.float64), by_columns)
    # each layout alone is the same
    assert mxfp8.cast(x, dtype, rows=False).rows is None
    assert mxfp8.cast(x, dtype, columns=False).columns is None
    assert torch.equal(mxfp8.cast(x, dtype, rows=False).columns.scale, cast.columns.scale)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_it_is_what_our_own_cast_makes_of_such_blocks(dtype: torch.dtype) -> None:
    x = drawn(96, 64)
    for block, in_rows in (((1, 32), True), ((32, 1), False)):
        scale = fp8_cast.scale(x, block=block, dtype=dtype)
        values, _ = fp8_cast.cast(x, scale, block=block, dtype=dtype)
        cast = mxfp8.cast(x, dtype)
        found = cast.rows if in_rows else cast.columns
        assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(mxfp8.in_numbers(found.scale).double(), scale)


PRODUCTS: dict[Layout, Callable[[Tensor, Tensor], Tensor]] = {
    "TN": lambda a, b: b @ a.t(),
    "NN": lambda a, b: b @ a,
    "NT": lambda a, b: b.t() @ a,
}


def factors(layout: Layout, tokens: int, gradient: torch.dtype) -> tuple[Factor, Factor]:
    """What a layer hands to a product."""
    x = mxfp8.cast(drawn(tokens, 96, seed=1), E4M3)
    weight = mxfp8.cast(drawn(64, 96, seed=2), E4M3)
    grad = mxfp8.cast(drawn(tokens, 64, seed=3), gradient)
    given = {"TN": (weight.rows, x.rows), "NN": (weight.columns, grad.rows), "NT": (x.columns, grad.columns)}
    return given[layout]


def wide(factor: Factor, *, in_rows: bool) -> Tensor:
    """A factor in fp64, by its bytes."""
    scale = torch.exp2(factor.scale.double() - 127)
    dim = 1 if in_rows else 0
    each = scale.repeat_interleave(32, dim)[: factor.values.shape[0]]
    return factor.values.double() * each


@pytest.mark.parametrize("gradient", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 32, 50, 96])
@pytest.mark.parametrize("layout", PRODUCTS)
@pytest.mark.parametrize("kernel", [mxfp8, te_mxfp8], ids=["reference", "te"])
def test_products(kernel: Any, layout: Layout, tokens: int, gradient: torch.dtype, fake: Fake) -> None:
    a, b = factors(layout, tokens, gradient)
    truth = PRODUCTS[layout](wide(a, in_rows=layout == "TN"), wide(b, in_rows=layout != "NT"))
    found = kernel.product(layout, a, b, dtype=torch.float64)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-9)
    for dtype in (torch.bfloat16, torch.float32):
        plain = PRODUCTS[layout](wide(a, in_rows=layout == "TN").float(), wide(b, in_rows=layout != "NT").float())
        made = kernel.product(layout, a, b, dtype=dtype, fast=layout == "TN")
        check({"out": made}, {"out": plain.to(dtype)}, {"out": truth})
    if layout != "NT":
        return
    # weight gradients alone are sums
    total = torch.full(truth.shape, float("nan"), dtype=torch.float32)
    kernel.product(layout, a, b, dtype=torch.float32, into=total, overwrite=True)
    kernel.product(layout, a, b, dtype=torch.float32, into=total, overwrite=False)
    torch.testing.assert_close(total.double(), 2 * truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 31, 72, 256])
def test_transformer_engine_is_asked_for_the_same_bytes(rows: int, dtype: torch.dtype, fake: Fake) -> None:
    """Its scales lie in larger matrices, of which what is behind them is not read."""
    x = drawn(rows, 160, dtype=torch.bfloat16)
    for given in ({}, {"rows": False}, {"columns": False}):
        found = te_mxfp8.cast(x, dtype, **given)
        expected = mxfp8.cast(x, dtype, **given)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
                assert torch.equal(one.scale, other.scale)
                assert one.scale.is_contiguous()
                assert one.values.is_contiguous()
    assert fake.casts == ["MXFP8Quantizer"] * 3


def test_tensors_without_numbers_need_no_package() -> None:
    x = torch.empty(64, 96, device="meta", dtype=torch.bfloat16)
    cast = te_mxfp8.cast(x, E4M3)
    assert cast.columns.values.shape == x.shape
    assert te_mxfp8.product("TN", cast.rows, cast.rows, dtype=torch.bfloat16).shape == (64, 64)


# What a run asks before it trains: one in the package's place that is right, and ones that are not.


@pytest.mark.parametrize("gradient", FORMATS, ids=str)
def test_what_is_right_is_trained_with(gradient: torch.dtype, fake: Fake) -> None:
    assert mxfp8_check.difference(CPU, gradient) is None
    assert {call.layout for call in fake.products} == {"TN", "NN", "NT"}


Change = Callable[[TransformerEngine], TransformerEngine]


def with_storage(package: TransformerEngine, change: Callable[[MXFP8TensorStorage], None]) -> TransformerEngine:
    """A package whose casts make something else."""
    right = package.pytorch.MXFP8Quantizer

    class Wrong(right):
        def cast(self, x: Tensor) -> MXFP8TensorStorage:
            found = super().cast(x)
            change(found)
            return found

    return replace(package, pytorch=type(package.pytorch)(**(vars(package.pytorch) | {"MXFP8Quantizer": Wrong})))


def one_scale_lower(found: MXFP8TensorStorage) -> None:
    # as the specification has it: some elements saturate
    if found._rowwise_scale_inv is not None:
        found._rowwise_scale_inv[0, 1] -= 1


def columns_of_rows(found: MXFP8TensorStorage) -> None:
    if found._rowwise_data is not None and found._columnwise_data is not None:
        found._columnwise_data = found._rowwise_data.clone()


def other_zero(found: MXFP8TensorStorage) -> None:
    for values in (found._rowwise_data, found._columnwise_data):
        if values is not None:
            values[values == 0] = 0x80


def swizzled(found: MXFP8TensorStorage) -> None:
    found._with_gemm_swizzled_scales = True


def one_bit(found: MXFP8TensorStorage) -> None:
    if found._columnwise_data is not None:
        found._columnwise_data[71, -1] ^= 1


def alone_otherwise(found: MXFP8TensorStorage) -> None:
    if found._rowwise_data is None:
        found._columnwise_scale_inv[0, 0] += 1


CASTS = {
    "a scale that is half as large": (one_scale_lower, "1 of 360 scales of rows in e4m3 of (72, 160)"),
    "columns that are rows": (columns_of_rows, "of 11520 numbers of columns in e4m3 of (72, 160)"),
    "a last number that is rounded otherwise": (one_bit, "1 of 11520 numbers of columns in e4m3 of (72, 160)"),
    "another kernel for one layout alone": (alone_otherwise, "1 of 480 scales of columns in e4m3 of (72, 160)"),
    "scales in another order": (swizzled, "it fails: scales in the order of cuBLASLt"),
}


def told(package: TransformerEngine, monkeypatch: pytest.MonkeyPatch, gradient: torch.dtype = E4M3) -> str | None:
    monkeypatch.setattr(te_mxfp8, "transformer_engine", lambda: package)
    return mxfp8_check.difference(CPU, gradient)


@pytest.mark.parametrize("name", CASTS)
def test_other_casts_are_told(name: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = CASTS[name]
    found = told(with_storage(te_mxfp8.transformer_engine(), change), monkeypatch)
    assert found.endswith(said)


def test_the_sign_of_zero_is_nobodys(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(with_storage(te_mxfp8.transformer_engine(), other_zero), monkeypatch) is None


def with_first_factor(layout: str, change: Callable[[MXFP8TensorStorage], None]) -> Callable[..., Any]:
    """Products of one layout whose first factor is another one."""

    def multiply(right: Callable[..., Any], a: MXFP8TensorStorage, b: MXFP8TensorStorage, **given: Any) -> Any:
        if given["layout"] == layout:
            parts = (a._rowwise_data, a._rowwise_scale_inv, a._columnwise_data, a._columnwise_scale_inv)
            copies = [None if one is None else one.clone() for one in parts]
            a = MXFP8TensorStorage(*copies, a._fp8_dtype, None, False)
            change(a)
        return right(a, b, **given)

    return multiply


def doubled_block(a: MXFP8TensorStorage) -> None:
    a._rowwise_scale_inv[0, 1] += 1


def neighbours_scales(a: MXFP8TensorStorage) -> None:
    blocks = -(-a._columnwise_data.shape[0] // 32)
    a._columnwise_scale_inv[:blocks] = a._columnwise_scale_inv[:blocks].roll(1, 0)


def loses_the_last_tokens(right: Callable[..., Any], a: Any, b: Any, **given: Any) -> Any:
    found, *rest = right(a, b, **given)
    if given["layout"] == "NN":
        found[64:] = 0
    return found, *rest


MULTIPLIED = {
    "a block by twice its scale": (with_first_factor("TN", doubled_block), "numbers of the product forward (TN)"),
    "blocks by the scales of their neighbours": (
        with_first_factor("NN", neighbours_scales),
        "numbers of the product input gradient (NN)",
    ),
    "tokens by the scales of their neighbours": (
        with_first_factor("NT", neighbours_scales),
        "numbers of the product weight gradient (NT)",
    ),
    "a sum that is overwritten": (never_adds, "of 15360 numbers of the product weight gradient (NT) that is added"),
    "a sum in bf16": (sums_in_bf16, "numbers of the product weight gradient (NT)"),
    "tokens that are left out": (loses_the_last_tokens, "numbers of the product input gradient (NN)"),
    "a product that is refused": (refuses, "it fails: cuBLAS Error: the requested functionality is not supported"),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_other_products_are_told(name: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = MULTIPLIED[name]
    found = told(with_products(te_mxfp8.transformer_engine(), change), monkeypatch)
    assert found.endswith(said)


@pytest.mark.parametrize("gradient", FORMATS, ids=str)
def test_another_format_of_gradients_is_told(
    gradient: torch.dtype, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose largest number scales are made by."""
    package = te_mxfp8.transformer_engine()
    right = package.pytorch.MXFP8Quantizer

    class Wrong(right):
        def __init__(self, fp8_dtype: str, **given: Any) -> None:
            super().__init__("e4m3", **given)
            self.form = {"e4m3": "e5m2", "e5m2": "e4m3"}[fp8_dtype] if TORCH[fp8_dtype] == gradient else fp8_dtype

    wrong = replace(package, pytorch=type(package.pytorch)(**(vars(package.pytorch) | {"MXFP8Quantizer": Wrong})))
    assert "of rows in" in told(wrong, monkeypatch, gradient)


# Planted in what asks the package: what it would take without a word.
ASKS = "megaspec_kernels.linear.te_mxfp8"
BUGS = {
    "scales cut to the wrong tokens": (
        Patch(ASKS, "found._rowwise_scale_inv[:M, : K // BLOCK]", "found._rowwise_scale_inv[-M:, : K // BLOCK]"),
        "scales of rows",
    ),
    "scales behind their place": (
        Patch(ASKS, "behind = (0, -scale.shape[1] % columns, 0,", "behind = (-scale.shape[1] % columns, 0, 0,"),
        "numbers of the product forward (TN)",
    ),
    "a sum that is overwritten": (
        Patch(ASKS, "accumulate=not overwrite", "accumulate=False"),
        "that is added",
    ),
    "tokens in units of the columns of rows": (
        Patch(ASKS, "found._columnwise_data[:M]", "found._rowwise_data[:M]"),
        "it fails: 'NoneType' object is not subscriptable",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_what_is_asked_wrongly_is_told(name: str, fake: Fake) -> None:
    patch, said = BUGS[name]
    with planted(patch):
        found = mxfp8_check.difference(CPU, E4M3)
    assert said in found


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", FORMATS, ids=str)
def test_a_gpu_computes_what_it_says(gradient: torch.dtype) -> None:
    """On Blackwell alone: what a run asks before it trains."""
    needs_blackwell("mxfp8")
    assert mxfp8_check.difference(torch.device("cuda"), gradient) is None
