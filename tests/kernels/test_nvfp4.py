"""Casts to NVFP4 and their products: the reference against the format's definition, Transformer Engine against the
reference, by one that computes on a CPU in its place, and what a run asks before it trains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspec_kernels.gate import check
from megaspec_kernels.linear import nvfp4, nvfp4_check, te_nvfp4
from megaspec_kernels.linear.factors import Factor
from megaspec_kernels.linear.nvfp4 import Agreement, Role
from megaspec_kernels.te_package import TransformerEngine
from tests.kernels.te import Fake, NVFP4TensorStorage, fake_transformer_engine
from tests.kernels.wrong_te import needs_blackwell, never_adds, refuses, sums_in_bf16, with_products
from tests.source_patch import Patch, planted

CPU = torch.device("cpu")
ROLES: list[Role] = ["input", "weight", "gradient"]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_transformer_engine(monkeypatch)


def drawn(rows: int, columns: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Blocks of many sizes."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=draw)
    sizes = torch.exp2(torch.randint(-3, 4, (-(-rows // 16), columns // 16), generator=draw).float())
    numbers *= sizes.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)
    return numbers.to(dtype)


def test_codes_are_the_nearest_numbers_and_the_even_ones() -> None:
    between = (GRID[1:] + GRID[:-1]) / 2
    assert nvfp4.coded(GRID, at_random=False).tolist() == list(range(8))
    # 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4
    assert nvfp4.coded(between, at_random=False).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.coded(between + 1e-9, at_random=False).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert nvfp4.coded(between - 1e-9, at_random=False).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert nvfp4.coded(-GRID, at_random=False).tolist()[1:] == list(range(9, 16))


def test_codes_at_random_are_neighbours_and_right_in_the_mean() -> None:
    torch.manual_seed(3)
    numbers = torch.linspace(-6, 6, 97, dtype=torch.float64)
    many = numbers.repeat(4096, 1)
    signed = torch.cat((GRID, -GRID))
    found = signed[nvfp4.coded(many, at_random=True).long()]
    above = torch.bucketize(numbers.abs(), GRID)
    below = (above - 1).clamp(min=0)
    gap = GRID[above] - GRID[below]
    assert ((found - numbers).abs() <= gap + 1e-12).all()
    on_grid = torch.isin(numbers.abs(), GRID)
    assert torch.equal(found[:, on_grid], many[:, on_grid])
    assert ((found.mean(0) - numbers).abs() <= 5 * gap / 2 / 4096**0.5 + 1e-12).all()


def test_the_rotation_turns() -> None:
    turn = nvfp4._rotation()
    torch.testing.assert_close(turn @ turn.t(), torch.eye(16, dtype=torch.float64))
    assert (turn.abs() == 0.25).all()
    # a Hadamard matrix of itself, by signs on its rows
    signs = torch.tensor(nvfp4.SIGNS)
    assert torch.equal(turn[:, 0].sign(), signs.double())
    x = drawn(32, 64)
    assert torch.allclose(nvfp4.rotated(x).view(32, 4, 16) @ turn.t(), x.view(32, 4, 16))
    # what stands out is spread over its block
    one = torch.zeros(1, 16, dtype=torch.float64)
    one[0, 5] = 8
    assert (nvfp4.rotated(one).abs() == 2).all()


def on_grid(lines: Tensor, *, squares: bool) -> Tensor:
    """Lines as NVFP4 has them, number by number in fp64 but for its scales, by the paper's equations."""
    amax = lines.abs().max().float()
    encode = torch.tensor(2688.0) / amax
    high = 16 if squares else 1
    found = torch.empty_like(lines)
    for top in range(0, lines.shape[0], high):
        for left in range(0, lines.shape[1], 16):
            block = lines[top : top + high, left : left + 16]
            scale = (block.abs().max().float() * (encode * torch.tensor(1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
            decode = scale.double() * amax.double() / 2688
            scaled = (block / decode).clamp(-6, 6)
            distance = (scaled.abs()[..., None] - GRID).abs()
            found[top : top + high, left : left + 16] = GRID[distance.argmin(-1)] * scaled.sign() * decode
    return found


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rows", [1, 31, 32, 48])
def test_the_cast_is_the_definition(rows: int, role: Role) -> None:
    if role == "weight" and rows % 32:
        pytest.skip("sides of weights are whole blocks, by a rule")
    x = drawn(rows, 64)
    cast = nvfp4.cast(x, role, rounding="nearest")
    padded = -(-rows // 32) * 32
    assert cast.rows.values.shape == (rows, 32)
    assert cast.columns.values.shape == (64, padded // 2)
    found = nvfp4.dequantised(cast.rows, dtype=torch.float64)
    torch.testing.assert_close(found, on_grid(x, squares=role == "weight"), rtol=1e-6, atol=1e-9)
    turned = torch.nn.functional.pad(x, (0, 0, 0, padded - rows)).t().contiguous()
    if role != "weight":
        turned = (turned.view(-1, 16) @ nvfp4._rotation()).view(turned.shape)
    found = nvfp4.dequantised(cast.columns, dtype=torch.float64)
    torch.testing.assert_close(found, on_grid(turned, squares=role == "weight"), rtol=1e-6, atol=1e-9)
    if role == "weight":
        # the same numbers, turned round
        torch.testing.assert_close(found.t(), nvfp4.dequantised(cast.rows, dtype=torch.float64))
    alone = nvfp4.cast(x, role, rounding="nearest", columns=False)
    assert alone.columns is None
    assert torch.equal(alone.rows.values, cast.rows.values)


def test_zeros_and_scales_of_zeros() -> None:
    cast = nvfp4.cast(torch.zeros(32, 64), "input", rounding="nearest")
    assert not nvfp4.dequantised(cast.rows, dtype=torch.float64).any()
    x = torch.zeros(32, 64)
    x[0, 0] = 3.0
    found = nvfp4.dequantised(nvfp4.cast(x, "input", rounding="nearest").rows, dtype=torch.float64)
    torch.testing.assert_close(found, x.double(), rtol=1e-6, atol=0)


def test_ranks_that_hold_parts_agree_on_the_matrix_scale() -> None:
    """Each of two ranks makes of its features what one makes of all."""
    x = drawn(32, 128)
    whole = nvfp4.cast(x, "input", rounding="nearest")
    asked = []

    def largest(amax: Tensor) -> Tensor:
        asked.append(amax)
        return torch.stack([nvfp4.scales_of(one).amax[0] for one in whole])

    half = nvfp4.cast(x[:, 64:], "input", rounding="nearest", agreement=Agreement(largest, None))
    assert torch.equal(half.rows.values, whole.rows.values[:, 32:])
    assert torch.equal(half.columns.values, whole.columns.values[64:])
    # rows and columns at once
    assert [one.shape for one in asked] == [(2,)]


def factors(tokens: int) -> dict[str, tuple[Factor, Factor]]:
    """What a layer hands to its products."""
    x = nvfp4.cast(drawn(tokens, 96, seed=1), "input", rounding="nearest")
    weight = nvfp4.cast(drawn(64, 96, seed=2), "weight", rounding="nearest")
    grad = nvfp4.cast(drawn(tokens, 64, seed=3), "gradient", rounding="nearest")
    return {
        "forward": (weight.rows, x.rows),
        "input gradient": (weight.columns, grad.rows),
        "weight gradient": (x.columns, grad.columns),
    }


@pytest.mark.parametrize("tokens", [1, 32, 50, 96])
@pytest.mark.parametrize("kernel", [nvfp4, te_nvfp4], ids=["reference", "te"])
def test_products(kernel: Any, tokens: int, fake: Fake) -> None:
    for name, (a, b) in factors(tokens).items():
        a_wide = nvfp4.dequantised(a, dtype=torch.float64)
        b_wide = nvfp4.dequantised(b, dtype=torch.float64)
        truth = b_wide @ a_wide.t()
        found = kernel.product(a, b, dtype=torch.float64)
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-9)
        for dtype in (torch.bfloat16, torch.float32):
            plain = (b_wide.float() @ a_wide.float().t()).to(dtype)
            check({"out": kernel.product(a, b, dtype=dtype)}, {"out": plain}, {"out": truth})
        if name != "weight gradient":
            continue
        total = torch.full(truth.shape, float("nan"), dtype=torch.float32)
        kernel.product(a, b, dtype=torch.float32, into=total, overwrite=True)
        kernel.product(a, b, dtype=torch.float32, into=total, overwrite=False)
        torch.testing.assert_close(total.double(), 2 * truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())


def test_a_weight_gradient_is_that_of_what_was_not_rotated() -> None:
    """Both factors are turned by one matrix, which is not felt in their product: what is off is what four bits lose."""
    x = drawn(96, 64, seed=1)
    grad = drawn(96, 32, seed=2)
    a = nvfp4.cast(x, "input", rounding="nearest").columns
    b = nvfp4.cast(grad, "gradient", rounding="nearest").columns
    truth = grad.t() @ x
    assert (nvfp4.product(a, b, dtype=torch.float64) - truth).norm() < 0.2 * truth.norm()
    # of lines as they are, with one that is rotated, nothing is left
    other = nvfp4.cast(grad.t().contiguous(), "weight", rounding="nearest").rows
    assert (nvfp4.product(a, other, dtype=torch.float64) - truth).norm() > 0.9 * truth.norm()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("rows", [32, 72, 256])
def test_transformer_engine_is_asked_for_the_same_bytes(rows: int, role: Role, fake: Fake) -> None:
    """Its scales lie in larger matrices, of which what is behind them is not read."""
    if role == "weight" and rows % 32:
        pytest.skip("sides of weights are whole blocks, by a rule")
    x = (drawn(rows, 160) * 16).round().clamp(-255, 255).div(64).bfloat16()
    for columns in (True, False):
        found = te_nvfp4.cast(x, role, rounding="nearest", columns=columns)
        expected = nvfp4.cast(x, role, rounding="nearest", columns=columns)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one.scale, other.scale)
                torch.testing.assert_close(
                    nvfp4.dequantised(one, dtype=torch.float64), nvfp4.dequantised(other, dtype=torch.float64)
                )
    assert fake.casts == ["NVFP4Quantizer"] * 2


def test_tensors_without_numbers_need_no_package() -> None:
    x = torch.empty(64, 96, device="meta", dtype=torch.bfloat16)
    cast = te_nvfp4.cast(x, "gradient", rounding="stochastic")
    assert cast.columns.values.shape == (96, 32)
    assert te_nvfp4.product(cast.rows, cast.rows, dtype=torch.bfloat16).shape == (64, 64)


# What a run asks before it trains: one in the package's place that is right, and ones that are not.


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_right_is_trained_with(rounding: str, fake: Fake) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert nvfp4_check.difference(CPU, rounding) is None
    assert torch.equal(torch.get_rng_state(), before)


def with_casts(package: TransformerEngine, **wrong: Callable[..., Any]) -> TransformerEngine:
    """A package whose quantizer has other methods."""
    kind = type("Wrong", (package.pytorch.NVFP4Quantizer,), wrong)
    return replace(package, pytorch=type(package.pytorch)(**(vars(package.pytorch) | {"NVFP4Quantizer": kind})))


def told(package: TransformerEngine, monkeypatch: pytest.MonkeyPatch, rounding: str = "stochastic") -> str | None:
    monkeypatch.setattr(te_nvfp4, "transformer_engine", lambda: package)
    return nvfp4_check.difference(CPU, rounding)


STAND_IN = "tests.kernels.te"
CASTS = {
    "another amax": (
        Patch(STAND_IN, "amax = torch.stack([one.abs().max() for one in lines.values()])",
              "amax = 2 * torch.stack([one.abs().max() for one in lines.values()])"),
        "1 of 1 largest elements of rows alone of an input of (72, 160)",
    ),
    "scales of 1x16 where they are of 16x16": (
        Patch(STAND_IN, "        if self.squares:\n", "        if False:\n"),
        "scales of rows alone of a weight of (96, 160)",
    ),
    "columns that are not rotated": (
        Patch(STAND_IN, "            if self.rotates:\n", "            if False:\n"),
        "columns of an input of (72, 160)",
    ),
    "other signs": (
        Patch(STAND_IN, "signs[torch.tensor([3, 5, 6, 7, 8, 9, 10, 12, 14, 15])] = -1", "signs[3] = -1"),
        "columns of an input of (72, 160)",
    ),
    "the halves of a byte the other way": (
        Patch(STAND_IN, "return (codes[:, ::2] + 16 * codes[:, 1::2]).contiguous(), whole",
              "return (codes[:, 1::2] + 16 * codes[:, ::2]).contiguous(), whole"),
        "pairs of numbers of rows alone of an input of (72, 160)",
    ),
    "ties to the odd code": (
        Patch(STAND_IN, "tensor([0, 1, 0, 1, 0, 1, 0, 1])", "tensor([1, 0, 1, 0, 1, 0, 1, 0])"),
        "pairs of numbers of columns of an input of (72, 160)",
    ),
    "gradients that are rounded to nearest": (
        Patch(STAND_IN, "self.at_random = stochastic_rounding", "self.at_random = False"),
        "are rounded at random",
    ),
    "gradients that go up too often": (
        Patch(STAND_IN, "torch.rand(size.shape) < (size - grid[down]) / gap",
              "0.8 * torch.rand(size.shape) < (size - grid[down]) / gap"),
        "that are rounded at random do not go up as often as they have to, in the mean",
    ),
    "gradients that go up by a coin": (
        Patch(STAND_IN, "torch.rand(size.shape) < (size - grid[down]) / gap",
              "torch.rand(size.shape) < 0.5 * (size != grid[down])"),
        "that are rounded at random do not go up as often as they have to",
    ),
    "the same draws in each cast": (
        Patch(STAND_IN, "            gap = (grid[up] - grid[down]).clamp(min=1e-9)\n",
              "            gap = (grid[up] - grid[down]).clamp(min=1e-9)\n            torch.manual_seed(0)\n"),
        "rounded",
    ),
    "a number that goes to no neighbour": (
        Patch(STAND_IN, "< (size - grid[down]) / gap, up, down).to(torch.uint8)",
              "< (size - grid[down]) / gap, (up + 1).clamp(max=7), down).to(torch.uint8)"),
        "are rounded at random to no neighbour",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_other_casts_are_told(name: str, fake: Fake) -> None:
    patch, said = CASTS[name]
    with planted(patch):
        found = nvfp4_check.difference(CPU, "stochastic")
    assert found is not None
    assert said in found


def with_first(change: Callable[[NVFP4TensorStorage], None]) -> Callable[..., Any]:
    """Products whose first factor is another one."""

    def multiply(right: Callable[..., Any], a: NVFP4TensorStorage, b: NVFP4TensorStorage, **given: Any) -> Any:
        a = NVFP4TensorStorage(
            a._rowwise_data,
            a._rowwise_scale_inv.clone(),
            None,
            None,
            a._amax_rowwise.clone(),
            None,
            "e2m1",
            None,
            False,
        )
        change(a)
        return right(a, b, **given)

    return multiply


def other_amax(a: NVFP4TensorStorage) -> None:
    a._amax_rowwise *= 1.05


def neighbours_scales(a: NVFP4TensorStorage) -> None:
    blocks = a._rowwise_data.shape[1] // 8
    a._rowwise_scale_inv[:, :blocks] = a._rowwise_scale_inv[:, :blocks].roll(1, 1)


MULTIPLIED = {
    "another scale of the matrix": (with_first(other_amax), "numbers of the product forward"),
    "blocks by the scales of their neighbours": (with_first(neighbours_scales), "numbers of the product forward"),
    "a sum that is overwritten": (never_adds, "of 15360 numbers of the product weight gradient that is added"),
    "a sum in bf16": (sums_in_bf16, "numbers of the product weight gradient"),
    "a product that is refused": (refuses, "it fails: cuBLAS Error: the requested functionality is not supported"),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_other_products_are_told(name: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = MULTIPLIED[name]
    found = told(with_products(te_nvfp4.transformer_engine(), change), monkeypatch, "nearest")
    assert found.endswith(said)


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_gpu_computes_what_it_says(rounding: str) -> None:
    """On Blackwell alone: what a run asks before it trains."""
    needs_blackwell("nvfp4")
    assert nvfp4_check.difference(torch.device("cuda"), rounding) is None
