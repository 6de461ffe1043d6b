"""Norms and gates by Triton on a GPU: layers compiled with them beside plain ones, and fp8 that they write."""

from typing import Any

import pytest

from tests.gpu.test_fp8 import losses

pytestmark = pytest.mark.gpu

PLAIN = {"norm": "reference", "gated": "reference"}
FUSED = {"norm": "triton", "gated": "triton"}
FP8 = {
    "kind": "fp8",
    "recipe": "delayed",
    "format": "hybrid",
    "amax_history": 4,
    "first_layers_bf16": 1,
    "last_layers_bf16": 0,
}


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("precision", [{"kind": "bf16"}, FP8], ids=["bf16", "fp8 delayed"])
def test_a_small_model_learns_as_with_plain_operations(precision: dict[str, Any], compile: str) -> None:
    """The first step differs by rounding alone; later ones, whose fp8 the kernels write, by what follows from it."""
    plain = losses(precision, compile=compile, steps=6, others=PLAIN)
    fused = losses(precision, compile=compile, steps=6, others=FUSED)
    assert fused[0] == pytest.approx(plain[0], rel=2e-3)
    assert fused[:4] == pytest.approx(plain[:4], rel=3e-2)
    assert fused[-1] < 0.95 * fused[0]


@pytest.mark.parametrize(
    "recompute", [{"kind": "full"}, {"kind": "selective", "parts": ["norm", "activation"]}], ids=str
)
def test_computed_again_is_the_same(recompute: dict[str, Any]) -> None:
    kept = losses({"kind": "bf16"}, compile="block", steps=3, others=FUSED)
    again = losses({"kind": "bf16"}, compile="block", steps=3, others=FUSED, recompute=recompute)
    assert again == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("parts", [["core_attention"], ["mlp"], ["norm"], ["activation"]], ids=str)
def test_who_is_not_computed_again_alone_goes_on_writing_fp8(parts: list[str], compile: str) -> None:
    """Beside what is: the same numbers but for how compiled code rounds."""
    kept = losses(FP8, compile=compile, steps=4, others=FUSED)
    recompute = {"kind": "selective", "parts": parts}
    again = losses(FP8, compile=compile, steps=4, others=FUSED, recompute=recompute)
    assert again[0] == pytest.approx(kept[0], rel=1e-3)
    assert again == pytest.approx(kept, rel=3e-2)
