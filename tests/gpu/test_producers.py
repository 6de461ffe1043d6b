"""Norms, gates and rotations by Triton on a GPU: layers compiled with them beside plain ones, and fp8 that they
write."""

from typing import Any

import pytest
import torch

from megaspec_kernels.fp8_cast.reference import cast
from megaspec_kernels.norm.bench import RMS
from megaspec_kernels.norm.triton import norm_forward_in_fp8
from megaspec_kernels.rope import triton as rope
from megaspec_kernels.rope.bench import angles
from megaspec_kernels.rope.form import Heads
from tests.gpu.test_fp8 import losses
from tests.kernels.fp8_producers import known_of
from tests.ranks import RankPool

pytestmark = pytest.mark.gpu

PLAIN = {"norm": "reference", "gated": "reference", "rope": "reference"}
FUSED = {"norm": "triton", "gated": "triton", "rope": "triton"}
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


def test_rotations_alone_write_what_layers_quantise() -> None:
    """Nothing else is by Triton, so that what differs is the rotation's."""
    plain = losses(FP8, compile="block", steps=4, others=PLAIN)
    fused = losses(FP8, compile="block", steps=4, others=PLAIN | {"rope": "triton"})
    assert fused[0] == pytest.approx(plain[0], rel=1e-3)
    assert fused == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("format", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
# tiles that are full, those that are not, a part of each head that turns, and elements one by one
@pytest.mark.parametrize(
    ("B", "T", "heads", "R"),
    [
        (2, 4096, Heads(32, 8, 128), 128),
        (3, 2080, Heads(16, 4, 64), 64),
        (1, 1040, Heads(8, 2, 96), 48),
        (2, 1001, Heads(4, 2, 80), 80),
    ],
    ids=str,
)
def test_rows_and_columns_of_the_rotation_are_the_same_bytes(
    B: int, T: int, heads: Heads, R: int, format: torch.dtype
) -> None:
    """Of large gradients, which ptxas once mixed up between both: quantised of the kernel's own numbers in fp32, but
    for a few that lie between two; values, which do not turn, to the bit."""
    draw = torch.Generator("cuda").manual_seed(1)
    grads = tuple(
        torch.randn(B, T, count, heads.size, device="cuda", generator=draw).bfloat16()
        for count in (heads.queries, heads.keys, heads.keys)
    )
    cos, sin = angles(T, half=R // 2, device=torch.device("cuda"))
    # of what e5m2 and e4m3 hold at most, a few are beyond it
    known = known_of(2.0**-14 if format == torch.float8_e5m2 else 2.0**-7, format, torch.device("cuda"))
    written = rope.rope_backward_in_fp8(*grads, cos, sin, known=known)
    wide = rope.rope_backward(*(grad.float() for grad in grads), cos, sin).flatten(0, 1)
    seen = torch.zeros(1, device="cuda")
    saturated = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows, _ = cast(wide, known.scale.view(1, 1), block=(None, None), dtype=format, seen=seen, saturated=saturated)
    assert torch.equal(written.columns.view(torch.uint8), written.rows.view(torch.uint8).t())
    differs = written.rows.view(torch.uint8) != rows.view(torch.uint8)
    assert differs.double().mean() < 1e-4
    assert not differs[:, heads.turned * heads.size :].any()
    assert int(known.saturated) > 0
    assert abs(int(known.saturated) - int(saturated)) <= 2
    torch.testing.assert_close(known.seen, seen, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("M", "D"), [(4096, 4096), (2080, 2880), (1001, 80)], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_rows_of_a_norm_alone_are_those_beside_columns(M: int, D: int, adds: bool) -> None:
    """In tiles of another size: but for a few numbers that lie between two, since a row's squares are added in another
    order."""
    draw = torch.Generator("cuda").manual_seed(1)
    x, term = (torch.randn(M, D, device="cuda", generator=draw).bfloat16() for _ in range(2))
    weight = torch.randn(D, device="cuda", generator=draw).bfloat16()
    found = {}
    for columns in (False, True):
        # a few are beyond what e4m3 holds
        known = known_of(2.0**-7, torch.float8_e4m3fn, torch.device("cuda"))
        made = norm_forward_in_fp8(x, term if adds else None, weight, None, RMS.code, known=known, columns=columns)
        found[columns] = (made, known)
    made, known = found[False]
    both, known_of_both = found[True]
    assert made.written.columns.shape == (0,)
    assert torch.equal(made.total, both.total)
    differs = made.written.rows.view(torch.uint8) != both.written.rows.view(torch.uint8)
    assert differs.double().mean() < 1e-4
    assert int(known.saturated) > 0
    assert abs(int(known.saturated) - int(known_of_both.saturated)) <= 2
    torch.testing.assert_close(known.seen, known_of_both.seen, rtol=1e-6, atol=0.0)


def learn_on_two(rank: int, others: dict[str, str], compile: str) -> list[float]:
    return losses(FP8, compile=compile, steps=4, others=others, tp=2, rank=rank)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    ("compile", "writers"),
    [("block", {"gated": "triton", "rope": "triton"}), ("block", {"norm": "triton"}), ("none", FUSED)],
    ids=str,
)
def test_two_ranks_write_what_their_layers_quantise(compile: str, writers: dict[str, str], gpu_pool: RankPool) -> None:
    """Tensor-parallel layers, with sequences divided: norms write what is gathered, gates and rotations what is
    not."""
    plain = gpu_pool.run(learn_on_two, PLAIN, compile, ranks=2)
    fused = gpu_pool.run(learn_on_two, PLAIN | writers, compile, ranks=2)
    assert fused[0] == fused[1]
    assert fused[0][0] == pytest.approx(plain[0][0], rel=2e-3)
    assert fused[0] == pytest.approx(plain[0], rel=3e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("compile", ["none", "block"])
def test_two_ranks_that_write_all_are_as_one(compile: str, gpu_pool: RankPool) -> None:
    """The same scales, so that how bf16 rounds sums is all that differs."""
    one = losses(FP8, compile=compile, steps=4, others=FUSED)
    two = gpu_pool.run(learn_on_two, FUSED, compile, ranks=2)
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=2e-3)
    assert two[0][3] == pytest.approx(one[3], rel=3e-2)
