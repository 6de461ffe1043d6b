"""Experts in fp8 on a GPU: steps of a small mixture, compiled and not, beside bf16 and the reference's products."""

from typing import Any

import pytest
import torch

from tests.gpu.test_fp8 import fp8, losses

pytestmark = pytest.mark.gpu

EXPERTS: dict[str, Any] = {"n_experts": 8, "d_expert": 256, "every": 1, "top_k": 2, "router": {"z_loss": 0.001}}
# rows of whole tiles and of none: what is gathered and written in one pass
WIDE: dict[str, Any] = EXPERTS | {"d_expert": 288, "n_experts": 16, "top_k": 4}
RECIPES = ("tensorwise", "delayed", "rowwise")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's scaled grouped product is Hopper's")


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_mixture_learns_as_in_bf16(recipe: str, compile: str) -> None:
    """Experts through torch's scaled grouped products: routers, unequal numbers of tokens, the compiled activation."""
    plain = losses({"kind": "bf16"}, compile=compile, moe=EXPERTS)
    found = losses(fp8(recipe), compile=compile, moe=EXPERTS)
    # The first step differs by rounding alone, the next ones by what follows from it: 0.5 % at most in the third step
    # on an H100, where bf16 compiled and not differ by 0.4 %. What learns by heart then goes ways of its own: one step
    # later bf16 differs from itself by 1.0 %, and fp8 from itself, on another GPU, by 1.5 %.
    assert found[0] == pytest.approx(plain[0], rel=5e-3)
    assert found[0] != plain[0]
    assert found[2] == pytest.approx(plain[2], rel=1.5e-2)
    assert found[-1] < 0.65 * found[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_steps_of_a_mixture_are_those_of_the_reference(recipe: str) -> None:
    """The same numbers on the grid: only sums differ, and bf16's rounding of them."""
    fast = losses(fp8(recipe), compile="none", steps=2, moe=EXPERTS)
    plain = losses(fp8(recipe), compile="none", fast=False, steps=2, moe=EXPERTS)
    assert fast == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_what_is_written_in_one_pass_is_what_products_quantise(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are gathered in fp8, and gates that write it, beside rows that are there in bf16 first; the first step
    and those whose scales are known before. Gates round once in place of twice."""
    others = {"gated": "triton", "unpermute": "triton"}
    written = losses(fp8(recipe), compile="none", steps=4, moe=WIDE, others=others)
    monkeypatch.setattr("megaspec.parallelism.fp8._have_experts_write", lambda *_: None)
    plain = losses(fp8(recipe), compile="none", steps=4, moe=WIDE, others=others)
    # no scale is known before the first step: the same numbers
    assert written[0] == pytest.approx(plain[0], rel=1e-5)
    # then a gate's number goes to the next one of the grid where bf16's rounding takes it over the middle of two
    assert written[1:] == pytest.approx(plain[1:], rel=1e-2)
